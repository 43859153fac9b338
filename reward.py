r"""What counts as a correct answer.

A response is judged in three steps:

    1. where its final answer is     after </think>: the last box, #### or word
    2. what that says                a word, a number, or a formula in LaTeX
    3. whether it is the gold one    the same word, number or formula

recipes/README.md lists what was decided in each step.

Responses are untrusted text to compare, never code to run. Comparing words and
numbers is safe. Comparing formulas may never end, as with 98^{97^{96}}. So
answers/judge.py compares them in processes with a limit of time and memory. An answer
that needs more counts as wrong.
"""

import inspect
import pkgutil
import re

from answers.extraction import final_answer, without_thoughts
from answers.judge import equal_formulas
from answers.latex import latex_of, number_of
from support.command import Refused, Stopped, one_line
from support.tasks import Dataset


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


def compute_rewards(
    dataset: Dataset, indices: list[int], responses: list[str]
) -> list[float]:
    """The reward of each response to the problems with these indices.

    Each problem has equally many responses, which are neighbors. A thought that the
    prompt has opened is a part of the response. Raises Stopped if the judge or the
    user's own verifier fails.
    """
    samples = len(responses) // len(indices)
    golds = [dataset.problems[i]["answer"] for i in indices for _ in range(samples)]
    whole = [dataset.opened + response for response in responses]
    return checked_score(whole, golds, dataset.verifier)


def check_verifier(dataset: Dataset) -> None:
    """Raise Refused if the user's own verifier cannot score two empty responses.

    Reward functions of other trainers often take (prompts, completions, ...): they
    would get the responses as prompts, so they are refused by their parameters' names.
    """
    if dataset.verifier in VERIFIERS:
        return
    try:
        function = pkgutil.resolve_name(dataset.verifier)
        first_two = " ".join([*inspect.signature(function).parameters][:2])
        if re.search(
            r"^\w*(?:prompt|quer|question|input|data|sample)|"
            r" \w*(?:completion|response|output|prompt|solution_str)",
            first_two,
        ):
            raise TypeError(f"its parameters begin with {first_two}")
        compute_rewards(dataset, [0], ["", ""])
    except Exception as error:  # the user's module may raise any
        raise Refused(
            f"--verifier {dataset.verifier}: {one_line(error)}; give "
            f"{', '.join(VERIFIERS)}, or module:name of a function that takes a list "
            "of responses and a list of their gold answers, in this order, and "
            "returns a number in [0, 1] for each"
        ) from None


def checked_score(responses: list[str], golds: list[str], verifier: str) -> list[float]:
    """`score`, but it raises Stopped if the judge or the user's own verifier fails."""
    try:
        rewards = score(responses, golds, verifier)
        if len(rewards) != len(golds) or not all(0 <= each <= 1 for each in rewards):
            raise ValueError(f"it gave {rewards[:9]}, not a number in [0, 1] for each")
    except Exception as error:  # the user's function may raise any
        if verifier in VERIFIERS:
            raise Stopped(str(error)) from error
        if len(golds) > 1:  # Which of them is it?
            for pair in zip(responses, golds, strict=True):
                checked_score(*([part] for part in pair), verifier)
        raise Stopped(
            f"the verifier {verifier} fails on the response {responses[0]!r} with the "
            f"gold answer {golds[0]!r}: {one_line(error)}"
        ) from error
    return rewards
