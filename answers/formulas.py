r"""What a formula in LaTeX says, and whether two of them say the same.

latex2sympy reads a formula. What it misreads is mended in Reader, where the mistake
arises. The comparison is not math_verify's, which takes lists for sets, cuts what is
below 1e-100 to 0 and gives another verdict when gold and answer are swapped.

Comparing may never end, so answers/judge.py does it in processes that it can kill.
"""

import functools
import itertools
import operator
import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import TrigonometricFunction

# What latex2sympy leaves out or takes for something else: a modulus, dots, minutes, the
# base of a numeral, a ratio of three, [5], which is no 5, a time of the day, and words
# or letters between two numbers, as in 2\text{hours}30 and 4R3. These are equal to
# their own text alone.
UNREADABLE = re.compile(
    r"mod|equiv|phantom|dots|'|(?<!\^)\d_|:.*:|^\[[^,;&]*\]$|:.*\\text\{[ap]m\}|"
    r"\\text\{[^{}]*\} ?\d|\d ?(?![eE]\d)[a-zA-Z]+ ?\d(?![^{}]*\})"
)
POWER = re.compile(r"\^\{[^{}]*\}$")
MIXED_NUMBER = re.compile(r"\d+\\frac\{\d+\}\{\d+\}")
# Functions of something that has no value, which an answer may give one: f(3), |z|.
OF_A_NAME = AppliedUndef, TrigonometricFunction, sympy.Abs, sympy.floor
NOT_FINITE = sympy.oo, sympy.zoo, sympy.nan
DIGITS = 1000  # with which numbers that are not rational are compared


class Reader(_Latex2Sympy):
    """latex2sympy, but for two of its readings."""

    def parse_number(self, text: str) -> sympy.Rational:
        """0.25 is 25/100 and nothing near it."""
        return sympy.Rational(text)

    def convert_postfix_list(self, factors: list[Any], _: int = 0) -> Any:
        r"""What stands side by side is multiplied. Only 2\frac{3}{4} is a sum.

        Raises ValueError for a digit beside a digit, as in 1 2 or 1{2}, and for what
        begins with a point, as in 10^{3}.5. In 2^{3}5 the brace ends the power.
        """
        texts = [factor.getText() for factor in factors]
        values = [self.convert_postfix(factor) for factor in factors]
        if MIXED_NUMBER.fullmatch("".join(texts[:2])) and values[1] < 1:
            values[:2] = [sum(values[:2])]
        for left, right in itertools.pairwise(texts):
            ends_in_digit = re.search(r"\d\}*$", left) and not POWER.search(left)
            if re.match(r"\{*[\d.]" if ends_in_digit else r"\{*\.", right):
                raise ValueError("a number beside a number")
        return functools.reduce(operator.mul, values)


def formula_of(latex: str) -> Any:
    """What a formula says, as parts_of has it; an Exception for what says nothing."""
    if UNREADABLE.search(latex):
        raise ValueError("it has no one meaning")
    if latex.count(r"\pm") == 1 and not re.search("[,;]", latex):
        return [formula_of(latex.replace(r"\pm", sign)) for sign in "+-"]
    latex = re.sub(r"(?<=\d)[eE]([-+]?\d+)(?!\w)", r"\\cdot10^{\1}", latex)  # 3e8
    # R and r are two variables, and variables are real.
    reader = Reader(is_real=True, config=ConversionConfig(lowercase_symbols=False))
    said = reader.parse(latex)
    if said.has(sympy.zoo, sympy.nan):
        raise ValueError("it divides by 0")
    return parts_of(said)


def parts_of(said: Any) -> Any:
    """A list of parts without order, a tuple of those with one, or a term or equation.

    A list tells how often a part is there. (1,2) is a pair and an open interval in one;
    [1,2) has two parts more, for its ends. A union is the list of its intervals. An
    inequality in one variable is the set of what the variable may be.
    """
    if isinstance(said, (sympy.Union, sympy.Complement, sympy.Intersection)):
        said = said.doit()
    elif isinstance(said, sympy.Eq):
        return said
    elif isinstance(said, (Relational, sympy.And)) and len(said.free_symbols) == 1:
        said = said.doit().as_set()
    if isinstance(said, sympy.Interval):
        ends = said.left_open, said.right_open
        return (said.start, said.end, *(ends if ends != (True, True) else ()))
    if isinstance(said, sympy.MatrixBase):
        return tuple(map(tuple, said.tolist()))
    if isinstance(said, sympy.Tuple):
        return tuple(map(parts_of, said))
    if isinstance(said, (sympy.FiniteSet, sympy.Union, sympy.And)):
        parts = [parts_of(part) for part in getattr(said, "_unsorted_args", said.args)]
        return parts[0] if len(parts) == 1 else parts
    return said


def same(a: Any, b: Any) -> bool:
    """Whether two formulas, as formula_of has them, say the same."""
    if isinstance(a, sympy.Eq) != isinstance(b, sympy.Eq):
        a, b = value_of(a), value_of(b)
    elif isinstance(a, sympy.Eq) and a.lhs == b.lhs:
        a, b = parts_of(a.rhs), parts_of(b.rhs)
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        if isinstance(a, tuple) or not a:
            return all(map(same, a, b))
        # Any part of b may be the first one of a, if the others are the same then.
        places = range(len(b))
        return any(same((a[0], a[1:]), (b[i], b[:i] + b[i + 1 :])) for i in places)
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return a == b or is_zero(a - b)
    if isinstance(a, Relational) and isinstance(b, Relational):
        # They may differ by a factor: x < y, 2x < 2y and -x > -y are the same.
        factor = sympy.simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
        kind = b.func if factor.is_positive else b.reversed.func
        return bool(
            factor.is_number and factor.is_nonzero and a.free_symbols and a.func is kind
        )
    return a == b


def value_of(said: Any) -> Any:
    r"""18 for x = 18, m+n = 18, AB = 18, f(3) = 18, |z| = 18, 9+9 = 18; the pair for
    (x, y) = (1, 2)."""
    if not isinstance(said, sympy.Eq):
        return said
    left, right = said.args
    # m is of m\angle ABC; the other is f^{-1}(3).
    is_name = re.fullmatch(r"[A-Z](\*[A-Zm])+|1/\w\(.*\)", str(left))
    is_sum = all(part.is_Symbol for part in sympy.Add.make_args(left))
    # Whoever writes (y, x) = (1, 2) does not mean the pair (1, 2).
    is_pair = isinstance(left, sympy.Tuple) and list(left) == sorted(left, key=str)
    if isinstance(left, OF_A_NAME) or is_name or is_sum or is_pair:
        return parts_of(right)
    if right.is_Symbol:
        return left
    return right if not left.free_symbols and same(left, right) else said


def is_zero(term: sympy.Expr) -> bool:
    """Whether a term is 0. A number is, if it is small beside the terms of its sum."""
    term = term.subs(sympy.Symbol("i", real=True), sympy.I).doit()
    if term.free_symbols:
        term = sympy.simplify(term)
    if term.is_Rational or not term.is_number or term.has(*NOT_FINITE):
        return term == 0
    scale = max(abs(part.evalf(DIGITS)) for part in sympy.Add.make_args(term))
    value = abs(term.evalf(DIGITS, maxn=DIGITS))
    # Terms that are larger could cancel, and hide whatever else is there.
    return bool(scale < 10**100 and value < scale / 10 ** (DIGITS - 100))
