"""400 sums up to 20+20 and 81 products up to 9*9, into train.jsonl and heldout.jsonl here.

python recipes/sums-and-products/make_task.py

A fifth is held out, at random. 3+8 may be held out and 8+3 trained on: they are two problems.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    sums = [(f"{a}+{b}", a + b) for a in range(1, 21) for b in range(1, 21)]
    products = [(f"{a}*{b}", a * b) for a in range(1, 10) for b in range(1, 10)]
    rows = [{"prompt": f"What is {text}?", "answer": str(n)} for text, n in sums + products]
    random.Random(0).shuffle(rows)
    heldout = len(rows) // 5
    for split, part in ("heldout", rows[:heldout]), ("train", rows[heldout:]):
        (HERE / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
