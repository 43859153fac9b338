"""What counts as correct, what is refused, and what hostile model output costs."""

import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

import reward
from reward import last_box, latex_of, load_task, score
from support import judge, tasks
from support.tasks import TASKS, Task, encode_prompt, prompt_text, task_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PATIENCE = 300.0  # seconds: a busy machine may give a process little of its time
RIGHT, WRONG = True, False

# gold, final answer (boxed below), verdict. docs/rewards.md has the decisions.
MATH = [
    # numbers
    ("18", "18", RIGHT),
    ("18", "19", WRONG),
    ("18", "-18", WRONG),
    ("18", "18.0", RIGHT),
    ("18", "18.", RIGHT),
    ("18", "$18$", RIGHT),
    ("18", "018", RIGHT),
    ("035", "35", RIGHT),
    ("0", "0", RIGHT),
    ("1234", "1,234", RIGHT),
    ("1234", "1 234", RIGHT),
    ("1234", r"1\,234", RIGHT),
    ("1234", "1{,}234", RIGHT),
    (r"10,\!000", "10000", RIGHT),
    ("0", "1 000", WRONG),
    ("1000000", "10^6", RIGHT),
    ("100000000", "100000001", WRONG),
    ("12345678901234567890", "12345678901234567891", WRONG),
    ("2^{100}", "1267650600228229401496703205376", RIGHT),
    # fractions, decimals, roots, constants
    (r"\frac{1}{2}", "0.5", RIGHT),
    (r"\frac{1}{2}", r"\dfrac{2}{4}", RIGHT),
    (r"\frac12", "1/2", RIGHT),
    (r"\frac{1}{2}", r"\frac{2}{1}", WRONG),
    (r"\frac{1}{3}", "0.333333", RIGHT),
    (r"\frac{1}{3}", "0.3333", WRONG),
    (r"2\frac{1}{2}", "2.5", RIGHT),
    (r"2\sqrt{3}", r"\sqrt{12}", RIGHT),
    (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}", RIGHT),
    (r"\sqrt{2}", r"\sqrt{3}", WRONG),
    (r"\pi", "3.141593", RIGHT),
    (r"\pi", "3.14", WRONG),
    (r"\infty", r"-\infty", WRONG),
    ("3:4", r"\frac{3}{4}", RIGHT),
    # expressions
    ("x^2+2x+1", "(x+1)^2", RIGHT),
    ("x^2+1", "y^2+1", WRONG),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", RIGHT),
    ("3+4i", "4i+3", RIGHT),
    ("3+4i", "3-4i", WRONG),
    ("18", "17+1", RIGHT),
    ("18", "5x", WRONG),
    ("720", "6!", RIGHT),
    ("6", r"\binom{4}{2}", RIGHT),
    ("3", r"\log_2 8", RIGHT),
    # equations and inequalities: the right side of an assignment is enough
    ("18", "x=18", RIGHT),
    ("x=18", "18", RIGHT),
    ("y=2x+1", "2x+1", RIGHT),
    ("y=2x+1", "y-2x=1", RIGHT),
    ("x<3", "x<3", RIGHT),
    ("x<3", "x>3", WRONG),
    # sets, pairs, intervals, matrices
    ("1,2", "2,1", RIGHT),
    (r"\{1,2\}", "1, 2", RIGHT),
    (r"\{1,2\}", "1, 3", WRONG),
    ("5", "5, 6", WRONG),
    ("5", r"5 \text{ or } 6", WRONG),
    (r"\pm2", "2,-2", RIGHT),
    ("2", r"\pm2", WRONG),
    ("(1,2)", "(1,2)", RIGHT),
    ("(1,2)", "[1,2]", WRONG),
    ("(3,-1)", "(7,2)", WRONG),
    ("(1,2,3)", "(3,2,1)", WRONG),
    ("(1,2)", r"\{1,2\}", RIGHT),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", RIGHT),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", WRONG),
    # percent and units: ignored
    ("18", "18%", RIGHT),
    (r"18\%", "18", RIGHT),
    (r"18\%", "0.18", RIGHT),
    ("18", "0.18", WRONG),
    ("18", r"18\text{ dollars}", RIGHT),
    (r"5\text{ cm}", r"5\text{ m}", RIGHT),
    ("18", r"\$18", RIGHT),
    (r"90^\circ", "90", RIGHT),
    # words
    ("A", r"\text{A}", RIGHT),
    (r"\text{(C)}", "C", RIGHT),
    ("A", "B", WRONG),
    (r"\text{Sunday}", r"\text{Sunday}", RIGHT),
    (r"\text{Sunday}", r"\text{Monday}", WRONG),
    # a dot at the start belongs to the number, a dot at the end does not
    (".35625", "0.35625", RIGHT),
    (".35625", ".35625", RIGHT),
    (".35625", "35625", WRONG),
    ("5", ".5", WRONG),
    (r"\frac{1}{2}", ".5", RIGHT),
    ("-.5", "-0.5", RIGHT),
    (r"\left\{ 1 \right.", r"\left\{ 1 \right.", RIGHT),
    # small numbers: zeros behind the point are not among the six digits that count
    (r"1/2^{98}", r"1/2^{97}", WRONG),
    (r"1/2^{98}", r"2^{-98}", RIGHT),
    (r"(1/2^{98}, 1)", r"(1/2^{97}, 1)", WRONG),
    (
        r"\begin{pmatrix}1/2^{98}\\1\end{pmatrix}",
        r"\begin{pmatrix}1/2^{97}\\1\end{pmatrix}",
        WRONG,
    ),
    (".0000672", ".0000671", WRONG),
    (".0000672", r"6.72 \times 10^{-5}", RIGHT),
    (".0000672", "6.72e-5", RIGHT),
    ("0", "0.0000001", WRONG),
    ("0", "0.000", RIGHT),
    (r"\frac{1}{12}", "0.083333", WRONG),
    (r"\frac{1}{12}", "0.0833333", RIGHT),
    # digits apart are one number in groups of three, a mixed number, or no answer
    ("3", "1 2", WRONG),
    ("12", "1 2", WRONG),
    ("3", r"1\,2", WRONG),
    ("3", r"1\quad 2", WRONG),
    ("1000000", "1 000 000", RIGHT),
    (r"\frac{11}{4}", "2 3/4", RIGHT),
    (r"-\frac{11}{4}", "-2 3/4", RIGHT),
    ("1.25", "2 3/4", WRONG),  # (2 + 3) / 4
    # a base is part of a numeral
    ("204_5", "204_5", RIGHT),
    ("204_5", "204_{5}", RIGHT),
    ("204_5", "204", WRONG),
    ("204", "204_5", WRONG),
    ("204_5", "204_6", WRONG),
    ("204_5", "54", WRONG),  # 2 * 25 + 4: the right value, but not as it was asked for
    (r"204_{\text{five}}", r"204_{\text{six}}", WRONG),
    ("12_3, 21_3", "21_3, 12_3", RIGHT),
    ("x_1", "x_2", WRONG),
    # words for powers of ten
    ("18", r"18\text{ million}", WRONG),
    ("18000000", r"18\text{ million}", RIGHT),
    ("18000000", r"18\text{ million dollars}", RIGHT),
    ("18000", "18 thousand", RIGHT),
    ("18", "18x", WRONG),
    # behind the first \text other things may stand than a unit
    (r"6\text{ red}, 5\text{ blue}", r"6\text{ red}, 99\text{ blue}", WRONG),
    (r"6\text{ red}, 5\text{ blue}", r"6\text{ red}, 5\text{ blue}", RIGHT),
    (r"2\mathbf{i}-3\mathbf{j}", "2", WRONG),
    (r"2\mathrm{e}^{3}", "2", WRONG),
    (r"2\mathrm{e}^{3}", "2e^3", RIGHT),
    ("7", r"3+4\mathrm{i}", WRONG),
    ("3+4i", r"3+4\mathrm{i}", RIGHT),
    ("5", r"5\text{, else }6\text{.}", WRONG),
    ("5", r"5\mathrm{ million}", WRONG),
    ("5000000", r"5\text{ Million}", RIGHT),
    ("5", r"5\text{ dozen}", WRONG),
    ("5", r"5\text{ factorial}", WRONG),
    (
        r"\begin{cases} 1 & \text{if } x>0 \\ 2 & \text{if } x<0 \end{cases}",
        r"\begin{cases} 1 & \text{if } x>0 \\ 3 & \text{if } x<0 \end{cases}",
        WRONG,
    ),
    (r"A\text{ or }\text{B}", r"A\text{ or }\text{C}", WRONG),
    (r"12\pi\text{ cm}^2", r"12\pi", RIGHT),
    (r"\frac{1}{2}\mathrm{~kg}", "0.5", RIGHT),
    ("5", "5 cm", RIGHT),
    ("5", "5 square feet", RIGHT),
    ("12", r"12\text{ inches squared}", RIGHT),
    ("25", r"5\text{ squared}", WRONG),
    ("10", r"10\text{ N}", RIGHT),
    ("25", r"25^\circ\text{C}", RIGHT),
    ("25", r"25^{\circ}\mathrm{F}", RIGHT),
    (r"5 \mathrm{~km} / \mathrm{h}", "5", RIGHT),
    (r"9.8\text{ m}/\text{s}^2", "9.8", RIGHT),
    (r"12\pi cm", r"12\pi", RIGHT),
    ("30", "30 min", RIGHT),
    # words that are the answer, or a part of it
    (r"x_\text{max}", r"x_\text{min}", WRONG),
    (r"204_\text{five}", r"204_\text{six}", WRONG),
    (r"204_\text{five}", r"204_{\text{five}}", RIGHT),
    (r"5:30\text{ a.m.}", r"5:30\text{ p.m.}", WRONG),
    (r"20\%\text{ increase}", r"20\%\text{ decrease}", WRONG),
    (r"n\text{ even}", r"n\text{ odd}", WRONG),
    (r"\triangle\text{ABC}", r"\triangle\text{DEF}", WRONG),
    (r"2\mathrm{A}+3\mathrm{B}", r"2\mathrm{A}+3\mathrm{C}", WRONG),
    # a letter is a variable, and no unit
    ("3t", "3", WRONG),
    ("3t", "3t", RIGHT),
    ("2c", "2d", WRONG),
    ("a^2+4ab", "a^2+4", WRONG),
    ("18", "18m", WRONG),
    (r"5\sin t", r"5\sin h", WRONG),
    (r"5\sin t", r"5\sin(t)", RIGHT),
    # R and r are two variables
    ("R^2-r^2", "0", WRONG),
    (r"\pi(R^2-r^2)", r"\pi(R-r)(R+r)", RIGHT),
    (r"\frac{M}{M+m}", r"\frac12", WRONG),
    ("R+r", "2r", WRONG),
    # a number beside a parenthesis is a product
    ("6", "2(3)", RIGHT),
    ("5", "2(3)", WRONG),
    ("6", "(2)(3)", RIGHT),
    (r"\frac{3}{2}", r"2\left(\frac34\right)", RIGHT),
    ("2x+2", "2(x+1)", RIGHT),
    ("-6", "(-2)(3)", RIGHT),
    ("-5", "(-2)(3)", WRONG),
    ("6", r"\left(2\right)\left(3\right)", RIGHT),
    ("3", "1{2}", WRONG),
    ("3", r"1\thinspace 2", WRONG),
    # i, wherever it stands
    ("3+4i", "3+4 i", RIGHT),
    ("2+2i", "2(1+i)", RIGHT),
    (r"\frac{3+4i}{5}", r"\frac35+\frac45 i", RIGHT),
    # what is judged is the whole content of the box
    ("5", r"2\cdot\boxed{5}", WRONG),
    ("10", r"2\cdot\boxed{5}", RIGHT),
    ("5", "(the answer is not $5$ !", WRONG),
    # a base in parentheses or in words, digits that are letters
    ("204", "204_{(5)}", WRONG),
    (r"204_{\mathrm{five}}", r"204_{\mathrm{six}}", WRONG),
    ("2F_{n}", "2F_n", RIGHT),
    ("2A_1", "A_1+A_1", RIGHT),
    ("1A3_{16}", "1A3_{12}", WRONG),
    ("1A3_{16}", "1A3_{(16)}", RIGHT),
    ("1011_2", "(1011)_2", RIGHT),
    ("1011_2", "1011_{(2)}", RIGHT),
    # groups of three digits within a formula, and two digits behind a command
    (r"1234\pi", r"1{,}234\pi", RIGHT),
    ("1234", "x=1{,}234", RIGHT),
    (r"\frac{1234}{5}", r"\frac{1{,}234}{5}", RIGHT),
    (r"\frac12", r"\frac 1 2", RIGHT),
    (r"\frac12", r"\frac 1{2}", RIGHT),
    (r"\frac34", r"\dfrac 3 {4}", RIGHT),
    ("10", r"\binom 5 2", RIGHT),
    # not an answer
    ("18", "", WRONG),
    ("18", "?", WRONG),
    ("18", r"\text{about }18", WRONG),
    ("18", r"\frac{18", WRONG),
]

# Which part of a completion is its answer: gold 5.
PLACES = [
    (r"So it is \boxed{5}.", RIGHT),
    (r"So it is \boxed {5}.", RIGHT),
    (r"First \boxed{3}, no: \boxed{5}.", RIGHT),
    (r"First \boxed{5}, no: \boxed{3}.", WRONG),
    (r"So it is \boxed{5}. Check: \boxed{", RIGHT),
    (r"So it is \boxed{5", WRONG),
    (r"\boxed{\frac{10}{2}}", RIGHT),
    (r"\boxed{\boxed{5}}", RIGHT),
    ("The answer is 5.", WRONG),
    ("#### 5", WRONG),
    ("$5$", WRONG),
    ("", WRONG),
    (r"\boxed{" + "0" * 299 + "5}", RIGHT),
    (r"\boxed{" + "0" * 300 + "5}", WRONG),
    ("x" * 300_000 + r"\boxed{5}", RIGHT),
    (r"\boxed{5}" + "x" * 300_000, WRONG),
    (r"So it is \fbox{5}.", RIGHT),
    (r"So it is $\boxed 5$.", RIGHT),
    (r"So it is \boxed5.", RIGHT),
    (r"So it is \boxed 5.", RIGHT),
    (r"So it is \boxed 53.", WRONG),
    # fuzzing found that these were read as 5, the first thing behind the command
    (r"So it is \boxed 5x.", WRONG),
    (r"So it is \boxed 5 million.", WRONG),
    (r"So it is \boxed 5\frac{1}{2}.", WRONG),
    (r"So it is \(\boxed 5\)", RIGHT),
    (r"So it is \boxed 5, as asked.", RIGHT),
    (r"We use \boxed to mark \boxed{5} and not \boxed a thing.", RIGHT),
    (r"x &= 5 \\\boxed{5}", RIGHT),  # a line break before the box
    (r"So it is \\boxed{5}", RIGHT),  # escaped once too often
    (r"\boxed{\{5\}}", RIGHT),
    (r"<think>\boxed{3}</think> \boxed{5}", RIGHT),
    (r"<think>\boxed{5}</think> So it is 5.", WRONG),
    (r"\boxed{5}</think> So it is 5.", WRONG),  # the template has written <think>
    (r"<think>It may be \boxed{5}", WRONG),
    (r"<think>\boxed{3}</think> or <think>\boxed{3}</think> \boxed{5}", RIGHT),
    (r"</think>" + "x" * 300_000 + r"\boxed{5}", RIGHT),
]

GSM8K = [
    ("84", "6*14=84.\n#### 84", RIGHT),
    ("84", r"So \boxed{84}.", RIGHT),
    ("84", r"#### 84, that is \boxed{85}", WRONG),
    ("84", "#### 85", WRONG),
    ("84", "#### 84.0", RIGHT),
    ("84", "#### 84.00000000001", WRONG),
    ("84", "It is 84.", WRONG),
    ("84", "#### 84 or 85", WRONG),
    ("84", "#### 84 lemons.", RIGHT),
    ("84", "#### $84", RIGHT),
    ("84", r"\boxed{\$84}", RIGHT),
    ("84", r"\boxed{84\%}", RIGHT),
    ("84", r"\boxed{84\text{ lemons}}", RIGHT),
    ("84", "#### 84 inches squared", RIGHT),
    ("84", "#### 84 squared", WRONG),
    ("84", r"\boxed{x=84}", WRONG),
    ("84", r"\boxed{168/2}", WRONG),
    ("84", r"\boxed{}", WRONG),
    ("84", "", WRONG),
    ("3600", "#### 3,600", RIGHT),
    ("3,600", "#### 3600", RIGHT),
    ("3600", "#### 3,6,00", WRONG),
    ("-3", "#### -3", RIGHT),
    ("-3", "#### 3", WRONG),
    ("9007199254740993", "#### 9007199254740992", WRONG),
    ("0.1", "#### .1", RIGHT),
    ("84", "#### ８４", WRONG),
    # a marker or a box is asked for
    ("18", "18", WRONG),
    ("18", "So she has 18", WRONG),
    ("18", r"\boxed 18", RIGHT),
    ("18", r"<think>#### 18</think> So she has 18.", WRONG),
    ("18", r"<think>#### 17</think> #### 18", RIGHT),
    # a second number, wherever it stands in the sentence
    ("84", "#### 84" + " " * 300 + "or rather 85", WRONG),
    ("84", "#### 84 or eighty-five", WRONG),
    ("84", "#### 84+1", WRONG),
    ("84", "#### 84**2", WRONG),
    ("842", "#### **84**2", WRONG),
    # another number than its digits
    ("18", "#### 18 million", WRONG),
    ("18", "#### 18 thousand", WRONG),
    ("18", "#### 18 dozen", WRONG),
    ("2", "#### 2 score", WRONG),
    ("2", "#### 2 thirds", WRONG),
    ("3", "#### 3 halves", WRONG),
    ("7", "#### 7 tenths", WRONG),
    ("2", "#### 2 and a half", WRONG),
    ("2", "#### 2 and a third", WRONG),
    ("3", "#### 3 quarters", RIGHT),
    ("3", "#### 3 seconds", RIGHT),
    ("18", r"\boxed{18\text{ million}}", WRONG),
    ("18", "#### 18x", WRONG),
    ("18", "#### 18 x", WRONG),
    ("18", "#### 18k", WRONG),
    ("18", "#### 18kg", RIGHT),
    ("18", "#### 18 m", RIGHT),
    ("18", "#### 18 dollars a day", RIGHT),
    ("18", "#### $18/hour", RIGHT),
    ("18", "#### 1/2", WRONG),
    # how numbers are written
    ("1800", r"\boxed{1{,}800}", RIGHT),
    ("1800", r"\boxed{1,\!800}", RIGHT),
    ("1800", r"\boxed{1\,800}", RIGHT),
    ("1800", "#### $1,800.00", RIGHT),
    ("1800", "#### 1 800", RIGHT),
    ("1", "#### 1,80", WRONG),
    ("18", r"\boxed{18\,\text{dollars}}", RIGHT),
    ("18", r"\boxed{\text{18}}", RIGHT),
    ("18", r"\boxed{\textbf{\text{18}}}", RIGHT),
    ("18", r"\boxed{\boxed{18}}", RIGHT),
    ("18", "#### **18**", RIGHT),
    ("18", "#### **$18**", RIGHT),
    ("18", "#### $18$", RIGHT),
    ("18", r"#### \$18", RIGHT),
    ("18", "#### 17\nNo: #### 18", RIGHT),
    ("18", "#### 18\nNo: #### 17", WRONG),
    ("18", r"#### \(18\)", RIGHT),
    ("-18", "#### -$18", RIGHT),
    ("-18", "#### −18", RIGHT),
    ("18", "#### --18", WRONG),
    ("0.5", "#### .5", RIGHT),
    ("18", "####18", RIGHT),
    ("18", "#### " + "0" * 10_000 + "18", WRONG),
    # a closing sentence
    ("18", "#### 18\n\nSo she makes 18 dollars on 2 days.", RIGHT),
    ("18", "#### 18. So she makes 18 dollars on 2 days.", RIGHT),
    ("18", "#### 18 is what she makes", RIGHT),
]

EXACT = [
    ("1283", "8+5+0=13. 7+0+1=8. 4+8+0=12. 1283", RIGHT),
    ("1283", "1283", RIGHT),
    ("1283", "1283\n", RIGHT),
    ("1283", "1283 8+5", WRONG),
    ("1283", "8+5+0=13. 7+0+1=8. 4+8+0=12", WRONG),
    ("1283", "01283", WRONG),
    ("1283", "1283.", WRONG),
    ("1283", "", WRONG),
    ("1283", " \n", WRONG),
]


@pytest.fixture(scope="module")
def verdicts():
    """One batch of all that math judges here: a process for each would take minutes."""
    asked = [(gold, f"So it is \\boxed{{{answer}}}.") for gold, answer, _ in MATH]
    asked += [("5", completion) for completion, _ in PLACES]
    rewards = score([text for _, text in asked], [gold for gold, _ in asked])
    return dict(zip(asked, rewards, strict=True))


def test_a_capital_letter_needs_no_braces():
    completions = [r"It is $\boxed A$.", r"It is $\boxed B$."]
    assert score(completions, ["A", "A"]) == [1.0, 0.0]


@pytest.mark.parametrize("gold, answer, expected", MATH)
def test_math_verdict(gold, answer, expected, verdicts):
    assert verdicts[gold, f"So it is \\boxed{{{answer}}}."] == float(expected)


@pytest.mark.parametrize("completion, expected", PLACES)
def test_the_answer_is_the_last_complete_box(completion, expected, verdicts):
    assert verdicts["5", completion] == float(expected)


@pytest.mark.parametrize("gold, completion, expected", GSM8K)
def test_gsm8k_verdict(gold, completion, expected):
    assert score([completion], [gold], "gsm8k") == [float(expected)]


@pytest.mark.parametrize("gold, completion, expected", EXACT)
def test_exact_verdict(gold, completion, expected):
    assert score([completion], [gold], "exact") == [float(expected)]


@pytest.mark.parametrize("verifier", ["exact", "gsm8k", "math"])
def test_an_empty_batch_has_no_rewards_and_unequal_lengths_are_an_error(verifier):
    assert score([], [], verifier) == []
    with pytest.raises(ValueError, match="1 completions and 0 answers"):
        score(["1"], [], verifier)


def test_an_unknown_verifier_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'regex'.*exact.*gsm8k.*math"):
        score([], [], "regex")


def test_whole_numbers_are_compared_without_the_judge(monkeypatch):
    monkeypatch.setattr(reward, "equal_formulas", None)
    completions = [r"\boxed{18}", r"\boxed{018}", r"\boxed{19}"]
    assert score(completions, ["18"] * 3) == [1.0, 1.0, 0.0]


def test_last_box_is_the_last_box_to_close():
    assert last_box(r"a \boxed{1} b \boxed{\{2\}} c") == r"\{2\}"
    assert last_box(r"a \boxed{1} b \boxed{2") == "1"
    assert last_box("} } {") == ""


# --- hostile output

TOWER = r"\boxed{98^{97^{96}}}"
# Answers to gold 5 that are wrong, and what their comparison does.
HOSTILE = {
    "power tower": TOWER,
    "factorial": r"\boxed{99999999999!}",
    "tiny number": r"\boxed{10^{-100000000000}}",
    "nested radicals": "\\boxed{" + r"\sqrt{2+" * 40 + "2" + "}" * 40 + "}",
    "sum": r"\boxed{\sum_{n=1}^{10^{9}} \frac{1}{n^{n}}}",
    "nested parentheses": "\\boxed{" + "(" * 140 + "6" + ")" * 140 + "}",
    "a megabyte of open braces": "\\boxed{" + "{" * 1_000_000,
    "balanced braces": "\\boxed{" + "{" * 500_000 + "}" * 500_000 + "}",
    "many boxes": "\\boxed{" * 100_000 + "}" * 100_000,
    "many bare boxes": "\\boxed " * 100_000,
    "many thoughts": "<think></think>" * 100_000,
    "many escapes": "\\" * 1_000_000,
    "many blanks": "\\boxed" + " " * 1_000_000,
    "many blanks in a box": "\\boxed{x" + " " * 90_000 + "y}",
    "many dots in a box": "\\boxed{x" + "." * 90_000 + "y}",
    "NUL bytes": "\\boxed{5\0}\0\0",
    "a lone surrogate": "\\boxed{\ud800}",
    "code": r"\boxed{__import__('os').system('touch pwned')}",
    "the judge's own protocol": "\\boxed{5}\n[1]\n\\boxed{6}",
}
MEMORY_BOMB = r"\boxed{\begin{pmatrix}" + "&".join(["2^{2^{36}}"] * 9)
MEMORY_BOMB += r"\end{pmatrix}}"
# Right answers that take math_verify longer than others do.
HONEST = {
    r"\frac{n(n+1)(2n+1)}{6}": r"\frac{2n^3+3n^2+n}{6}",
    "a^3+b^3+c^3-3abc": "(a+b+c)(a^2+b^2+c^2-ab-bc-ca)",
    r"\frac{\sqrt{2}}{2}": r"\frac{1}{\sqrt{2}}",
    r"\left[ \frac{\pi^2}{8}, \frac{5\pi^2}{4} \right]": (
        r"[\frac{1}{8}\pi^2, 1.25\pi^2]"
    ),
    r"\left( 3, \frac{\pi}{2} \right)": r"(3, \pi/2)",
    r"\{1,2\}": "2, 1",
}


@pytest.fixture(scope="module")
def hostile_rewards(tmp_path_factory):
    """{name: rewards of a right, the hostile and a wrong completion}, of one batch."""
    folder = tmp_path_factory.mktemp("hostile")
    batch = [
        (r"\boxed{\frac{10}{2}}", text, r"\boxed{6.5}") for text in HOSTILE.values()
    ]
    completions = list(itertools.chain(*batch))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rewards = score(completions, ["5"] * len(completions))
    assert list(folder.iterdir()) == []
    return {name: rewards[3 * i : 3 * i + 3] for i, name in enumerate(HOSTILE)}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_completion_gets_0_and_the_others_their_reward(name, hostile_rewards):
    assert hostile_rewards[name] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("verifier", ["exact", "gsm8k"])
def test_the_other_verifiers_do_not_mind_hostile_completions(verifier):
    start = time.process_time()
    rewards = score(list(HOSTILE.values()), ["5"] * len(HOSTILE), verifier)
    assert rewards == [0.0] * len(HOSTILE)
    assert time.process_time() - start < 3


def mixed_batch(towers, seed):
    """(completion, gold, reward) of each honest answer and as many towers, shuffled."""
    rows = [(f"\\boxed{{{right}}}", gold, 1.0) for gold, right in HONEST.items()]
    rows += [(f"\\boxed{{{right}+1}}", gold, 0.0) for gold, right in HONEST.items()]
    for n in range(towers):
        rows.append((f"\\boxed{{9^{{8^{{{100 + n}}}}}}}", "5", 0.0))
    random.Random(seed).shuffle(rows)
    return rows


@pytest.fixture
def loaded_machine():
    """Two processes on each core that do nothing but compute."""
    command = [sys.executable, "-c", "while True: pass"]
    count = 2 * len(os.sched_getaffinity(0))
    processes = [subprocess.Popen(command) for _ in range(count)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def assert_each_has_its_own_reward(rows):
    completions, golds, expected = zip(*rows, strict=True)
    assert score(list(completions), list(golds)) == list(expected)


def test_hostile_answers_and_a_loaded_machine_change_no_verdict(loaded_machine):
    assert_each_has_its_own_reward(mixed_batch(towers=2, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_hostile_answers_in_any_order_change_no_verdict(loaded_machine, seed):
    assert_each_has_its_own_reward(mixed_batch(towers=12, seed=seed))


def test_a_verdict_is_the_same_alone_and_in_any_batch(verdicts):
    asked = list(verdicts)[::-1]
    completions = [completion for _, completion in asked]
    golds = [gold for gold, _ in asked]
    expected = [verdicts[pair] for pair in asked]
    assert score(completions * 2, golds * 2) == expected * 2
    for i in range(20, len(asked), 60):
        assert score(completions[i : i + 1], golds[i : i + 1]) == expected[i : i + 1]


def children_cpu_seconds():
    usage = os.times()
    return usage.children_user + usage.children_system


def test_k_hostile_answers_cost_k_times_the_limit_of_cpu_time():
    towers = [f"\\boxed{{9^{{8^{{{n}}}}}}}" for n in (100, 101)]
    start = children_cpu_seconds()
    assert score(towers * 50, ["5"] * 100) == [0.0] * 100  # k is 2: each is asked once
    seconds = children_cpu_seconds() - start
    assert seconds > 2 * judge.LIMIT
    assert (
        seconds < 2 * judge.LIMIT + 5
    )  # 5: starting the judge takes 1, and twice that


def test_an_honest_pair_stays_far_below_the_limit():
    start = children_cpu_seconds()
    pairs = [(latex_of(gold), latex_of(right)) for gold, right in HONEST.items()]
    assert judge.equal_formulas(pairs) == [True] * len(pairs)
    # 6 pairs and the start of the judge together use less than a single pair may.
    assert children_cpu_seconds() - start < judge.LIMIT + 2


def test_a_memory_bomb_gets_0():
    assert score([MEMORY_BOMB, r"\boxed{5.0}"], ["5", "5"]) == [0.0, 1.0]


# --- the judge's process


def run_judge(code, pairs, before=""):
    """The judge as a process of its own, with lines of Python run before its main()."""
    program = f"import os\nimport support.judge as judge\n{code}\njudge.main()"
    return subprocess.run(
        ["bash", "-c", f'{before} exec "$0" -c "$1"', sys.executable, program],
        cwd=ROOT,
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
    )


def test_the_judge_is_a_program_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "support.judge"],
        cwd=ROOT,
        input=json.dumps([[r"\frac{1}{2}", "0.5"], ["5", "6"]]),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[true, false]\n", "")


def test_a_judge_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "support").mkdir()
    (tmp_path / "support/judge.py").write_text("import nothing_of_that_name")
    monkeypatch.setattr(judge, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="cannot work: .*nothing_of_that_name"):
        score([r"\boxed{5.0}"], ["5"])


def test_the_judge_knows_the_ranks_of_its_node_after_vllm_has_overwritten_them(
    monkeypatch,
):
    given = []
    run = subprocess.run

    def recorded(*arguments, **keywords):
        given.append(keywords["env"]["LOCAL_WORLD_SIZE"])
        return run(*arguments, **keywords)

    monkeypatch.setattr(judge, "RANKS_OF_NODE", "8")  # when it was imported
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as an engine of one rank leaves it
    monkeypatch.setattr(subprocess, "run", recorded)
    assert score([r"\boxed{5.0}"], ["5"]) == [1.0]
    assert given == ["8"]


def test_a_judge_without_memory_is_an_error():
    code = r"import reward; print(reward.score([r'\boxed{5.0}'], ['5']))"
    done = subprocess.run(
        ["bash", "-c", f'ulimit -v 400000; exec {sys.executable} -c "{code}"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    last_line = done.stderr.splitlines()[-1]
    # 390 MiB is what 400000 KiB are.
    assert "cannot work: it needs" in last_line
    assert "MiB of address space and may have 390" in last_line


def test_a_comparison_that_something_else_kills_is_tried_again(tmp_path):
    code = f"""
def equal(gold, answer, original=judge.equal):
    if answer == "once" and not os.path.exists("{tmp_path}/seen"):
        open("{tmp_path}/seen", "w")
        os.kill(os.getpid(), 9)
    return original(gold.replace("once", "5"), answer.replace("once", "5"))
judge.equal = equal
"""
    done = run_judge(code, [["5", "6"], ["5", "once"], ["5", "5.0"]])
    assert (done.stdout, done.stderr) == ("[false, true, true]\n", "")


@pytest.mark.parametrize(
    "fault, message",
    [
        ("os.kill(os.getpid(), 9)", "was killed 3 times; .* MiB of memory"),
        ("os._exit(1)", "exit code 1, which is no verdict"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_an_error(fault, message):
    code = f"judge.WARM_UP = []\njudge.equal = lambda gold, answer: {fault}"
    done = run_judge(code, [["5", "6"]])
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(message, done.stderr)


def test_a_math_verify_that_finds_otherwise_than_known_is_an_error():
    done = run_judge('judge.WARM_UP.append(("5", "6", True))', [["5", "6"]])
    assert (done.returncode, done.stdout) == (1, "")
    assert "math_verify finds 5 == 6 to be False; install" in done.stderr


def test_a_pair_that_fails_within_math_verify_is_wrong():
    code = "judge.WARM_UP = []\njudge.equal = lambda gold, answer: 1 / 0"
    assert run_judge(code, [["5", "6"]]).stdout == "[false]\n"


def processes():
    """{id: (parent, session)} of all processes, as /proc has them, but for zombies."""
    running = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            running[int(stat.parent.name)] = int(parent), int(session)
    return running


def judge_of(trainer):
    """The id of the judge that process `trainer` runs, and of its session."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for process, (parent, session) in processes().items():
            if parent == trainer and process == session:
                return process
        time.sleep(0.02)
    raise AssertionError("no judge")


def members(session):
    """The processes of that session: a judge and its children."""
    return [process for process, (_, its) in processes().items() if its == session]


def wait_for_a_comparison(session):
    end = time.monotonic() + PATIENCE
    while len(members(session)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert len(members(session)) >= 2


def assert_gone(session):
    end = time.monotonic() + PATIENCE
    while members(session) and time.monotonic() < end:
        time.sleep(0.02)
    assert members(session) == []


def test_a_judge_killed_in_the_middle_of_a_batch_costs_no_reward():
    sessions = []

    def kill():
        sessions.append(judge_of(os.getpid()))
        wait_for_a_comparison(sessions[0])
        os.kill(sessions[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert score([TOWER, r"\boxed{5.0}"], ["5", "5"]) == [0.0, 1.0]
    thread.join()
    assert_gone(sessions[0])


def test_an_interrupted_call_ends_its_judge():
    sessions = []

    def interrupt():
        sessions.append(judge_of(os.getpid()))
        wait_for_a_comparison(sessions[0])
        os.kill(os.getpid(), signal.SIGINT)

    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            score([TOWER], ["5"])
    finally:
        signal.signal(signal.SIGINT, old)
    thread.join()
    assert_gone(sessions[0])


@pytest.mark.parametrize(
    "in_the_middle", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_no_process_is_left_when_the_trainer_is_killed(in_the_middle):
    hostile = [f"\\boxed{{9^{{8^{{{n}}}}}}}" for n in range(100, 140)]
    code = f"import reward; reward.score({hostile!r}, ['5'] * 40)"
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    session = judge_of(trainer.pid)
    if in_the_middle:
        wait_for_a_comparison(session)
    trainer.kill()
    trainer.wait()
    assert_gone(session)  # without comparing the 40: they would take a minute


def test_threads_may_score_at_once():
    rewards = {}

    def run(n):
        rewards[n] = score([f"\\boxed{{{n}.0}}", r"\boxed{-1.0}"], [str(n)] * 2)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {n: [1.0, 0.0] for n in range(2)}


def test_importing_and_scoring_load_neither_torch_nor_math_verify():
    code = (
        "import sys, reward; assert reward.score(['\\\\boxed{5.0}'], ['5']) == [1.0]\n"
        "heavy = ('torch', 'sympy', 'math_verify', 'datasets')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_demonstration_runs_and_shows_a_hostile_completion_get_0():
    done = subprocess.run(
        [sys.executable, "reward.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    rewards = [line.rpartition("-> ")[2] for line in done.stdout.splitlines()[1:]]
    assert rewards == ["1.0", "0.0"] * 3
    assert "98^{97^{96}}" in done.stdout.splitlines()[-1]


# --- tasks: tests/data has a folder of each hub id, with problems of our own


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`datasets` takes a folder of tests/data for the hub dataset of that name."""
    import datasets

    monkeypatch.chdir(HERE / "data")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.disable_progress_bars()


loaded = functools.cache(load_task)  # which scores each gold as its own completion
LOADED = [
    ("gsm8k", "train", 2, "How many lemons", "84"),
    ("gsm8k", "heldout", 1, "A diver", "-3"),
    ("math", "train", 9, "$3x=12$", "4"),
    ("math", "heldout", 2, "polar form", r"\left( 5, \frac{\pi}{2} \right)"),
    ("math500", "heldout", 2, "polar form", r"\left( 5, \frac{\pi}{2} \right)"),
    ("deepscaler", "train", 2, "divisors", "8"),
    ("deepscaler", "heldout", 1, "remainder", "035"),
    ("aime2024", "heldout", 1, "remainder", "035"),
    ("aime2025", "heldout", 1, r"$7\cdot10$", "70"),
    ("aime2026", "heldout", 1, "$5-5$", "0"),
    ("amc23", "heldout", 1, "Two trains", "9"),
    ("amo-bench", "heldout", 2, "largest root", r"\sqrt{2}"),
]


@pytest.mark.parametrize("name, split, count, words, answer", LOADED)
def test_a_dataset_loads_from_its_own_columns(hub, name, split, count, words, answer):
    problems = loaded(name, split)
    assert [set(problem) for problem in problems] == [{"prompt", "answer"}] * count
    assert words in problems[0]["prompt"] and problems[0]["answer"] == answer


def test_every_split_of_every_task_is_tested():
    splits = {
        (name, split)
        for name in TASKS
        for split in ("train", "heldout")
        if getattr(TASKS[name], split)
    }
    tiny = {("tiny", "train"), ("tiny", "heldout")}
    assert splits - tiny == {row[:2] for row in LOADED}


def test_the_gold_answer_of_gsm8k_follows_its_mark(hub):
    assert [row["answer"] for row in loaded("gsm8k", "train")] == ["84", "3,600"]


def test_the_gold_answer_of_math_is_the_last_box_of_the_solution(hub):
    answers = [problem["answer"] for problem in loaded("math", "train")]
    union = r"(-\infty,-2)\cup(2,\infty)"
    assert answers[:4] == ["4", r"\frac{1}{3}", r"\sqrt{2}", union]
    assert answers[4:7] == ["61_8", "6", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"]
    assert answers[7:] == ["2", "2"]  # from \boxed 2 and \fbox{2}


def test_a_solution_without_a_box_is_no_gold_answer(hub, capsys):
    load_task("math", "train")  # its tenth row ends with "so x is 2."
    assert "1 of the 10 problems" in capsys.readouterr().err


def test_a_hub_row_whose_answer_cannot_be_read_is_left_out_and_named(hub, capsys):
    load_task("deepscaler", "train")
    message = capsys.readouterr().err
    assert message.startswith("1 of the 3 problems of agentica-org/DeepScaleR-Preview")
    assert message.endswith(": left out\n")


def test_amo_bench_leaves_out_the_answers_that_need_a_reader(hub):
    prompts = [problem["prompt"] for problem in loaded("amo-bench", "heldout")]
    assert not any("Describe" in prompt for prompt in prompts)


def test_any_hub_name_has_a_train_and_a_test_split(hub, monkeypatch, tmp_path):
    with monkeypatch.context() as elsewhere:  # here, the name is that of a folder
        elsewhere.chdir(tmp_path)
        task = task_of("meituan-longcat/AMO-Bench")
    monkeypatch.setitem(TASKS, "any", task)
    assert len(load_task("any", "heldout")) == 2 and task.verifier == "math"
    with pytest.raises(ValueError, match="cannot load meituan-longcat/AMO-Bench train"):
        load_task("any", "train")


def test_the_embedded_task_is_disjoint_and_right():
    train = load_task("tiny", "train")
    heldout = load_task("tiny", "heldout")
    train_prompts = {problem["prompt"] for problem in train}
    assert train_prompts.isdisjoint(problem["prompt"] for problem in heldout)
    for problem in train + heldout:
        a, b = problem["prompt"].split("+")
        assert int(a) + int(b) == int(problem["answer"])
    assert task_of("tiny").verifier == "exact" and task_of("tiny").instruction is None


def test_a_file_is_both_splits_and_a_folder_has_two(tmp_path):
    for name in ("train", "heldout"):
        row = {"prompt": name, "answer": 2}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "task.json").write_text('{"verifier": "gsm8k"}')
    file = str(tmp_path / "train.jsonl")
    of_the_file = [{"prompt": "train", "answer": "2"}]
    assert load_task(file, "train") == load_task(file, "heldout") == of_the_file
    of_the_folder = load_task(str(tmp_path), "heldout")
    assert of_the_folder == [{"prompt": "heldout", "answer": "2"}]


@pytest.mark.parametrize("whole_folder", [False, True])
def test_task_json_says_how_the_jsonl_beside_it_is_verified(tmp_path, whole_folder):
    path = str(tmp_path if whole_folder else tmp_path / "train.jsonl")
    (tmp_path / "train.jsonl").write_text('{"prompt": "bc", "answer": "=x;"}\n')
    without = task_of(path)
    assert without == Task(without.train, without.heldout)
    settings = '{"verifier": "exact", "instruction": null}'
    (tmp_path / "task.json").write_text(settings)
    # The rewards of a run that is going are not changed by that.
    assert task_of(path) is without
    task_of.cache_clear()
    assert task_of(path).verifier == "exact" and task_of(path).instruction is None
    assert load_task(path, "train") == [{"prompt": "bc", "answer": "=x;"}]
    (tmp_path / "task.json").write_text('{"verifier": "exakt"}')
    task_of.cache_clear()
    with pytest.raises(ValueError, match="unknown verifier 'exakt'"):
        load_task(path, "train")


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"verifer": "exact"}', "has 'verifer'; it may have verifier and instruction"),
        ('{"verifier": null}', "verifier is None; it must be a text"),
        ('{"instruction": 7}', "instruction is 7; it must be a text"),
        ('{"verifier": ', "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1]", "is no JSON object"),
        ("7", "is no JSON object"),
    ],
)
def test_a_bad_task_json_is_refused_in_one_sentence(tmp_path, content, message):
    (tmp_path / "train.jsonl").write_text('{"prompt": "bc", "answer": "5"}\n')
    (tmp_path / "task.json").write_text(content)
    with pytest.raises(ValueError, match=rf"task\.json.*{message}") as caught:
        task_of(str(tmp_path))
    assert "\n" not in str(caught.value)


GOOD_LINE = '{"prompt": "1+1", "answer": "2"}\n'
BAD_FILES = [
    ("", r"t\.jsonl has no problems"),
    (GOOD_LINE + '{"prompt": "1+', r"t\.jsonl, line 2 is not JSON"),
    (GOOD_LINE + "\n", r"t\.jsonl, line 2 is not JSON"),
    ('["1+1", "2"]\n', r"t\.jsonl, line 1 is not a JSON object"),
    ("7\n", r"t\.jsonl, line 1 is not a JSON object"),
    ("\xff\n", r"t\.jsonl, line 1 is not JSON: 'utf-8' codec"),
    ("\0\n", r"t\.jsonl, line 1 is not JSON"),
    ("[" * 100_000 + "\n", r"t\.jsonl, line 1 is not JSON: .*recursion"),
    ('{"prompt": "1+1"}\n', r"t\.jsonl, line 1 has no gold answer.*answer.*solution"),
    ('{"answer": "2"}\n', r"t\.jsonl, line 1 has no problem.*prompt.*question"),
    ('{"prompt": [{"role": "user"}], "answer": "2"}\n', r"line 1 has no problem"),
    ('{"prompt": "", "answer": "2"}\n', r"line 1 has no problem"),
    ('{"prompt": "1+1", "answer": ""}\n', r"line 1 has no gold answer"),
    ('{"prompt": "1+1", "answer": " "}\n', r"line 1 has no gold answer"),
    ('{"prompt": "1+1", "answer": true}\n', r"line 1 has no gold answer"),
    ('{"prompt": "1+1", "answer": NaN}\n', r"line 1 has no gold answer"),
    ('{"prompt": "1+1", "answer": ["2"]}\n', r"line 1 has no gold answer"),
    ('{"prompt": "1+1", "answer": %s}\n' % ("9" * 5000), r"line 1 is not JSON"),
    ('{"prompt": "1\\u0000", "answer": "2"}\n', r"line 1 has a NUL character"),
    ('{"prompt": "1", "answer": "\\u0000"}\n', r"line 1 has a NUL character"),
    ('{"prompt": "\\ud800", "answer": "2"}\n', r"line 1 has a lone surrogate, '\\ud8"),
    ('{"prompt": "1", "answer": "\\udfff"}\n', r"line 1 has a lone surrogate, '\\udf"),
    (
        GOOD_LINE + '{"prompt": "1+1", "answer": "}{"}\n',
        r"1 of the 2 problems .*t\.jsonl, line 2, has '}{'",
    ),
    ('{"prompt": "1+1", "answer": "1 2"}\n', r"1 of the 1 problems .* has '1 2'"),
    ('{"prompt": "1+1", "answer": "%s"}\n' % ("9" * 301), r"1 of the 1 .*'999"),
    ('{"prompt": "1+1", "solution": "It is 2."}\n', r"1 of the 1 problems .* has ''"),
]


@pytest.mark.parametrize("content, message", BAD_FILES)
def test_a_bad_file_is_refused_by_name_and_line(tmp_path, content, message):
    (tmp_path / "t.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        load_task(str(tmp_path / "t.jsonl"), "train")
    assert "\n" not in str(caught.value)


def test_a_line_of_100_megabytes_is_refused_without_being_held(tmp_path):
    path = tmp_path / "t.jsonl"
    with open(path, "wb") as file:
        file.write(GOOD_LINE.encode())
        file.write(b'{"prompt": "')
        for _ in range(100):
            file.write(b"x" * 10**6)
        file.write(b'", "answer": "2"}\n')
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="line 2 is longer than 1048576 bytes"):
            load_task(str(path), "train")
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_part_of_a_row(tmp_path):
    content = b"\xef\xbb\xbf" + GOOD_LINE.strip().encode() + b"\r\n"
    (tmp_path / "t.jsonl").write_bytes(content)
    problems = load_task(str(tmp_path / "t.jsonl"), "train")
    assert problems == [{"prompt": "1+1", "answer": "2"}]


@pytest.mark.parametrize(
    "number, gold",
    [("1e-7", "0.0000001"), ("24.0", "24"), ("0.50", "0.5"), ("1e23", "1" + "0" * 23)],
)
def test_a_gold_number_is_written_as_people_do(number, gold, tmp_path):
    (tmp_path / "t.jsonl").write_text(f'{{"prompt": "x", "answer": {number}}}\n')
    problems = load_task(str(tmp_path / "t.jsonl"), "train")
    assert problems == [{"prompt": "x", "answer": gold}]


def test_an_own_problem_is_not_left_out_for_a_mark_of_amo_bench(tmp_path):
    row = {"prompt": "x", "answer": "2", "answer_type": "description"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    assert len(load_task(str(tmp_path / "t.jsonl"), "train")) == 1


@pytest.mark.parametrize(
    "fields", [{"answer": "2"}, {"prompt": "x", "answer": None}, {"prompt": "\0"}]
)
def test_a_hub_row_without_a_problem_or_an_answer_has_no_gold(fields):
    good = {"prompt": "1+1", "answer": "2"}
    rows = tasks.rows_of_hub([(1, good), (2, fields)], "a/b test")
    assert rows == [
        tasks.Row("a/b test, line 1", "1+1", "2", False),
        tasks.Row("a/b test, line 2", "", "", False),
    ]
    # Where no row has them, the first one's complaint is of more use.
    with pytest.raises(ValueError, match="a/b test, line 1 has no"):
        tasks.rows_of_hub([(1, fields), (2, fields)], "a/b test")


def test_a_chat_template_that_prints_the_date_prints_the_same_one_every_day():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("tiny")
    tokenizer.chat_template = "{{ strftime_now('%Y%m%d') }}:"
    token_ids = encode_prompt(tokenizer, "1+1")
    assert token_ids == tokenizer.encode("20260101:", add_special_tokens=False)


@pytest.mark.parametrize(
    "name, split, message",
    [
        ("gsm9k", "train", "unknown task 'gsm9k'.*tiny, gsm8k, math"),
        ("no/such/file.jsonl", "train", "unknown task 'no/such/file.jsonl'"),
        ("nosuch/file.jsonl", "train", "unknown task 'nosuch/file.jsonl'"),
        ("owner/..", "train", r"unknown task 'owner/\.\.'"),
        ("../owner", "train", r"unknown task '\.\./owner'"),
        ("a\0b", "train", "unknown task"),
        ("x" * 10_000, "train", "unknown task"),
        ("/dev/zero", "train", "unknown task '/dev/zero'"),
        ("aime2024", "train", "'aime2024' has no split 'train': give 'heldout'"),
        ("tiny", "test", "'tiny' has no split 'test': give 'train' or 'heldout'"),
        (str(HERE), "train", r"cannot load .*train\.jsonl"),
    ],
)
def test_a_wrong_task_or_split_is_one_sentence(name, split, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_task(name, split)
    assert "\n" not in str(caught.value)


def test_a_hub_out_of_reach_is_one_sentence(tmp_path):
    code = "import reward\ntry: reward.load_task('gsm8k', 'train')\n"
    code += "except ValueError as error: print(error)"
    environment = dict(
        os.environ, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), PYTHONPATH=str(ROOT)
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("\n") == 1 and "openai/gsm8k" in done.stdout
    assert done.stderr == ""


# --- prompts


def tokenizer_with(template, adds_bos=False):
    """A real tokenizer of single characters, with <s> to begin a sequence.

    template: its chat template, if any. adds_bos: whether an encoded text has <s>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(128)}
    vocabulary["<s>"] = 128
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 128)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="?",
        bos_token="<s>",
        chat_template=template,
    )


CHAT = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    "template, instruction, text",
    [
        (CHAT, "Think.", "<user>Think.\n\n1+1<assistant>"),
        (CHAT, None, "<user>1+1<assistant>"),
        (None, "Think.", "Think.\n\n1+1\n\nSolution:"),
        (None, None, "1+1\n\nSolution:"),
    ],
)
def test_a_prompt_follows_the_chat_template_if_there_is_one(
    template, instruction, text
):
    tokenizer = tokenizer_with(template)
    token_ids = encode_prompt(tokenizer, "1+1", instruction)
    assert isinstance(token_ids, list) and prompt_text(tokenizer, token_ids) == text


def test_the_prompt_of_a_base_model_begins_with_its_bos_token():
    tokenizer = tokenizer_with(None, adds_bos=True)
    token_ids = encode_prompt(tokenizer, "1+1")
    assert token_ids[0] == 128 and token_ids.count(128) == 1
    assert prompt_text(tokenizer, token_ids) == "<s>1+1\n\nSolution:"


def test_a_bos_token_in_the_chat_template_is_not_doubled():
    tokenizer = tokenizer_with("{{bos_token}}" + CHAT, adds_bos=True)
    token_ids = encode_prompt(tokenizer, "1+1")
    assert token_ids[0] == 128 and token_ids.count(128) == 1
    assert prompt_text(tokenizer, token_ids) == "<s><user>1+1<assistant>"


def test_support_does_not_import_the_top_level():
    names = "loss|reward|rollout|policy|train|eval"
    for path in (judge.__file__, tasks.__file__):
        assert not re.search(
            rf"^\s*(from|import) ({names})\b", Path(path).read_text(), re.M
        )
