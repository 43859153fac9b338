r"""Decides, in processes that the kernel can kill, whether formulas are equal.

sympy computes 98^{97^{96}} until memory runs out, in a single call that no thread,
exception or signal handler can interrupt.

So `equal_formulas` runs this file once for each batch. That process, the judge, imports
formulas.py and then forks one child for each pair, a few at a time. A child compares
its pair and reports the verdict by its exit code. It may use LIMIT seconds of CPU time
and MEMORY bytes; waiting for a core does not count. If a child reaches a limit, its
formulas count as not equal. If a child ends neither with a verdict nor by a limit, or
if the judge cannot work, that is an error and not a verdict.

A verdict depends only on its pair, because every child starts as the same copy of the
judge.
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

ROOT = Path(__file__).parents[1]
LIMIT = 3.0  # seconds of CPU time; an ordinary pair needs about 0.08 and at most 0.8
MEMORY = 2**29  # bytes of address space, an eighth of which the judge itself takes
WORKERS = 4  # children that run at once

# The exit codes by which a child reports its verdict. Python itself uses 0, 1 and 2.
EQUAL = 10
UNEQUAL = 11
# A child may also end by a limit on CPU time, on the stack or on memory.
EXIT_CODES = (EQUAL, UNEQUAL, -signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT)

# Comparing these pairs imports all that is needed, and shows that sympy works.
EQUAL_PAIRS = [
    (r"\{1, \sqrt{12}\}", r"2\sqrt{3}, 1"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("x^2+2x+1", "(x+1)^2"),
]


def equal_formulas(pairs: list[tuple[str, str]]) -> list[bool]:
    """Return whether the LaTeX formulas are equal, for each (gold answer, answer).

    Raises RuntimeError, with one sentence, if the judge cannot work on this machine.
    """
    done = subprocess.run(
        [sys.executable, "-m", "answer_checking.judge", str(os.getpid())],
        cwd=ROOT,
        # The hash seed determines the order of sympy's sets.
        env=os.environ | {"PYTHONHASHSEED": "0"},
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}"
        raise RuntimeError(f"formulas cannot be compared by {__file__}: {reason}")
    return json.loads(done.stdout)


def main() -> None:
    """Run the judge: it reads pairs as JSON from stdin and prints verdicts as JSON."""
    end_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not all(equal(*pair) for pair in EQUAL_PAIRS):
        sys.exit(
            f"sympy does not find the pairs {EQUAL_PAIRS} to be equal: install the "
            "versions of requirements.txt"
        )
    gc.freeze()  # a garbage collection in a child would copy the judge's memory
    print(json.dumps(compare_all(json.load(sys.stdin))))


def compare_all(pairs: list[list[str]]) -> list[bool]:
    """Compare each [gold, answer] in a child of its own; return the verdicts."""
    verdicts = [False] * len(pairs)
    waiting = list(enumerate(pairs))
    running = {}  # process id: index of its pair
    while waiting or running:
        if waiting and len(running) < WORKERS:
            index, pair = waiting.pop()
            running[start_child(*pair)] = index
            continue
        process, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code not in EXIT_CODES:
            sys.exit(f"a comparison ended with exit code {code}; memory may be short")
        verdicts[running.pop(process)] = code == EQUAL
    return verdicts


def start_child(gold: str, answer: str) -> int:
    """Fork a child that compares a pair, and return its process id."""
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
    except Exception:  # not a formula, too deeply nested, or too large
        pass
    finally:
        os._exit(code)  # a child never returns into the judge's code


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG, of linux/prctl.h
    if os.getppid() != parent:  # the parent had already ended
        os._exit(1)


def equal(gold: str, answer: str) -> bool:
    """Return whether two LaTeX formulas are equal. May raise any Exception."""
    # Imported here and not at the top: the trainer must not load sympy.
    from answer_checking.formulas import are_equal, parse_formula

    return are_equal(parse_formula(gold), parse_formula(answer))


if __name__ == "__main__":
    main()
