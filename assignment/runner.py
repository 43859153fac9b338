"""Runs the students' code for grade.py, without knowing any expected value.

grade.py starts this process once. It imports torch, and then reads jobs from stdin. For
each job it imports one of the student's files, calls a function with the job's inputs,
and writes the results as JSON to a file that grade.py reads. On stdout it reports how
the job ended and how many seconds of CPU time the job took.

A job runs in a process of its own, which is forked and enclosed (sandbox.py). With
--trust it runs in this process, on any system.
"""

import contextlib
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# Importing these takes longer than all items of a student, so it is done once, here.
import numpy  # noqa: F401
import scipy.stats  # noqa: F401
import torch

HERE = Path(__file__).resolve().parent


# This is loaded as a dict, not as a module that a student's code could find.
run_rank = runpy.run_path(str(HERE / "starter/toy.py"))["run_rank"]


def plain(value: Any) -> Any:
    """Return a result in a form that JSON can hold, or else only its type."""
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
    """Return d result / d leaf for each leaf, or 0 if the result does not depend on it.

    result is [...] and each leaf [...] or [..., K]. Entry [i] or [i, k] of the returned
    tensor is the derivative of result[i] with respect to that entry of the leaf.
    """
    found = [torch.zeros_like(leaf) for leaf in leaves]
    # The function may have switched off requires_grad of its inputs.
    active = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    if isinstance(result, torch.Tensor) and result.requires_grad and active:
        # Entries have different weights, so a function that averages them is noticed.
        weight = torch.linspace(1, 2, result.numel(), dtype=result.dtype)
        weight = weight.reshape(result.shape)
        inputs = [leaves[i] for i in active]
        results = torch.autograd.grad(
            (result * weight).sum(), inputs, materialize_grads=True
        )
        for i, gradient in zip(active, results, strict=True):
            if gradient.shape[: weight.dim()] == weight.shape:
                extra = (1,) * (gradient.dim() - weight.dim())
                gradient = gradient / weight.reshape(weight.shape + extra)
            found[i] = gradient
    return found


class OutOfTime(BaseException):
    """it computed for too long and was stopped"""


def stop_computing(*_: Any) -> None:
    """Raise OutOfTime inside the student's code, so that its traceback has the line."""
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    raise OutOfTime(OutOfTime.__doc__)


def describe(error: BaseException, folder: str) -> dict[str, Any]:
    """Return an error's type, its message, and where in the student's code it arose."""
    answer = {"error": type(error).__name__, "message": str(error)[:300], "line": ""}
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if str(path.parent) == folder:
            answer["line"] = f"{path.name}, line {line}"
    return answer


def answer_of(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """Call a function, and return its result and its arguments' gradients."""
    leaves = [x for x in arguments if getattr(x, "requires_grad", False)]
    value = function(*arguments)
    found = gradients(value, leaves)
    return {"value": plain(value), "gradients": plain(found)}


def answers_of(job: dict[str, Any]) -> bytes:
    """Return the result of each call, as JSON. After an error there are no more."""
    answers: list[dict[str, Any]] = []
    try:
        function = getattr(importlib.import_module(job["module"]), job["function"])
        if job["function"] == "update":
            function = partial(run_rank, function)
        for arguments in job["calls"]:
            answers.append(answer_of(function, arguments))
    except BaseException as error:
        answers.append(describe(error, job["folder"]))
    return json.dumps(answers).encode()


def run_here(job: dict[str, Any]) -> tuple[str, float]:
    """Run trusted code in this process, without limits."""
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
    """Run a student's code in a process of its own, and wait for it."""
    # This pipe reports a failure of the enclosure. It is closed before the student's
    # code starts, so the student's code cannot report such a failure.
    failures, failure = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            run_as_child(job, failure)
        finally:
            # Skip main's loop and all clean-up, such as the student's atexit functions.
            os._exit(0)
    os.close(failure)
    ending, cpu_seconds = wait_for(process, job["wall_seconds"], job["idle_seconds"])
    reason = os.read(failures, 500).decode(errors="replace")
    os.close(failures)
    return f"could not be enclosed: {reason}" if reason else ending, cpu_seconds


def run_as_child(job: dict[str, Any], failure: int) -> None:
    """Enclose this process, import the student's file and answer all calls."""
    try:
        nothing = os.open("/dev/null", os.O_RDONLY)
        printed = os.open(job["printed"], os.O_WRONLY | os.O_CREAT)
        answers = os.open(job["answers"], os.O_WRONLY | os.O_CREAT)
        os.dup2(failure, 100)
        for number, file in enumerate((nothing, printed, printed, answers)):
            os.dup2(file, number)
        failure = os.dup2(100, 4)
        os.closerange(5, os.sysconf("SC_OPEN_MAX"))
        os.chdir(job["folder"])
        sandbox.limit(job["cpu_seconds"], 2**30, file_bytes=4 * 2**20)
        sandbox.enclose(job["folder"], become_nobody=job["become_nobody"])
    except Exception as error:
        os.write(failure, f"{error!r}".encode())
        return
    os.close(failure)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    sys.path.insert(0, job["folder"])
    # The student's code must not find this module, whose functions it could replace.
    sys.modules["__main__"] = ModuleType("__main__")
    signal.signal(signal.SIGXCPU, stop_computing)
    written = memoryview(answers_of(job))
    while written:
        written = written[os.write(3, written) :]


def wait_for(
    process: int, wall_seconds: float, idle_seconds: float
) -> tuple[str, float]:
    """Wait for a process. Return how it ended, and how many CPU seconds it took.

    The ending is "" if it exited, the name of the signal that killed it, "late" if it
    was killed here after wall_seconds, or "idle" if it was killed here because it slept
    for idle_seconds.
    """
    handle = os.pidfd_open(process)
    ending, now = "", time.monotonic()
    end, idle_end = now + wall_seconds, now + idle_seconds
    while not select.select([handle], [], [], min(1, wall_seconds))[0]:
        now = time.monotonic()
        # The state follows the name, which is in parentheses. S means that it sleeps.
        status = Path(f"/proc/{process}/stat").read_text()
        if status.rpartition(")")[2].split()[0] != "S":
            idle_end = now + idle_seconds
        if now > min(end, idle_end):
            ending = "late" if now > end else "idle"
            os.kill(process, signal.SIGKILL)
            break
    os.close(handle)
    _, status, usage = os.wait4(process, 0)
    if not ending and os.WIFSIGNALED(status):
        ending = signal.Signals(os.WTERMSIG(status)).name
    return ending, usage.ru_utime + usage.ru_stime


def main() -> None:
    run = run_here if "--trust" in sys.argv else run_enclosed
    if run is run_enclosed:
        sandbox.end_with_parent()
    sys.dont_write_bytecode = True
    # torch sets up its autograd at the first use. Do it once, not in every process.
    torch.ones(2, 2, requires_grad=True).log_softmax(dim=-1).sum().backward()
    # With --trust, a student's code may replace sys.stdin and sys.stdout.
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
        sandbox = SimpleNamespace(**runpy.run_path(str(HERE / "sandbox.py")))
    main()
