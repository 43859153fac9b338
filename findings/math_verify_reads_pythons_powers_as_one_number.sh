#!/usr/bin/env bash
# SymPy, and data sets made with it, write a polynomial as "3*x**2 + 5*x - 7". math-verify
# compares expressions with SymPy, so one would expect it to read this notation.
#
# It reads the last number and nothing else. If the gold answer is such a polynomial in
# dollar signs, a wrong polynomial that ends in the same number is accepted. With "^" in
# place of "**" the same texts are read correctly.
#
# Source: extract_target_from_pred in math_verify/parser.py. LaTeX has no "**", so the
# text cannot be parsed as LaTeX. With extraction_mode="any_match", which is the default,
# the next match is tried, and that is a plain number, searched from the end of the text.
#
# If you train on such gold answers, replace "**" by "^" before you call parse. Otherwise
# every answer that ends in the right constant earns the full reward.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile math-verify==0.9.0 sympy==1.14.0 \
    latex2sympy2-extended==1.11.0
"$folder/env/bin/python" - <<'PYTHON'
import logging
import random
from importlib.metadata import version

from math_verify import parse, verify
from sympy import Symbol

logging.disable(logging.WARNING)
for package in ("math-verify", "latex2sympy2-extended", "sympy"):
    print(package, version(package))
x = Symbol("x", real=True)
random.seed(0)


def read(text):  # without a time limit, which a busy machine would exceed
    return parse(f"${text}$", parsing_timeout=None)


def accepts(gold, answer):
    return verify(gold, answer, timeout_seconds=None)


counts = dict.fromkeys(("right", "last number", "right with ^", "wrong accepted"), 0)
for _ in range(40):
    coefficients = [random.randint(1, 9) * random.choice((1, -1)) for _ in range(4)]
    polynomial = sum(c * x**power for power, c in enumerate(coefficients))
    gold = read(str(polynomial))
    counts["right"] += accepts(polynomial, gold)
    counts["last number"] += gold[0] == abs(coefficients[0])
    counts["right with ^"] += accepts(polynomial, read(str(polynomial).replace("**", "^")))
    counts["wrong accepted"] += accepts(gold, read(str(polynomial + 20 * x**3)))
print(f"an example: {polynomial} is read as {gold[0]}")
print("of 40 polynomials:", counts)
expected = {"right": 0, "last number": 40, "right with ^": 40, "wrong accepted": 40}
assert counts == expected, "math-verify reads them differently"
PYTHON
