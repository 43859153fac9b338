"""The side of the grader that runs a student's code. It knows no expected value.

grade.py starts it once, as `python -I runner.py`. It imports torch, and then forks a
process for every job that it reads from stdin. The process is enclosed (sandbox.py),
imports one of the student's files, calls a function with the inputs of the job, and
writes what that returns, as JSON, into a file that was open before. Each job is
answered on stdout: how its process ended, its seconds of computing, and that file.
"""

import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

# What students import is imported here once: it takes longer than all of their items.
import numpy  # noqa: F401
import scipy.stats  # noqa: F401
import torch

# `python -I` has not put the folder of this file on sys.path.
spec = importlib.util.spec_from_file_location(
    "sandbox", Path(__file__).with_name("sandbox.py")
)
sandbox = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sandbox)

# What Python and torch are made of. The student's folder is added for each job.
SYSTEM = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
PYTHON = [sys.prefix, sys.base_prefix]


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


def gradients(result: Any, arguments: list[Any]) -> list[Any]:
    """The gradient of the sum of the result to each argument that asks for one."""
    leaves = [
        each
        for each in arguments
        if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    found = [None] * len(leaves)
    if isinstance(result, torch.Tensor) and result.requires_grad and leaves:
        found = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    ]


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


def answers_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What each call returned. An error is the last answer."""
    answers: list[dict[str, Any]] = []
    try:
        function = getattr(importlib.import_module(job["module"]), job["function"])
        if job["function"] == "update":
            function = partial(importlib.import_module("toy").run_ranks, function)
        for arguments in job["calls"]:
            value = function(*arguments)
            found = gradients(value, arguments)
            answers.append({"value": plain(value), "gradients": plain(found)})
    except BaseException as error:
        answers.append({"error": what_was_raised(error, job["folder"])})
    return answers


def run(job: dict[str, Any], output: BinaryIO) -> None:
    """In a process of its own: enclose it, import the file, answer all calls."""
    sandbox.end_with_parent()
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGXCPU, stop_computing)
    sandbox.limit(job["cpu_seconds"], memory_bytes=3 * 2**30, file_bytes=4 * 2**20)
    if not job["trusted"]:
        readable = [Path(path) for path in [*SYSTEM, *PYTHON, job["folder"]]]
        sandbox.enclose([path for path in readable if path.exists()])
    output.write(json.dumps(answers_of(job)).encode())
    output.flush()


def wait_for(process: int, seconds: float) -> tuple[str, float]:
    """How the process ended, and its seconds of computing.

    "late" if it was still there after so many seconds and was killed; the name of the
    signal that killed it; or "".
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
    return how, usage.ru_utime + usage.ru_stime


def main() -> None:
    sandbox.end_with_parent()
    # What torch sets up at its first use must not be set up in every process.
    torch.ones(2, 2, requires_grad=True).log_softmax(dim=-1).sum().backward()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        with tempfile.TemporaryFile() as output:
            process = os.fork()
            if process == 0:
                try:
                    run(job, output)
                finally:
                    # No cleaning up: neither the student's atexit nor this loop.
                    os._exit(0)
            how, cpu_seconds = wait_for(process, job["wall_seconds"])
            output.seek(0)
            pickle.dump((how, cpu_seconds, output.read()), sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
