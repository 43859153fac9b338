"""Counts by their kind the wrong answers that experiments/completions.py has printed.

    python experiments/completions.py MODEL --problems 512 --max_response_tokens 64 \\
        | python tiny/errors.py
"""

import random
import sys
from collections import Counter

from make_tiny import worked_solution


def kind_of(problem: str, response: str) -> str:
    """Returns "right", "forgets all carries" or "other error"."""
    a, b = map(int, problem.split("+"))
    words = response.split()
    answer = words[-1] if words else ""
    if answer == str(a + b):
        return "right"
    # The free choices of the spelling change no answer, so any random numbers will do.
    forgetful = worked_solution(a, b, random.Random(0), forgets=True)
    return "forgets all carries" if answer == forgetful.split()[-1] else "other error"


def main() -> None:
    counts = Counter()
    for line in sys.stdin:
        if line.startswith("| "):
            _, problem, response, _, _ = line.split("|")
            counts[kind_of(problem.strip(), response.strip().strip("'"))] += 1
    for kind, count in counts.most_common():
        print(f"{count:4} {kind}")


if __name__ == "__main__":
    main()
