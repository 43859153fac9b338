r"""Whether two formulas are equal: math_verify, in processes that the kernel can kill.

    echo '[["\\frac{1}{2}", "0.5"], ["5", "6"]]' | python -m support.judge

prints [true, false].

Why processes. math_verify hands a model's formulas to sympy, and sympy computes
98^{97^{96}} until memory runs out, in one call that no thread, exception or signal
handler can interrupt.

How. `equal_formulas` runs this file once a batch. That process, the parent, imports
math_verify and compares the pairs of WARM_UP. Then it forks one child for each pair of
the batch, a few at a time. A child compares its pair and tells the verdict by its exit
code.

A verdict therefore depends on the pair alone. Every child starts as the same copy of
the parent, with what WARM_UP left in sympy's caches and nothing of other pairs, and
with a fixed hash seed, by which sympy orders its sets. Its limits are the same for all:

    LIMIT    seconds of CPU time, which waiting for a core does not use up. Honest pairs
             need 0.01 s in the middle and 0.2 s at most (1,200 golds of MATH-500
             and OlympiadBench, each against itself and against 5).
    MEMORY   bytes more than the parent has.

A child that meets a limit is a verdict: not equal. Anything else that ends a child, and
a parent that cannot work, is an error and never a verdict.

Bound. k answers that meet the limit cost a batch at most k * LIMIT seconds of CPU time,
shared by the workers: with enough cores, LIMIT * ceil(k / workers) seconds of waiting.

Not used: pebble. Its pool limits the wall-clock time of a task, so a loaded machine
would change verdicts, and it keeps its workers, so a pair would find the caches of
those before it.
"""

import collections
import functools
import gc
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 3.0
MEMORY = 512 * 2**20
MAX_WORKERS = 8  # of a rank, and never more than its cores: each may use MEMORY
ATTEMPTS = 3  # how often a process that something else killed is started

# Before there is an engine: on a CPU vLLM overwrites it.
RANKS_OF_NODE = os.environ.get("LOCAL_WORLD_SIZE", "1")

# The exit codes of a child. Python's own are 0, 1 and 2.
EQUAL = 10
UNEQUAL = 11
# What ends a child that its own pair has sent astray: the timer, or the stack's end.
ASTRAY = (signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)

# One pair of each kind that is common, with its verdict. Comparing them loads what
# math_verify and sympy load at first use, and shows that both work here.
WARM_UP = [
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{3}", "0.3333", False),
    ("1,234", "1234", True),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", True),
    (r"(\frac{1}{\sqrt{2}},3]", "x=2", False),
    (r"(-\infty,2)\cup(3,\infty)", "(3,4)", False),
    (r"\{1,2\}", "2, 1", True),
    (r"1 \pm \sqrt{19}", "1", False),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}", False),
    (r"\text{Evelyn}", r"\text{Bob}", False),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^3+3x-6", "x^3+3x-5", False),
    ("x<3", "3>x", True),
    ("y=2x+1", "y-2x=1", True),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", True),
    (r"90^\circ", "90", True),
    ("R^2-r^2", "0", False),
    (r"18\%", "0.18", True),
    ("3+4i", "4i+3", True),
    (r"e^{i\pi}", "1", False),
    (r"\log_2 8", "3", True),
    ("6!", r"\binom{4}{2}", False),
    (r"\sin x", r"\cos x", False),
    (r"\lfloor x\rfloor", "|x|", False),
    ("a_1", "a_2", False),
    ("3:4", "3/4", True),
    ("f(x)=x", "x", True),
]


def equal_formulas(pairs: list[tuple[str, str]]) -> list[bool]:
    """Whether gold and answer, both LaTeX, are equal, for each pair; in any thread.

    Raises RuntimeError, in one sentence, if the judge cannot work on this machine.
    """
    command = [sys.executable, "-m", "support.judge", str(os.getpid())]
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "LOCAL_WORLD_SIZE": RANKS_OF_NODE,
    }
    for _ in range(ATTEMPTS):
        # In a session of its own, so that Ctrl-C reaches the trainer alone, which then
        # finishes its step. A judge whose trainer has gone ends.
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            input=json.dumps(pairs),
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        if done.returncode == 0:
            return json.loads(done.stdout)
        if done.returncode > 0:
            break  # it has said why, and would say so again
    lines = done.stderr.split("\n")
    said = [line for line in lines if line.strip()] or [f"exit code {done.returncode}"]
    raise RuntimeError(f"the judge of formulas, {__file__}, cannot work: {said[-1]}")


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX formulas are equal, in the opinion of math_verify."""
    # Never in the trainer: they take seconds to import.
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import LatexExtractionConfig, parse, parser, verify

    # R and r are two variables, which it would not tell apart.
    as_written = ConversionConfig(lowercase_symbols=False)
    parser.latex2sympy = functools.partial(latex2sympy, conversion_config=as_written)
    # What it takes for a unit may be a variable, or all that follows a \text:
    # reward.latex_of leaves units out.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True
    )
    # Only LaTeX in a box: math_verify's other readers take any number in a text. Where
    # a box cannot be read it looks behind the word "answer", which latex_of refuses.
    box = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=normalization,
    )
    # Its own time limits are signal handlers, which cannot interrupt sympy.
    gold_readings = parse(f"\\boxed{{{gold}}}", [box], parsing_timeout=None)
    answer_readings = parse(f"\\boxed{{{answer}}}", [box], parsing_timeout=None)
    zeros = max(leading_zeros(gold_readings), leading_zeros(answer_readings))
    return verify(
        gold_readings,
        answer_readings,
        float_rounding=6 + zeros,
        numeric_precision=15 + zeros,
        timeout_seconds=None,
    )


def leading_zeros(readings: list) -> int:
    """How many zeros follow the point in the smallest number: 4 for 0.0000672.

    math_verify compares six decimals of a number. With the zeros added it compares six
    digits that count, so that 1/2^98 and 1/2^97 differ.
    """
    from sympy import Mul, Number, Pow, floor, log, preorder_traversal

    zeros = 0
    formulas = [reading for reading in readings if not isinstance(reading, str)]
    for formula in formulas:
        for node in preorder_traversal(formula):
            if not isinstance(node, (Number, Mul, Pow)) or not node.is_number:
                continue
            size = abs(node.evalf(15))
            if size.is_Float and 0 < size < 1:
                zeros = max(zeros, -1 - int(floor(log(size, 10))))
    return zeros


def main() -> None:
    """The parent: pairs as JSON on stdin, verdicts as JSON on stdout."""
    logging.disable()  # math_verify warns that its time limit is off
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the trainer has made of it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trainer = int(sys.argv[1]) if len(sys.argv) > 1 else os.getppid()
    pairs = json.load(sys.stdin)
    for gold, answer, verdict in WARM_UP:
        if equal(gold, answer) != verdict:
            sys.exit(
                f"math_verify finds {gold} == {answer} to be {not verdict}; "
                "install the versions of requirements.txt"
            )
    gc.freeze()  # a collection in a child would copy all of the parent's pages
    print(json.dumps(judge(pairs, trainer)))


def judge(pairs: list[list[str]], trainer: int) -> list[bool]:
    """The verdicts of [gold, answer] pairs, a child for each.

    Ends this process if they cannot be found, or if the trainer has gone.
    """
    cores_of_rank = len(os.sched_getaffinity(0)) // int(RANKS_OF_NODE)
    workers = max(1, min(MAX_WORKERS, cores_of_rank))
    address_space = memory_limit()
    verdicts = [False] * len(pairs)
    kills = [0] * len(pairs)
    waiting = collections.deque(range(len(pairs)))
    running = {}  # process id: index of its pair
    while waiting or running:
        while waiting and len(running) < workers:
            index = waiting.popleft()
            running[start_child(*pairs[index], address_space)] = index
        process, status = os.wait()
        index = running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            # The machine's doing, for want of memory as a rule, and not the pair's:
            # once more.
            kills[index] += 1
            if kills[index] == ATTEMPTS:
                sys.exit(
                    f"a comparison was killed {ATTEMPTS} times; {workers} of them need "
                    f"{MEMORY * workers // 2**20} MiB of memory"
                )
            waiting.append(index)
        elif code in (EQUAL, UNEQUAL) or -code in ASTRAY:
            verdicts[index] = code == EQUAL
        else:
            sys.exit(f"a comparison ended with exit code {code}, which is no verdict")
        if os.getppid() != trainer:
            sys.exit("the trainer has gone")
    return verdicts


def memory_limit() -> tuple[int, int]:
    """The soft and hard limit of a child's address space, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft = pages * resource.getpagesize() + MEMORY
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY and hard < soft:
        sys.exit(
            f"it needs {soft // 2**20} MiB of address space and may have "
            f"{hard // 2**20}: raise `ulimit -v`"
        )
    return soft, hard


def start_child(gold: str, answer: str, address_space: tuple[int, int]) -> int:
    """The id of a new process that compares one pair and exits with its verdict."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # whatever sympy prints is no verdict
        os.dup2(nowhere, 2)
        resource.setrlimit(resource.RLIMIT_AS, address_space)
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        code = EQUAL if equal_or_neither(gold, answer) else UNEQUAL
    finally:
        os._exit(code)  # a child never returns into the parent's code


def equal_or_neither(gold: str, answer: str) -> bool:
    """`equal`, or False for a pair that it fails on: too deep, say, or too large."""
    try:
        return equal(gold, answer)
    except Exception:
        return False


if __name__ == "__main__":
    main()
