"""The side of the grader that runs a student's code. It knows no expected value.

grade.py starts it once, as `python -I runner.py`. It imports torch, and then forks a
process for every job that it reads from stdin. The process is enclosed (sandbox.py),
imports one of the student's files, calls functions with the inputs of the job, and
writes what they return, as JSON, into a file that was open before. Each job is answered
by a line on stdout that says how its process ended.
"""

import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

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


def on_ranks(function: Any, arguments: list[list[Any]]) -> list[Any]:
    """The function on several ranks, each in a thread, with its rank and the group."""
    group = toy.Group(len(arguments))
    results: list[Any] = [None] * len(arguments)

    def one(rank: int) -> None:
        try:
            results[rank] = encoded(function(*arguments[rank], rank, group))
        except BaseException as error:
            results[rank] = failure(error)
            group.barrier.abort()  # The others need not wait for this one.

    threads = [threading.Thread(target=one, args=[rank]) for rank in range(group.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def failure(error: BaseException) -> dict[str, str]:
    return {"error": type(error).__name__, "message": str(error)[:300]}


def answer(call: dict[str, Any], module: Any) -> dict[str, Any]:
    """What one call returned, or raised."""
    try:
        function = getattr(module, call["function"])
        if "ranks" in call:
            return {"value": on_ranks(function, decoded(call["ranks"]))}
        arguments = decoded(call.get("args", []))
        keywords = {
            name: decoded(value) for name, value in call.get("kwargs", {}).items()
        }
        result = function(*arguments, **keywords)
        inputs = leaves(arguments) + leaves(keywords)
        return {"value": encoded(result), "gradients": gradients(result, inputs)}
    except BaseException as error:
        return failure(error)


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
    if not job["trusted"]:
        readable = [Path(path) for path in [*SYSTEM, *PYTHON, folder]]
        readable = [path for path in readable if path.exists()]
        sandbox.enclose(
            readable, job["cpu_seconds"], job["memory_bytes"], job["file_bytes"]
        )
    else:
        sandbox.limit(job["cpu_seconds"], job["memory_bytes"], job["file_bytes"])
    try:
        module = importlib.import_module(job["module"])
        answers = [answer(call, module) for call in job["calls"]]
    except BaseException as error:
        answers = [failure(error) | {"while": "importing"}]
    os.write(output, json.dumps(answers).encode())


def wait_for(process: int, seconds: float) -> str:
    """How the process ended; one that takes too long is killed."""
    handle = os.pidfd_open(process)
    ended, _, _ = select.select([handle], [], [], seconds)
    if not ended:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    os.close(handle)
    if not ended:
        return "waited"
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
        print(wait_for(process, job["wall_seconds"]), flush=True)


if __name__ == "__main__":
    main()
