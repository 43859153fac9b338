r"""Whether two formulas are equal: sympy, in processes that the kernel can kill.

sympy computes 98^{97^{96}} until memory runs out, in one call that no thread, exception
or signal handler can interrupt.

So `equal_formulas` runs this file once for each batch. That process, the judge, loads
answers/formulas.py and then forks one child for each pair, a few at a time. A child
compares its pair and tells the verdict by its exit code. It has LIMIT seconds of CPU
time, which waiting for a core does not use up, and MEMORY bytes. A child that meets one
of these limits has found that the formulas are not equal. Anything else that ends a
child, and a judge that cannot work, is an error and never a verdict.

A verdict depends on its pair alone: every child begins as the same copy of the judge.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 3.0  # seconds of CPU time; honest pairs need 0.08 as a rule, 0.8 at most
MEMORY = 2**29  # bytes of address space, of which the judge itself has an eighth
WORKERS = 4  # children at once

# The exit codes of a child. Python's own are 0, 1 and 2.
EQUAL = 10
UNEQUAL = 11
# What ends a child at a limit: the timer, the stack, or memory.
AT_A_LIMIT = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)

# Comparing these loads what is needed, and shows that it works.
EQUAL_PAIRS = [
    (r"\frac{1}{2}", "0.5"),
    (r"\{1, \sqrt{12}\}", r"2\sqrt{3}, 1"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("x^2+2x+1", "(x+1)^2"),
]


def equal_formulas(pairs: list[tuple[str, str]]) -> list[bool]:
    """Whether gold and answer, both LaTeX, are equal, for each pair.

    Raises RuntimeError, in one sentence, if the judge cannot work on this machine.
    """
    done = subprocess.run(
        [sys.executable, "-m", "answers.judge", str(os.getpid())],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0"},  # by which sympy orders its sets
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}"
        raise RuntimeError(f"formulas cannot be compared by {__file__}: {reason}")
    return json.loads(done.stdout)


def main() -> None:
    """The judge: pairs as JSON on stdin, verdicts as JSON on stdout."""
    end_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for gold, answer in EQUAL_PAIRS:
        if not equal(gold, answer):
            sys.exit(
                f"sympy does not find {gold} and {answer} to be equal: install the "
                "versions of requirements.txt"
            )
    gc.freeze()  # a garbage collection in a child would copy the judge's memory
    print(json.dumps(verdicts_on(json.load(sys.stdin))))


def verdicts_on(pairs: list[list[str]]) -> list[bool]:
    """Whether [gold, answer] are equal, for each pair, found by a child of its own."""
    verdicts = {}
    waiting = list(enumerate(pairs))
    running = {}  # process id: index of its pair
    while waiting or running:
        if waiting and len(running) < WORKERS:
            index, (gold, answer) = waiting.pop()
            running[start_child(gold, answer)] = index
            continue
        process, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code not in (EQUAL, UNEQUAL) and -code not in AT_A_LIMIT:
            sys.exit(f"a comparison ended with exit code {code}; memory may be short")
        verdicts[running.pop(process)] = code == EQUAL
    return [verdicts[index] for index in range(len(pairs))]


def start_child(gold: str, answer: str) -> int:
    """The id of a new process that compares one pair and exits with its verdict."""
    judge = os.getpid()
    process = os.fork()
    if process:
        return process
    code = UNEQUAL
    try:
        end_with(judge)
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        if equal(gold, answer):
            code = EQUAL
    except Exception:  # no formula, or too deep, or too large
        pass
    finally:
        os._exit(code)  # a child never returns into the judge's code


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    pr_set_pdeathsig = 1  # of linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX formulas say the same; an Exception where one says nothing."""
    from answers.formulas import formula_of, same  # not in the trainer: it takes 1 s

    return same(formula_of(gold), formula_of(answer))


if __name__ == "__main__":
    main()
