r"""Parses a LaTeX formula and decides whether two formulas are equal.

latex2sympy parses a formula; Parser corrects two of its readings. The comparison is not
that of math_verify, which treats lists as sets, rounds what is below 1e-100 to 0, and
may give another verdict if gold and answer are swapped.

Some comparisons never end, so judge.py runs each in a process that can be killed.
"""

import math
import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy.core.function import AppliedUndef
from sympy.functions.elementary.trigonometric import TrigonometricFunction

# Notation that latex2sympy drops or misreads: a modulus; dots; minutes of arc; the base
# of a numeral; a ratio of three numbers; [5]; a possible time of day, as in 3:45; words
# or letters between two numbers, as in 2\text{hours}30 and 4R3; and a number directly
# after a number, as in 1 2, 1{2}, \frac{1}{2}3, {1}{2}, 10^{3}.5 and 1.2.3. A formula
# with such notation equals only one with the same text.
UNREADABLE = re.compile(
    r"mod|equiv|phantom|dots|'|(?<!\^)\d_|:.*:|^\[[^,;&]*\]$|:.*\\text\{[ap]m\}|"
    r"(?<!\d)\d?\d:[0-5]\d(?!\d)|"
    r"\\text\{[^{}]*\} ?\d|\d ?(?![eE]\d)[a-zA-Z]+ ?\d(?![^{}]*\})|\d \d|"
    r"(?<![_^])(?:\d\{+\d|\{[^{}]*\d\}+\d)|(?<![\w}\]^])\{[^{}]*\d\}\{\d|"
    r"[a-zA-Z)}\]]\.\d|\.\d+\."
)
# In f(3) = 18 or |z| = 18 the right side is the answer.
FUNCTION_TYPES = AppliedUndef, TrigonometricFunction, sympy.Abs, sympy.floor
DIGITS = 1000  # the precision in which irrational numbers are compared


class Parser(_Latex2Sympy):
    """latex2sympy with two corrections."""

    def parse_number(self, text: str) -> sympy.Rational:
        """Return a decimal as an exact fraction: 25/100 for 0.25."""
        return sympy.Rational(text)

    def convert_postfix_list(self, factors: list[Any], _: int = 0) -> Any:
        r"""Multiply adjacent factors, but add those of a mixed number, 2\frac{3}{4}."""
        text = "".join(factor.getText() for factor in factors[:2])
        values = [self.convert_postfix(factor) for factor in factors]
        if re.fullmatch(r"\d+\\frac\{\d+\}\{\d+\}", text) and values[1] < 1:
            values[:2] = [sum(values[:2])]
        return math.prod(values)


def parse_formula(latex: str) -> Any:
    """Return the normal form of a formula. Raises an Exception if it has no meaning."""
    if UNREADABLE.search(latex):
        raise ValueError("the notation is ambiguous")
    if latex.count(r"\pm") == 1 and not re.search("[,;]", latex):
        return [parse_formula(latex.replace(r"\pm", sign)) for sign in "+-"]
    latex = re.sub(r"(?<=\d)[eE]([-+]?\d+)(?!\w)", r"\\cdot10^{\1}", latex)  # 3e8
    # R and r are two variables, and variables are real.
    parser = Parser(is_real=True, config=ConversionConfig(lowercase_symbols=False))
    formula = parser.parse(latex)
    if formula.has(sympy.zoo, sympy.nan):
        raise ValueError("it divides by 0")
    return normal_form(formula)


def normal_form(formula: Any) -> Any:
    """Return an unordered list, an ordered tuple, or else one sympy object.

    A list keeps repeated items. The tuple (1,2) stands for a pair, a column vector or
    an open interval. For [1,2) it has two more items, which say which ends are open. A
    union becomes the list of its intervals, and an inequality in one variable becomes
    the set of the values that the variable may have.
    """
    if isinstance(formula, (sympy.Union, sympy.Complement, sympy.Intersection)):
        formula = formula.doit()
    elif isinstance(formula, sympy.Eq):
        return formula
    elif isinstance(formula, (sympy.Rel, sympy.And)) and len(formula.free_symbols) == 1:
        formula = formula.doit().as_set()
    if isinstance(formula, sympy.Interval):
        ends = formula.left_open, formula.right_open
        return (formula.start, formula.end, *(() if all(ends) else ends))
    if isinstance(formula, sympy.MatrixBase) and formula.cols > 1:
        return tuple(map(tuple, formula.tolist()))
    if isinstance(formula, (sympy.Tuple, sympy.MatrixBase)):
        return tuple(map(normal_form, formula))
    if isinstance(formula, (sympy.FiniteSet, sympy.Union, sympy.And)):
        items = getattr(formula, "_unsorted_args", formula.args)
        return [*map(normal_form, items)] if len(items) != 1 else normal_form(items[0])
    return formula


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two formulas in normal form are equal."""
    if isinstance(a, sympy.Eq) != isinstance(b, sympy.Eq):
        a, b = value_of(a), value_of(b)
    elif isinstance(a, sympy.Eq) and a.lhs == b.lhs:
        a, b = normal_form(a.rhs), normal_form(b.rhs)
    if isinstance(a, list) != isinstance(b, list):
        a, b = in_order(a), in_order(b)
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        if isinstance(a, tuple) or not a:
            return all(map(are_equal, a, b))
        # The first item of a may equal any item of b, if the others are equal, too.
        return any(
            are_equal((a[0], a[1:]), (item, b[:i] + b[i + 1 :]))
            for i, item in enumerate(b)
        )
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return a == b or is_zero(a - b)
    if isinstance(a, sympy.Rel) and isinstance(b, sympy.Rel):
        # They may differ by a factor: x < y, 2x < 2y and -x > -y are equal.
        factor = sympy.simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
        kind = b.func if factor.is_positive else b.reversed.func
        return bool(
            factor.is_number and factor.is_nonzero and a.free_symbols and a.func is kind
        )
    return a == b


def in_order(formula: Any) -> Any:
    """Return the list x = 2, y = 5 as a tuple of equations, in alphabetical order.

    Any other formula is returned unchanged.
    """
    if not isinstance(formula, list):
        return formula
    names = {e.lhs for e in formula if isinstance(e, sympy.Eq) and e.lhs.is_Symbol}
    return tuple(sorted(formula, key=str)) if len(names) == len(formula) else formula


def value_of(formula: Any) -> Any:
    r"""Return 18 for x = 18, 18 = x, m+n = 18, AB = 18, f(3) = 18 and 9+9 = 18.

    For (x, y) = (1, 2), return (1, 2). Any other formula is returned unchanged.
    """
    if not isinstance(formula, sympy.Eq):
        return formula
    left, right = formula.args
    # m\angle ABC is parsed as the product A*B*C*m, and f^{-1}(3) as 1/f(3).
    is_name = re.fullmatch(r"[A-Z](\*[A-Zm])+|1/\w\(.*\)", str(left))
    is_sum = all(term.is_Symbol for term in sympy.Add.make_args(left))
    # Somebody who writes (y, x) = (1, 2) does not mean the pair (1, 2).
    is_pair = isinstance(left, sympy.Tuple) and list(left) == sorted(left, key=str)
    if isinstance(left, FUNCTION_TYPES) or is_name or is_sum or is_pair:
        return normal_form(right)
    if right.is_Symbol:
        return left
    return right if not left.free_symbols and are_equal(left, right) else formula


def is_zero(term: sympy.Expr) -> bool:
    """Return whether a term is 0. A number far below its summands counts as 0."""
    term = term.subs(sympy.Symbol("i", real=True), sympy.I).doit()
    if term.free_symbols:
        term = sympy.simplify(term)
    if (
        term.is_Rational
        or not term.is_number
        or term.has(sympy.oo, sympy.zoo, sympy.nan)
    ):
        return term == 0
    scale = max(abs(part.evalf(DIGITS)) for part in sympy.Add.make_args(term))
    value = abs(term.evalf(DIGITS, maxn=DIGITS))
    # Larger summands could cancel and hide a difference.
    return bool(scale < 10**100 and value < scale / 10 ** (DIGITS - 100))
