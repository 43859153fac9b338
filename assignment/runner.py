"""The side of the grader that runs a student's code. It knows no expected value.

grade.py starts it once. It imports torch, and reads jobs from stdin: import one of the
student's files, call a function with the inputs of the job, and write what that
returns, as JSON, into a file that grade.py reads. Each job is answered on stdout: how
it ended, and its seconds of computing.

A job runs in a process of its own, which is forked and enclosed (sandbox.py). With
--trust it runs here, on any system.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# What students import is imported here once: it takes longer than all of their items.
import numpy  # noqa: F401
import scipy.stats  # noqa: F401
import torch

HERE = Path(__file__).resolve().parent
# The exit status of a process that could not be enclosed.
NOT_ENCLOSED = 77


def load(name: str, path: Path) -> ModuleType:
    """The module of a file, which is on no path that a student could change."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The grader's own: that of the student's process may have been changed.
run_ranks = load("toy of the grader", HERE / "starter/toy.py").run_ranks


def plain(value: Any) -> Any:
    """What a function returned, as JSON can hold it; anything else as its type."""
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype}".removeprefix("torch.") + " tensor"
        if value.requires_grad:
            kind += " with a gradient"
        return {"tensor": value.tolist(), "kind": kind}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"kind": type(value).__name__}


def gradients(result: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradient of the sum of the result to each leaf; 0 where it has none."""
    found = [torch.zeros_like(leaf) for leaf in leaves]
    # The function may have changed what asks for a gradient.
    asking = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    if isinstance(result, torch.Tensor) and result.requires_grad and asking:
        inputs = [leaves[i] for i in asking]
        of_inputs = torch.autograd.grad(result.sum(), inputs, allow_unused=True)
        for i, gradient in zip(asking, of_inputs, strict=True):
            found[i] = found[i] if gradient is None else gradient
    return found


class OutOfTime(BaseException):
    """it computed for too long and was stopped"""


def stop_computing(*_: Any) -> None:
    """Raised in the student's code, so that the line is known in which it was."""
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    raise OutOfTime(OutOfTime.__doc__)


def what_was_raised(error: BaseException, folder: str) -> str:
    """An error, and the last line of the student's files that it came through."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if str(path.parent) == folder:
            where = f" ({path.name}, line {line})"
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


def answer_of(
    name: str, function: Callable[..., Any], arguments: list[Any]
) -> dict[str, Any]:
    """What a call returned, and its gradients; of `update` what run_ranks tells."""
    leaves = [x for x in arguments if getattr(x, "requires_grad", False)]
    if name == "update":
        value = run_ranks(function, *arguments)
    else:
        value = function(*arguments)
    found = gradients(value, leaves)
    return {"value": plain(value), "gradients": plain(found)}


def answers_of(job: dict[str, Any]) -> bytes:
    """What each call returned, as JSON. An error is the last answer."""
    answers: list[dict[str, Any]] = []
    try:
        function = getattr(importlib.import_module(job["module"]), job["function"])
        for arguments in job["calls"]:
            answers.append(answer_of(job["function"], function, arguments))
    except BaseException as error:
        answers.append({"error": what_was_raised(error, job["folder"])})
    return json.dumps(answers).encode()


def run_here(job: dict[str, Any]) -> tuple[str, float]:
    """Trusted code: in this process, without a limit."""
    began = time.process_time()
    sys.path[0] = job["folder"]
    importlib.invalidate_caches()
    with (
        open(job["printed"], "w", encoding="utf-8") as printed,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        Path(job["answers"]).write_bytes(answers_of(job))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(job["folder"]):
            del sys.modules[name]
    return "", time.process_time() - began


def run_enclosed(job: dict[str, Any]) -> tuple[str, float]:
    """A process of its own, which is waited for."""
    process = os.fork()
    if process == 0:
        try:
            in_the_enclosure(job)
        finally:
            # No cleaning up: neither the student's atexit nor this loop.
            os._exit(0)
    return wait_for(process, job["wall_seconds"])


def in_the_enclosure(job: dict[str, Any]) -> None:
    """Enclose this process, import the file, answer all calls."""
    try:
        nothing = os.open("/dev/null", os.O_RDONLY)
        printed = os.open(job["printed"], os.O_WRONLY | os.O_CREAT)
        answers = os.open(job["answers"], os.O_WRONLY | os.O_CREAT)
        for number, file in enumerate((nothing, printed, printed, answers)):
            os.dup2(file, number)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.chdir(job["folder"])
        sandbox.limit(job["cpu_seconds"], 2**30, file_bytes=4 * 2**20)
        sandbox.enclose(job["folder"], become_nobody=job["become_nobody"])
    except OSError:
        traceback.print_exc()
        os._exit(NOT_ENCLOSED)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    sys.path.insert(0, job["folder"])
    signal.signal(signal.SIGXCPU, stop_computing)
    written = memoryview(answers_of(job))
    while written:
        written = written[os.write(3, written) :]


def wait_for(process: int, seconds: float) -> tuple[str, float]:
    """How the process ended, and its seconds of computing.

    "late" if it was still there after so many seconds and was killed; the name of the
    signal that killed it; "not enclosed"; or "".
    """
    handle = os.pidfd_open(process)
    how = ""
    if not select.select([handle], [], [], seconds)[0]:
        how = "late"
        os.kill(process, signal.SIGKILL)
    os.close(handle)
    _, status, usage = os.wait4(process, 0)
    if not how and os.WIFSIGNALED(status):
        how = signal.Signals(os.WTERMSIG(status)).name
    elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_ENCLOSED:
        how = "not enclosed"
    return how, usage.ru_utime + usage.ru_stime


def main() -> None:
    run = run_here if "--trust" in sys.argv else run_enclosed
    if run is run_enclosed:
        sandbox.end_with_parent()
    sys.dont_write_bytecode = True
    # What torch sets up at its first use must not be set up in every process.
    torch.ones(2, 2, requires_grad=True).log_softmax(dim=-1).sum().backward()
    # Its own names for the pipes to grade.py, whatever becomes of sys.stdout.
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        pickle.dump(run(job), results)
        results.flush()


if __name__ == "__main__":
    if "--trust" not in sys.argv:
        sandbox = load("sandbox", HERE / "sandbox.py")
    main()
