r"""What counts as a correct answer, and the problems of a task with their answers.

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

import re
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from support.command import Refused
from support.judge import equal_formulas
from support.latex import latex_of
from support.tasks import (
    Row,
    encode_problems,
    load_rows,
    say_once,
    source_of,
    task_of,
)

# --- 1. Where the final answer is

# A brace that is not escaped, with the \boxed in front of it if there is one.
BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*)?(?<!\\)[{}]")


def without_thoughts(response: str) -> str:
    """What follows the thoughts of a model that thinks first, which end with </think>.

    Where <think> has not ended, nothing is an answer yet.
    """
    text = response.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def final_answer(text: str) -> str:
    r"""The last \boxed{...}, or else the line behind the last ####, or else ""."""
    if box := last_box(text):
        return box
    _, marker, behind = text.rpartition("####")
    return behind.strip().split("\n")[0] if marker else ""


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
        number = number_of(latex_of(answer))
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

    responses and answers are of one length; verifier is "exact", "gsm8k" or "math".
    Each reward depends on its own response and answer alone.

    Raises ValueError for lists of unequal lengths, KeyError for another verifier, and
    RuntimeError if formulas cannot be compared on this machine.
    """
    return [float(verdict) for verdict in VERIFIERS[verifier](responses, answers)]


# --- The problems of a task


def gold_answer(row: Row) -> str:
    """The answer of a row, or the one that is marked in its worked solution."""
    if row.answer:
        return final_answer(row.answer).strip() or row.answer
    return final_answer(row.solution).strip()


def load_task(name_or_path: str, split: str) -> list[dict[str, str]]:
    """[{"prompt": problem, "answer": gold}, ...] of the split "train" or "heldout".

    The task's verifier accepts each gold answer as a response's. In the user's own
    files a row that it does not accept is refused. In a hub dataset, which is not the
    user's to correct, the row is left out, and counted on stderr.

    Raises Refused, in one sentence, for an unknown task or split or a bad row.
    """
    verifier = task_of(name_or_path).verifier
    source = source_of(name_or_path, split)
    rows = load_rows(source)
    golds = [gold_answer(row) for row in rows]
    echoes = golds if verifier == "exact" else [rf"\boxed{{{gold}}}" for gold in golds]
    rewards = score(echoes, golds, verifier)
    problems = []
    unreadable = []
    for row, gold, reward in zip(rows, golds, rewards, strict=True):
        if row.problem and reward:
            problems.append({"prompt": row.problem, "answer": gold})
        else:
            unreadable.append(row)
    if not rows:
        raise Refused(f"{source} has no rows")
    if unreadable:
        note = (
            f"{len(unreadable)} of the {len(rows)} rows of {source} have no problem "
            f"with an answer that {verifier!r} can read; the first is row "
            f"{rows.index(unreadable[0]) + 1}"
        )
        if isinstance(source, Path) or not problems:
            raise Refused(
                f"{note}: correct or remove them (its columns are prompt, problem or "
                "question, and answer or solution)"
            )
        say_once(f"{note}: left out")
    return problems


class Split(NamedTuple):
    """Problems of a task, ready to sample from."""

    problems: list[dict[str, str]]  # {"prompt": ..., "answer": ...}
    prompts: list[list[int]]  # token ids, a prompt for each problem
    verifier: str

    def score(self, indices: list[int], responses: list[str]) -> list[float]:
        """The reward of each response to the problems with these indices.

        Each problem has equally many responses, which are neighbors.
        """
        samples = len(responses) // len(indices)
        answers = []
        for index in indices:
            answers += [self.problems[index]["answer"]] * samples
        return score(responses, answers, self.verifier)


def load_split(
    name_or_path: str,
    tokenizer: Any,
    split: str,
    *,
    limit: int = 0,
    room: int,
    drop_long: bool,
) -> Split:
    """The first `limit` problems of a task's split (0: all), with their prompts.

    Prompts of more than `room` tokens are left out if `drop_long`. Raises Refused if
    there are such prompts and not `drop_long`, or if none is left.
    """
    task = task_of(name_or_path)
    problems, prompts = encode_problems(
        load_task(name_or_path, split)[: limit or None],
        tokenizer,
        instruction=task.instruction,
        room=room,
        drop_long=drop_long,
        name=f"{split} prompts of {name_or_path}",
    )
    return Split(problems, prompts, task.verifier)
