"""Makes train.jsonl and heldout.jsonl of two tasks for SmolLM2-135M-Instruct.

    python recipes/make_tasks.py

sums-and-products/ has 400 sums up to 20+20 and 81 products up to 9*9, of which 96 are
held out. 3+8 may be held out and 8+3 trained on: they are two problems.

sums-of-three/ has the 125 sums of three numbers up to 5 and the 81 of two numbers up to
9. It is for the model without its chat template: its instruction has two solved
problems, and so the model is right in 0.145 of its samples, often in two steps, such as
"6+1 = 7" (64 problems, 4 samples at temperature 1, in float32). 64 are held out.
"""

import json
import random
from itertools import product
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def write_task(name: str, prompt: str, answers: dict[str, int], heldout: int) -> None:
    """Write the problems into a folder, `heldout` of them, at random, for evaluation.

    `answers` has the number that each formula comes to, and `prompt` a {} for it.
    """
    lines = []
    for formula, answer in answers.items():
        row = {"prompt": prompt.format(formula), "answer": str(answer)}
        lines.append(json.dumps(row) + "\n")
    random.Random(0).shuffle(lines)
    (FOLDER / name / "heldout.jsonl").write_text("".join(lines[:heldout]))
    (FOLDER / name / "train.jsonl").write_text("".join(lines[heldout:]))


def main() -> None:
    sums = {f"{a}+{b}": a + b for a, b in product(range(1, 21), repeat=2)}
    products = {f"{a}*{b}": a * b for a, b in product(range(1, 10), repeat=2)}
    write_task("sums-and-products", "What is {}?", sums | products, heldout=96)

    of_two = {f"{a}+{b}": a + b for a, b in product(range(1, 10), repeat=2)}
    of_three = {f"{a}+{b}+{c}": a + b + c for a, b, c in product(range(1, 6), repeat=3)}
    write_task("sums-of-three", "{}", of_two | of_three, heldout=64)


if __name__ == "__main__":
    main()
