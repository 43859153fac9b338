"""Makes train.jsonl and heldout.jsonl of this folder: 400 sums and 81 products.

    python recipes/sums-and-products/make_task.py

The sums go up to 20+20, and the products up to 9*9. A fifth of the problems is held
out, at random. 3+8 may be held out and 8+3 trained on: they are two problems.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    problems = []
    for a in range(1, 21):
        for b in range(1, 21):
            problems.append((f"{a}+{b}", a + b))
    for a in range(1, 10):
        for b in range(1, 10):
            problems.append((f"{a}*{b}", a * b))
    lines = []
    for formula, answer in problems:
        row = {"prompt": f"What is {formula}?", "answer": str(answer)}
        lines.append(json.dumps(row) + "\n")
    random.Random(0).shuffle(lines)
    heldout = len(lines) // 5
    (FOLDER / "heldout.jsonl").write_text("".join(lines[:heldout]))
    (FOLDER / "train.jsonl").write_text("".join(lines[heldout:]))


if __name__ == "__main__":
    main()
