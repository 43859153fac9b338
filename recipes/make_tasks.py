"""Writes train.jsonl and heldout.jsonl of two tasks for SmolLM2-135M-Instruct.

    python recipes/make_tasks.py

sums-and-products/ has 400 sums up to 20+20 and 81 products up to 9*9, of which 96 are
held out. 3+8 and 8+3 are different problems: one may be held out and the other trained
on.

formulas/ has the same problems without words; 64 are held out. Its instruction
shows two solved problems, as prompts for base models do. With it, on a CPU, the model
solves 0.23 of the held-out problems when sampled at temperature 1, and 0.61 when
decoded greedily.
"""

import json
import random
from itertools import product
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def write_task(name: str, prompt: str, answers: dict[str, int], heldout: int) -> None:
    """Write the problems into a folder, and hold out `heldout` of them, at random.

    `answers` maps each formula to its value; `prompt` has a {} for the formula.
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
    write_task("formulas", "{} =", sums | products, heldout=64)


if __name__ == "__main__":
    main()
