"""Tasks: where their problems are, how these are read, and how they become prompts.

A file may hold anything. What is not a problem with a gold answer is refused, in one
sentence that says where it stands. What counts as correct is told by reward.py.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MAX_LINE = 2**20  # bytes of a line of JSONL; the longest known problem has a hundredth
PROMPT_COLUMNS = ("prompt", "problem", "question")  # the first that a row has is read
GOLD_COLUMNS = ("answer", "solution")  # likewise; a solution has its answer in a box


class Task(NamedTuple):
    """Where a task's problems are and how its answers are compared."""

    # A JSONL file, or a hub dataset as "hub_id split [configuration]", or None.
    train: Path | str | None
    heldout: Path | str | None
    # How reward.score compares: "exact", "gsm8k" or "math".
    verifier: str = "math"
    # What stands before each problem in its prompt; None for nothing.
    instruction: str | None = (
        "Reason step by step and put the final answer in \\boxed{}."
    )


class Row(NamedTuple):
    """A problem as it was read; reward.py finds the answer in the gold text."""

    where: str  # "t.jsonl, line 2", for messages
    prompt: str
    gold: str
    is_solution: bool  # whether gold is a worked solution, not an answer


AIME24 = "HuggingFaceH4/aime_2024 train"
MATH500 = "HuggingFaceH4/MATH-500 test"
# Hub ids and columns agree with programs that load these sets; none was loaded here
# from the hub. gsm8k, deepscaler, aime2024 and amo-bench agree with their data cards,
# too.
TASKS = {
    "tiny": Task(
        train=ROOT / "tiny/train.jsonl",
        heldout=ROOT / "tiny/heldout.jsonl",
        verifier="exact",
        instruction=None,
    ),
    "gsm8k": Task("openai/gsm8k train main", "openai/gsm8k test main", "gsm8k"),
    "math": Task("DigitalLearningGmbH/MATH-lighteval train", MATH500),
    "math500": Task(None, MATH500),
    "deepscaler": Task("agentica-org/DeepScaleR-Preview-Dataset train", AIME24),
    "aime2024": Task(None, AIME24),
    "aime2025": Task(None, "MathArena/aime_2025 train"),
    "aime2026": Task(None, "MathArena/aime_2026 train"),
    "amc23": Task(None, "math-ai/amc23 test"),
    "amo-bench": Task(None, "meituan-longcat/AMO-Bench test"),
}


@functools.cache
def task_of(name_or_path: str) -> Task:
    """The task of that name in TASKS, or that the user's own data are.

    It is found once in a process: what is edited later changes no reward of its run.

    Own data: a folder with train.jsonl and heldout.jsonl, a JSONL file, which is both
    splits, or a hub dataset "owner/name", with splits train and test. Their verifier
    and instruction are those of Task, unless a task.json beside the JSONL says
    otherwise, such as {"verifier": "exact", "instruction": null}.

    Raises ValueError if there is no such task, or its task.json cannot be read.
    """
    if name_or_path in TASKS:
        return TASKS[name_or_path]
    path = Path(name_or_path)
    if os.path.isdir(path):
        settings = read_settings(path / "task.json")
        return Task(path / "train.jsonl", path / "heldout.jsonl", **settings)
    if os.path.isfile(path):
        settings = read_settings(path.with_name("task.json"))
        return Task(path, path, **settings)
    looks_like_hub_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name_or_path)
    if looks_like_hub_id and not name_or_path.endswith(".jsonl"):
        return Task(f"{name_or_path} train", f"{name_or_path} test")
    raise ValueError(
        f"unknown task {name_or_path!r}: there is no such file; "
        f"give a path, a hub dataset, or one of {', '.join(TASKS)}"
    )


def read_settings(path: Path) -> dict[str, str | None]:
    """What task.json says of a Task's fields verifier and instruction."""
    if not os.path.isfile(path):
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is no JSON object; give verifier and instruction")
    for name, value in settings.items():
        if name not in ("verifier", "instruction"):
            raise ValueError(
                f"{path} has {name!r}; it may have verifier and instruction"
            )
        if not isinstance(value, str) and (name == "verifier" or value is not None):
            raise ValueError(f"{path}: {name} is {value!r}; it must be a text")
    return settings


def source_of(name_or_path: str, split: str) -> Path | str:
    """The JSONL file or hub dataset of a task's split, "train" or "heldout".

    Raises ValueError if there is no such task or it has no such split.
    """
    task = task_of(name_or_path)
    sources = {"train": task.train, "heldout": task.heldout}
    if sources.get(split) is None:
        having = [repr(name) for name, source in sources.items() if source is not None]
        raise ValueError(
            f"task {name_or_path!r} has no split {split!r}: give {' or '.join(having)}"
        )
    return sources[split]


def read_rows(source: Path | str) -> list[Row]:
    """The problems of a source, in their order.

    ValueError if it cannot be loaded, or if a row of a file has no problem or no gold
    answer.
    """
    try:
        numbered = enumerate(fields_of(source), start=1)
        if isinstance(source, Path):
            return [
                row_of(fields, where=f"{source}, line {number}")
                for number, fields in numbered
            ]
        return rows_of_hub(numbered, source)
    except OSError as error:
        raise ValueError(f"cannot load {source}: {one_line(error)}") from None


def fields_of(source: Path | str) -> Iterable[dict]:
    """One dict of columns a row, of a JSONL file or a hub dataset."""
    if isinstance(source, Path):
        return read_jsonl(source)
    from datasets import load_dataset  # seconds to import, for hub datasets only

    hub_id, split, *configuration = source.split()
    try:
        return load_dataset(hub_id, *configuration, split=split)
    except Exception as error:  # its kinds are many, from the network's to the hub's
        raise ValueError(f"cannot load {source}: {one_line(error)}") from None


def read_jsonl(path: Path) -> Iterator[dict]:
    """The JSON objects of a file, one a line; lines of over MAX_LINE are not held."""
    with open(path, "rb") as file:
        number = 0
        while True:
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE:
                raise ValueError(
                    f"{where} is longer than {MAX_LINE} bytes; shorten or remove it"
                )
            try:
                fields = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where} is not JSON: {one_line(error)}; correct or remove it"
                ) from None
            if not isinstance(fields, dict):
                raise ValueError(
                    f"{where} is not a JSON object with a problem and its answer; "
                    "correct or remove it"
                )
            yield fields


def row_of(fields: dict, where: str) -> Row:
    """The problem and the gold text of a row's columns; ValueError without them."""
    prompts = [fields[name] for name in PROMPT_COLUMNS if is_text(fields.get(name))]
    if not prompts:
        raise ValueError(f"{where} has no problem: give a text as {PROMPT_COLUMNS}")
    gold_columns = [name for name in GOLD_COLUMNS if is_answer(fields.get(name))]
    if not gold_columns:
        raise ValueError(
            f"{where} has no gold answer: give a text or a number as {GOLD_COLUMNS}"
        )
    gold = fields[gold_columns[0]]
    if isinstance(gold, float):
        # 0.0000001, where str has 1e-07. And 24 for 24.0, as pandas writes a column of
        # integers with a gap.
        gold = format((Decimal(repr(gold)) + 0).normalize(), "f")
    row = Row(
        where=where,
        prompt=prompts[0],
        gold=str(gold),
        is_solution=gold_columns[0] == "solution",
    )
    for text in (row.prompt, row.gold):
        check_characters(text, where)
    return row


def rows_of_hub(numbered: Iterable[tuple[int, dict]], source: str) -> list[Row]:
    """The rows of a hub dataset, which is not the user's to correct.

    One that has no problem or no answer becomes one that reward.load_task leaves out
    and counts. ValueError if none has both: its columns have other names, say.
    """
    rows = []
    complaints = []
    for number, fields in numbered:
        # AMO-Bench marks answers that only a reader can judge; those are left out.
        if fields.get("answer_type") == "description":
            continue
        where = f"{source}, line {number}"
        try:
            rows.append(row_of(fields, where))
        except ValueError as error:
            complaints.append(error)
            rows.append(Row(where=where, prompt="", gold="", is_solution=False))
    if complaints and len(complaints) == len(rows):
        raise complaints[0]
    return rows


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def is_answer(value: Any) -> bool:
    """Whether a column may hold an answer: a text, an integer or a finite number."""
    if isinstance(value, float):
        return Decimal(value).is_finite()
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer or is_text(value)


def check_characters(text: str, where: str) -> None:
    """ValueError for what tokenizers and logs cannot take: NUL, half of a character."""
    if "\0" in text:
        raise ValueError(f"{where} has a NUL character; correct or remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone = text[error.start]
        raise ValueError(
            f"{where} has a lone surrogate, {lone!r}, half of a character; "
            "correct or remove it"
        ) from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def with_instruction(problem: str, instruction: str | None) -> str:
    """What a user says: the task's instruction, if it has one, and the problem."""
    return f"{instruction}\n\n{problem}" if instruction else problem


def encode_prompt(
    tokenizer: Any, problem: str, instruction: str | None = None
) -> list[int]:
    """The token ids of a prompt: a user's message, or plain text for a base model.

    A base model is one whose tokenizer has no chat template. Either way the prompt
    begins with the beginning-of-sequence token where the tokenizer, or its template,
    sets one: once.
    """
    text = with_instruction(problem, instruction)
    if not tokenizer.chat_template:
        return tokenizer.encode(f"{text}\n\nSolution:", add_special_tokens=True)
    chat = [{"role": "user", "content": text}]  # no system message: some refuse one
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False, strftime_now=one_day
    )


def one_day(date_format: str) -> str:
    """The date that a chat template may print: the same one in every run."""
    return datetime(2026, 1, 1).strftime(date_format)


def prompt_text(tokenizer: Any, token_ids: list[int]) -> str:
    """All of what a model is sent, with template and special tokens, for the log."""
    return tokenizer.decode(
        token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
