r"""What counts as a correct answer.

A response is judged in three steps:

    1. where its final answer is     after </think>: the last box, #### or word
    2. what that says                a word, a number, or a formula in LaTeX
    3. whether it is the gold one    the same word, number or formula

recipes/README.md lists what was decided in each step.

Responses are untrusted text to compare, never code to run. Comparing words and
numbers is safe. Comparing formulas may never end, as with 98^{97^{96}}. So
support/judge.py compares them in processes with a limit of time and memory. An answer
that needs more counts as wrong.
"""

import pkgutil
import re
from fractions import Fraction

from support.judge import equal_formulas
from support.latex import latex_of

# --- 1. Where the final answer is

# A brace that is not escaped, with the \boxed in front of it if there is one.
BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*)?(?<!\\)(?:\\\\)*[{}]")
# <think>, </think>, <|begin_of_thought|>, [THINK], ◁/think▷, </seed:think>
THOUGHT = re.compile(
    r"(?i:[<◁]\|?(?:/|end_of_|end_)?(?:[a-z]+[_:]|begin_of_)?"
    r"(?:think(?:ing)?|thoughts?|reasoning)\|?[>▷])|\[/?THINK\]"
)
# <|im_end|>, <｜end▁of▁sentence｜>, </s>: where a response is decoded with them.
SPECIAL_TOKEN = re.compile(
    r"<[|｜][^<>\s]*[|｜]>|</?(?:s|bos|eos|pad|end_of_turn|answer)>"
)


def last_thought_tag(text: str) -> re.Match | None:
    """The last tag that begins or ends a thought."""
    *_, last = [None, *THOUGHT.finditer(text)]
    return last


def ends_thought(tag: str) -> bool:
    """Whether a tag of a thought is the one at its end."""
    return "/" in tag or "end_" in tag.lower()


def without_thoughts(response: str) -> str:
    """What follows the thoughts of a model that thinks first, which end with </think>.

    Where a thought has not ended, nothing is an answer yet. Special tokens say nothing.
    """
    tag = last_thought_tag(response)
    if tag and not ends_thought(tag[0]):
        return ""
    return SPECIAL_TOKEN.sub("", response[tag.end() :] if tag else response)


def final_answer(text: str) -> str:
    r"""The last \boxed{...}, or else the line behind the last ####, or else ""."""
    if box := last_box(text):
        return box
    _, marker, rest = text.rpartition("####")
    return rest.strip().split("\n")[0] if marker else ""


def last_box(text: str) -> str:
    r"""The content of the last \boxed{...} or \fbox{...} to close; "" without one.

    The text is read once, so that a megabyte of braces takes no longer than other text.
    """
    content = ""
    open_braces = []
    for brace in BRACE.finditer(text):
        if brace[0].endswith("{"):
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening["box"]:
                content = text[opening.end() : brace.start()]
    return content


# --- 2. What it says

NUMBER = re.compile(
    r"-?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d\d?)?", re.ASCII
)


def number_of(latex: str) -> Fraction | None:
    """The value of 1,234.50 or -.5 or 6e-5, exactly; None for what is no number."""
    return Fraction(latex.replace(",", "")) if NUMBER.fullmatch(latex) else None


# --- 3. Whether it is the gold one


def same_words(responses: list[str], golds: list[str]) -> list[bool]:
    """Whether each response's last word is the gold answer."""
    last_words = [without_thoughts(text).split()[-1:] for text in responses]
    return [word == [gold] for word, gold in zip(last_words, golds, strict=True)]


def same_numbers(responses: list[str], golds: list[str]) -> list[bool]:
    """Whether each final answer is the gold number, with a unit or without."""
    verdicts = []
    for response, gold in zip(responses, golds, strict=True):
        answer = final_answer(without_thoughts(response))
        # x = 18, \{18\}, [18]
        around = r"^(?:[a-zA-Z\\{}_ ]*=)?[][(){}\\#]*|[][(){}\\]+$"
        latex = re.sub(around, "", latex_of(answer))
        number = number_of(latex)
        verdicts.append(number is not None and number == number_of(latex_of(gold)))
    return verdicts


def same_formulas(responses: list[str], golds: list[str]) -> list[bool]:
    """Whether each final answer is equal to the gold formula."""
    answers = [final_answer(without_thoughts(text)) for text in responses]
    pairs = [
        (latex_of(gold), latex_of(answer))
        for gold, answer in zip(golds, answers, strict=True)
    ]
    verdicts = {pair: verdict_at_sight(*pair) for pair in pairs}
    for_judge = [pair for pair, verdict in verdicts.items() if verdict is None]
    if for_judge:
        verdicts.update(zip(for_judge, equal_formulas(for_judge), strict=True))
    return [verdicts[pair] for pair in pairs]


def verdict_at_sight(gold: str, answer: str) -> bool | None:
    """The verdict on two formulas if it needs no algebra, as for most; else None."""
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    numbers = number_of(gold), number_of(answer)
    return None if None in numbers else numbers[0] == numbers[1]


VERIFIERS = {"exact": same_words, "gsm8k": same_numbers, "math": same_formulas}


def score(
    responses: list[str], answers: list[str], verifier: str = "math"
) -> list[float]:
    """1.0 for each response whose final answer is the gold answer, else 0.0.

    responses and answers are of one length; verifier is "exact", "gsm8k", "math" or
    module:name, a function of these lists that gives numbers in [0, 1]. With the first
    three a reward depends on its own response and answer alone.

    Raises ValueError for lists of unequal lengths, ValueError, ImportError or
    AttributeError for a verifier that is not there, and RuntimeError if formulas cannot
    be compared on this machine.
    """
    verify = VERIFIERS.get(verifier) or pkgutil.resolve_name(verifier)
    return [float(verdict) for verdict in verify(responses, answers)]
