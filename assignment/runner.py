"""The side of the grader that runs a student's code. It knows no expected value.

grade.py starts it once, as `python -I runner.py`. It imports torch, and then forks a
process for every job that it reads from stdin. The process is enclosed (sandbox.py),
imports one of the student's files, calls functions with the inputs of the job, and
writes what they return, as JSON, into a file that was open before. Each job is answered
by a line on stdout that says how its process ended, and after how much computing.
"""

import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# What students import is imported here once: it takes longer than all of their items.
import numpy  # noqa: F401
import scipy.stats  # noqa: F401
import torch

HERE = Path(__file__).resolve().parent


def load(path: Path) -> Any:
    """The module of a file, of which its folder is not on sys.path."""
    spec = importlib.util.spec_from_file_location(f"grader_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sandbox = load(HERE / "sandbox.py")
toy = load(HERE / "starter/toy.py")

# What Python and torch are made of. The student's folder is added for each job.
SYSTEM = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
PYTHON = [sys.prefix, sys.base_prefix]


def decoded(value: Any) -> Any:
    """What the JSON of a job stands for: tensors, micro-batches, numbers and lists."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "micro_batch" in value:
        return toy.MicroBatch(*decoded(value["micro_batch"]))
    dtype = getattr(torch, value["dtype"])
    tensor = torch.tensor(value["tensor"], dtype=dtype).view(value["shape"])
    return tensor.requires_grad_(value["grad"])


def encoded(value: Any) -> Any:
    """The JSON of what a function returned."""
    if isinstance(value, torch.Tensor):
        # Not on a GPU, and of a dtype that a list can show.
        plain = value.detach().cpu()
        return {
            "tensor": plain.flatten().tolist(),
            "dtype": str(plain.dtype).removeprefix("torch."),
            "shape": list(plain.shape),
            "grad": value.requires_grad,
        }
    if isinstance(value, (list, tuple)):
        return [encoded(each) for each in value]
    if isinstance(value, dict):
        return {"dict": {str(name): encoded(each) for name, each in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"of type": type(value).__name__}


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors among the inputs that a gradient is asked for."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return []


def gradients(result: Any, inputs: list[torch.Tensor]) -> list[Any]:
    """The gradient of the (sum of the first) tensor returned, to each of the inputs."""
    output = result[0] if isinstance(result, tuple) else result
    found: tuple[torch.Tensor | None, ...] = (None,) * len(inputs)
    if isinstance(output, torch.Tensor) and output.requires_grad and inputs:
        found = torch.autograd.grad(output.sum(), inputs, allow_unused=True)
    return [encoded(gradient) for gradient in found]


class OutOfTime(BaseException):
    """The process has computed for as long as it may."""


def stop_computing(*_: Any) -> None:
    """Raised in the student's code, so that the line is known in which it was."""
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    raise OutOfTime


def failure(error: BaseException, folder: Path) -> dict[str, str]:
    """An error, and the last line of the student's files that it came through."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.parent == folder:
            where = f"{path.name}, line {line}"
    message = str(error)[:300]
    return {"error": type(error).__name__, "message": message, "where": where}


def on_ranks(function: Any, arguments: list[list[Any]], folder: Path) -> list[Any]:
    """What the function returned on each of several ranks, or raised there."""
    return [
        failure(result, folder)
        if isinstance(result, BaseException)
        else encoded(result)
        for result in toy.run_on_ranks(function, arguments)
    ]


def answer(call: dict[str, Any], module: Any, folder: Path) -> dict[str, Any]:
    """What one call returned, or raised."""
    try:
        function = getattr(module, call["function"])
        if "ranks" in call:
            return {"value": on_ranks(function, decoded(call["ranks"]), folder)}
        arguments = decoded(call.get("args", []))
        keywords = {
            name: decoded(value) for name, value in call.get("kwargs", {}).items()
        }
        result = function(*arguments, **keywords)
        inputs = leaves(arguments) + leaves(keywords)
        return {"value": encoded(result), "gradients": gradients(result, inputs)}
    except BaseException as error:
        return failure(error, folder)


def answers_of(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The answers to all calls of a job, or one if there are no more."""
    try:
        module = importlib.import_module(job["module"])
    except BaseException as error:
        return [failure(error, folder) | {"while": "importing"}]
    answers = []
    for call in job["calls"]:
        answers.append(answer(call, module, folder))
        if answers[-1].get("error") == OutOfTime.__name__:
            return [answers[-1] | {"while": call["function"]}]
    return answers


def run(job: dict[str, Any]) -> None:
    """In a process of its own: enclose it, import the file, answer all calls."""
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    printed = os.open(job["printed"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout.reconfigure(line_buffering=True)
    folder = Path(job["folder"])
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGXCPU, stop_computing)
    if not job["trusted"]:
        readable = [Path(path) for path in [*SYSTEM, *PYTHON, folder]]
        readable = [path for path in readable if path.exists()]
        sandbox.enclose(
            readable, job["cpu_seconds"], job["memory_bytes"], job["file_bytes"]
        )
    else:
        sandbox.limit(job["cpu_seconds"], job["memory_bytes"], job["file_bytes"])
    os.write(output, json.dumps(answers_of(job, folder)).encode())


LOOK_EVERY = 0.1  # seconds


def wait_for(process: int, sleep_seconds: float, wall_seconds: float) -> dict[str, Any]:
    """How the process ended, and its seconds of computing.

    One whose threads all sleep for long is killed ("slept"): that is the code's doing.
    One that is neither asleep nor done for very long is killed too ("waited"), but it
    is the machine that has not let it compute.
    """
    handle = os.pidfd_open(process)
    begin = time.monotonic()
    asleep = 0.0
    killed = ""
    while not killed and not select.select([handle], [], [], LOOK_EVERY)[0]:
        asleep += LOOK_EVERY if is_asleep(process) else 0.0
        if asleep > sleep_seconds:
            killed = "slept"
        elif time.monotonic() - begin > wall_seconds:
            killed = "waited"
    if killed:
        os.kill(process, signal.SIGKILL)
    _, status, usage = os.wait4(process, 0)
    os.close(handle)
    ended = killed or how_it_ended(status)
    return {"ended": ended, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def is_asleep(process: int) -> bool:
    """Whether all threads sleep: none computes, waits for a core or for a disk."""
    states = []
    for thread in Path(f"/proc/{process}/task").glob("*/stat"):
        try:
            # The state follows the name, which is in brackets and may hold any.
            states.append(thread.read_text().rpartition(")")[2].split()[0])
        except OSError:
            return False
    return bool(states) and set(states) == {"S"}


def how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "ended" if os.WEXITSTATUS(status) == 0 else "left"


def main() -> None:
    # One thread is set by OMP_NUM_THREADS: after torch.set_num_threads a fork could not
    # go backward in another thread.
    # What torch sets up at its first use must not be set up in every process.
    torch.ones(2, 2, requires_grad=True).log_softmax(dim=-1).sum().backward()
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            status = 1
            try:
                run(job)
                status = 0
            finally:
                # No cleaning up: neither the student's atexit nor the grader's pipes.
                os._exit(status)
        ended = wait_for(process, job["sleep_seconds"], job["wall_seconds"])
        print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
