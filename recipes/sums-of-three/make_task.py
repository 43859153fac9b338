"""Makes train.jsonl and heldout.jsonl of this folder: sums of three and two numbers.

    python recipes/sums-of-three/make_task.py

SmolLM2-135M-Instruct is right in 0.05 of its samples of the 125 sums of three numbers
up to 5, and in 0.10 of the 81 of two numbers up to 9 (32 problems each, 4 samples at
temperature 1, in float32). 64 problems are held out, at random.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HELDOUT = 64


def main() -> None:
    problems = []
    for a in range(1, 10):
        for b in range(1, 10):
            problems.append((f"{a}+{b}", a + b))
    for a in range(1, 6):
        for b in range(1, 6):
            for c in range(1, 6):
                problems.append((f"{a}+{b}+{c}", a + b + c))
    lines = []
    for formula, answer in problems:
        row = {"prompt": f"What is {formula}?", "answer": str(answer)}
        lines.append(json.dumps(row) + "\n")
    random.Random(0).shuffle(lines)
    (FOLDER / "heldout.jsonl").write_text("".join(lines[:HELDOUT]))
    (FOLDER / "train.jsonl").write_text("".join(lines[HELDOUT:]))


if __name__ == "__main__":
    main()
