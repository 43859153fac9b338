r"""The judge of formulas: does an answer equal the gold answer? reward.py runs it on each batch.

    echo '[["\\frac{1}{2}", "0.5"], ["5", "10^{10^{10}}"]]' | python judge.py     # prints [1, 0]

stdin is a JSON list of [gold, answer], both LaTeX; stdout is a JSON list of 1 (equal) or 0.

Why a process: math_verify hands the model's formulas to sympy, which computes 98^{97^{96}} until
memory runs out, in one call that no Python thread, exception or signal handler can interrupt. Only
the kernel can. So a child (a fork: sympy is loaded already) compares pair by pair, and sets a timer
before each: SIGALRM, which nobody handles, kills it. The pair that it dies of, whatever the cause,
gets 0; the next child goes on behind it. No child outlives its timer, even if all others die.

Time bound: a pair may take LIMIT seconds; each death halves that for the rest of the batch, down to
FLOOR. So k answers that would not end delay a batch by less than 2 * LIMIT + k * FLOOR, and cost
the others nothing: an honest comparison takes about a millisecond. To start takes half a second.
"""

import json
import logging
import os
import re
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

LIMIT, FLOOR, MEMORY = 1.0, 0.1, 2 * 2**30  # a child's seconds a pair (see above), and its bytes
SPACE = re.compile(r"(?<=\d)( |~|\\[ ,;:])+(?=\d{3}(?!\d))")  # 1 234 or 1\,234
# Only what is in a box, as LaTeX: math_verify's other readers accept any number in the text.
BOX = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX formulas are equal. Gold goes first: math_verify is not symmetric."""
    texts = [SPACE.sub("", text).strip("$. ") for text in (gold, answer)]
    # no time limits of its own: they are signal handlers, which cannot interrupt sympy's long calls
    formulas = [parse(f"\\boxed{{{text}}}", BOX, parsing_timeout=None) for text in texts]
    return verify(*formulas, timeout_seconds=None)


def compare(pairs: list[list[str]], limit: float, out: int) -> None:
    """In the child: a byte 1 or 0 to the file descriptor out for each pair, until one kills it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever sympy prints is not a verdict
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for gold, answer in pairs:
        signal.setitimer(signal.ITIMER_REAL, limit)
        verdict = equal(gold, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(out, bytes([verdict]))


def judge(pairs: list[list[str]]) -> list[int]:
    """1 or 0 for each [gold, answer], within the time bound: as many children as it takes."""
    verdicts, limit = b"", LIMIT
    while len(verdicts) < len(pairs):
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                compare(pairs[len(verdicts) :], limit, write)
            finally:
                os._exit(0)  # whatever happened: a child never returns into the parent's code
        os.close(write)
        with open(read, "rb") as pipe:
            verdicts += pipe.read()  # until the child has gone
        os.wait()
        if len(verdicts) < len(pairs):
            verdicts, limit = verdicts + b"\0", max(FLOOR, limit / 2)
    return list(verdicts)


if __name__ == "__main__":
    logging.disable()  # math_verify warns that its time limit is off
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # if the trainer has died, end without a word
    equal(r"(\frac{1}{\sqrt{2}},3]", "x=2"), equal("x^2+2x+1", "(x+1)^2")  # fills sympy's caches
    print(json.dumps(judge(json.load(sys.stdin))))
