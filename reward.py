r"""Decides whether an answer is correct.

A response is judged in three steps:

    1. Where is its final answer?    after </think>: in the last \boxed{} or else after
                                     the last ####
    2. What does the answer mean?    a word, a number, or a formula in LaTeX
    3. Is it the gold answer?        the same word, number or formula

In step 1, the verifier "exact" takes the last word instead. recipes/README.md has
examples of the decisions made in these steps.

Responses are untrusted text to compare, never code to run. Comparing words and numbers
is safe. Comparing some formulas, such as 98^{97^{96}}, never ends, so
answer_checking/judge.py compares them in processes with a limit on time and memory. An
answer that exceeds a limit counts as wrong.
"""

import inspect
import pkgutil
import re

from answer_checking.extraction import final_answer, without_thoughts
from answer_checking.judge import equal_formulas
from answer_checking.latex import latex_of, number_of
from support.command import Refused, Stopped, one_line
from support.tasks import Dataset


def same_words(responses: list[str], golds: list[str]) -> list[bool]:
    """Return, for each response, whether its last word is the gold answer."""
    last_words = [without_thoughts(text).split()[-1:] for text in responses]
    return [word == [gold] for word, gold in zip(last_words, golds, strict=True)]


def same_numbers(responses: list[str], golds: list[str]) -> list[bool]:
    """Return, for each response, whether its final answer is the gold number."""
    # What may stand around a number, as in x = 18, 9*2 = 18, \{18\} and [18].
    around = r"""(?x)^(?:[a-zA-Z\\{}_ ]*=)?
        (?:(?:[-+*/.(){}^%\d ]|,(?=\d{3})|\\(?:times|cdot|div|frac|sqrt)(?![a-z]))*=)*
        [][(){}\\#]* | [][(){}\\]+$"""
    answers = [latex_of(final_answer(without_thoughts(text))) for text in responses]
    numbers = [number_of(re.sub(around, "", answer)) for answer in answers]
    pairs = zip(numbers, golds, strict=True)
    return [None is not number == number_of(latex_of(gold)) for number, gold in pairs]


def same_formulas(responses: list[str], golds: list[str]) -> list[bool]:
    """Return, for each response, whether its final answer equals the gold formula."""
    answers = [latex_of(final_answer(without_thoughts(text))) for text in responses]
    pairs = [*zip(map(latex_of, golds), answers, strict=True)]
    verdicts = {pair: verdict_at_sight(*pair) for pair in pairs}
    unclear = [pair for pair in verdicts if verdicts[pair] is None]
    if unclear:
        verdicts |= zip(unclear, equal_formulas(unclear), strict=True)
    return [verdicts[pair] for pair in pairs]


def verdict_at_sight(gold: str, answer: str) -> bool | None:
    """Return whether two formulas are equal, or None if only algebra can tell."""
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
    """Return each response's reward: 1.0 if its final answer is the gold, else 0.0.

    responses and answers (the golds) have the same length. verifier is "exact",
    "gsm8k", "math" or module:name, a function of these two lists that returns numbers
    in [0, 1], which are rounded to six decimals. With the first three, a reward depends
    only on its own response and gold, and lists of different lengths raise ValueError.

    If there is no such verifier, raises ValueError, ImportError or AttributeError.
    Raises RuntimeError if formulas cannot be compared on this machine.
    """
    verify = VERIFIERS.get(verifier) or pkgutil.resolve_name(verifier)
    # Unrounded, a perfect 0.7 + 0.2 + 0.1 would be below 1 and not count as solved.
    return [round(float(verdict), 6) for verdict in verify(responses, answers)]


def compute_rewards(
    dataset: Dataset, indices: list[int], responses: list[str]
) -> list[float]:
    """Return the reward of each response to the problems with these indices.

    All problems have equally many responses, and those of a problem are adjacent. Only
    the model's own turn is graded (see Dataset.own_turn). Raises Stopped if the judge
    or the user's own verifier fails.
    """
    samples = len(responses) // len(indices)
    return checked_score(
        [dataset.own_turn(response) for response in responses],
        dataset.golds(indices, samples),
        dataset.verifier,
    )


# Matches the names of a function's first two parameters if they suggest that the
# responses do not come first.
OTHER_PARAMETERS = re.compile(
    r"""(?x)
    # prompts or golds come first, as in (prompts, completions), (doc, results) and
    # (y_true, y_pred)
    ^\w*(?:prompt|quer|question|problem|instruct|input|data|task|docs?\b|messages|
        conversation|gold|tru[et]|target|label|(?<![a-z])ref(?!in)|expect|correct(?!ed))
    # responses or prompts come second: (args, sample), but not (solutions,
    # expected_outputs)
    | ^(?!\w*(?:completion|response|output|pred|sample|text))\w+[ ]
        (?!expect|ref|true|correct|target|gold|label)
        \w*(?:completion|response|output|pred|sample|prompt)"""
)


def check_verifier(dataset: Dataset) -> None:
    """Raise Refused if the user's own verifier cannot score two empty responses.

    Reward functions of other trainers often take (prompts, completions, ...), and
    metrics often take (golds, responses). Such a function would mistake the responses
    for prompts or golds, so a function with these parameter names is refused.
    """
    if dataset.verifier in VERIFIERS:
        return
    try:
        function = pkgutil.resolve_name(dataset.verifier)
        first_two = " ".join([*inspect.signature(function).parameters][:2])
        if OTHER_PARAMETERS.search(first_two):
            raise TypeError(f"its parameters begin with {first_two}")
        compute_rewards(dataset, [0], ["", ""])
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise Refused(
            f"--verifier {dataset.verifier}: {one_line(error)}; give "
            f"{', '.join(VERIFIERS)}, or module:name, a function (in a Python file "
            "beside train.py) that takes a list of responses and a list of their gold "
            "answers, in this order, and returns a number in [0, 1] for each"
        ) from None


def checked_score(responses: list[str], golds: list[str], verifier: str) -> list[float]:
    """Return `score`'s result. Raises Stopped if the judge or the verifier fails."""
    try:
        rewards = score(responses, golds, verifier)
        if len(rewards) != len(golds) or not all(0 <= each <= 1 for each in rewards):
            raise ValueError(
                f"it gave {rewards[:9]}, not a number in [0, 1] for each response"
            )
    except Exception as error:  # the verifier may raise anything
        where = f"the response {responses[0]!r} with the gold answer {golds[0]!r}"
        if len(golds) > 1:  # find one response on which it fails
            for response, gold in zip(responses, golds, strict=True):
                checked_score([response], [gold], verifier)
            where = f"{len(golds)} responses together, but on none of them alone"
        raise Stopped(
            f"the verifier {verifier} fails on {where}: {one_line(error)}"
        ) from error
    return rewards
