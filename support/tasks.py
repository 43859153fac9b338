"""Loads the problems of a task and makes prompts of them; bad rows are refused here."""

import functools
import json
import os
import pkgutil
import re
import sys
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

from pydantic.dataclasses import dataclass

from answers.extraction import final_answer, last_box, last_thought_tag
from answers.latex import MAX_LENGTH, latex_of, number_of
from support.command import Refused, one_line

ROOT = Path(__file__).resolve().parents[1]
VERIFIERS = ("exact", "gsm8k", "math")  # those of reward.py


@dataclass(config={"extra": "forbid"})
class Task:
    """Where a task's problems are and how its answers are compared."""

    # A JSONL file, or a hub dataset as "hub_id split [configuration]", or None.
    train: Path | str | None
    heldout: Path | str | None
    # How reward.score compares: by one of VERIFIERS, or module:name.
    verifier: str = "math"
    # What stands before each problem in its prompt; None for nothing.
    instruction: str | None = (
        "Reason step by step and put the final answer in \\boxed{}."
    )


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


# Endings of what is a file, and no dataset of the hub.
FILES = "jsonl?|csv|parquet|gz|txt"
# Columns with a part of a problem that would be left out.
MORE = ("choices", "options", "context", "passage", "article", "body")


@functools.cache
def task_of(name_or_path: str) -> Task:
    """The task of that name in TASKS, or that the user's own data are.

    Own data: a folder with train.jsonl and heldout.jsonl, a JSONL file, which is both
    splits, or a hub dataset "owner/name", with splits train and test. Their verifier
    and instruction are those of Task, unless a task.json beside the JSONL says
    otherwise, such as {"verifier": "exact", "instruction": null}.

    Raises Refused if there is no such task, or its task.json is none.
    """
    if name_or_path in TASKS:
        return TASKS[name_or_path]
    path = Path(name_or_path)
    if path.is_dir():
        train, heldout = path / "train.jsonl", path / "heldout.jsonl"
    elif path.is_file():
        train = heldout = path
    elif re.fullmatch(rf"\w[\w.-]*/(?!.*\.({FILES})$)\w[\w.-]*", name_or_path):
        return Task(f"{name_or_path} train", f"{name_or_path} test")
    else:
        raise Refused(
            f"there is no task {name_or_path!r}: give a file, a folder, a hub dataset, "
            f"or one of {', '.join(TASKS)}"
        )
    settings = train.with_name("task.json")
    try:
        fields = json.loads(settings.read_bytes()) if settings.exists() else {}
        task = Task(train, heldout, **fields)
        if task.verifier == "exact" and "instruction" not in fields:
            raise ValueError(
                "exact compares the last word, and the usual instruction asks for a "
                "box: give another instruction, or null"
            )
        (task.instruction or "").encode()  # as read_jsonl does
        if task.verifier not in VERIFIERS:
            pkgutil.resolve_name(task.verifier)
    except Exception as error:  # the user's module may raise any
        raise Refused(
            f"{settings} may give a verifier ({', '.join(VERIFIERS)} or module:name) "
            f"and an instruction: {one_line(error)}"
        ) from None
    return task


def load_task(name_or_path: str, split: str) -> list[dict[str, str]]:
    """[{"prompt": problem, "answer": gold}, ...] of the split "train" or "heldout".

    The task's verifier can read each gold answer. In the user's own
    files a row that it does not accept is refused. In a hub dataset, which is not the
    user's to correct, the row is left out, and counted on stderr.

    Raises Refused, in one sentence, for an unknown task or split or a bad row.
    """
    task = task_of(name_or_path)
    source = getattr(task, split, None)
    if source is None:
        raise Refused(f"the task {name_or_path!r} has no split {split!r}")
    rows = read_jsonl(source) if isinstance(source, Path) else read_hub(source)
    if not rows:
        raise Refused(f"{source} has no rows")
    problems = [problem_of(row) for row in rows.values()]
    golds = [problem["answer"] for problem in problems]
    if task.verifier in VERIFIERS:
        # Several lines, but for a matrix, are a worked solution that marks no answer.
        golds = ["" if re.match(r"(?!.*\\begin).+\n", gold) else gold for gold in golds]
        accepted = [is_readable(gold, task.verifier) for gold in golds]
    else:
        accepted = golds  # Only the user's own verifier knows what it can read.
    kept, bad = [], []
    for number, problem, is_accepted in zip(rows, problems, accepted, strict=True):
        gold = problem["answer"]
        if problem["prompt"] and is_accepted:
            kept.append(problem)
            continue
        if not problem["prompt"]:
            reason = f"no problem, or one with {', '.join(MORE)}, which are not read"
        elif not gold:
            reason = "no answer, as text or number"
        elif len(gold) > MAX_LENGTH:
            reason = f"an answer of over {MAX_LENGTH} characters"
        else:
            reason = f"{gold!r} is no answer that {task.verifier!r} can read"
        bad.append(f"row {number}: {reason}")
    if bad:
        note = (
            f"{len(bad)} of the {len(rows)} rows of {source} cannot be used, the first "
            f"of them: {'; '.join(bad[:5])}"
        )
        if isinstance(source, Path) or not kept:
            columns = sorted(set().union(*rows.values()))
            raise Refused(
                f"{note}: correct or remove them (its columns are "
                f"{', '.join(columns)}; read are prompt, problem or question, and "
                "answer or solution)"
            )
        say_once(f"{note}: left out")
    return kept


def read_jsonl(path: Path) -> dict[int, dict[str, Any]]:
    """The objects of a JSONL file by their lines. A number remains the text there.

    Raises Refused if there is no such file, or if a line is no JSON object.
    """
    rows = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(
                line.decode("utf-8-sig"),
                parse_int=str,
                parse_float=str,
                parse_constant=lambda name: None,
            )
            rows[number] = {**row}  # TypeError: "is not a mapping"
            # Half of a character, as "\ud83d", is a text for Python alone.
            json.dumps(row, ensure_ascii=False).encode()
        except Exception as error:  # RecursionError, too, of many brackets
            raise Refused(
                f"{path}, line {number} is no JSON object, and a task has one a line: "
                f"{one_line(error)}"
            ) from None
    return rows


def read_hub(source: str) -> dict[int, dict[str, Any]]:
    """The rows of "hub_id split [configuration]" by their numbers.

    Raises Refused if it cannot be loaded.
    """
    from datasets import load_dataset  # it takes seconds to import

    hub_id, split, *configuration = source.split()
    try:
        rows = load_dataset(hub_id, *configuration, split=split)
    except Exception as error:  # its kinds are many, from the network's to the hub's
        raise Refused(
            f"{source} cannot be loaded: {one_line(error)}; there is no such file or "
            "folder here, and other splits can be saved as train.jsonl and "
            "heldout.jsonl in a folder (recipes/README.md)"
        ) from None
    # AMO-Bench marks answers that only a reader can judge.
    return {
        number: row
        for number, row in enumerate(rows, start=1)
        if row.get("answer_type") != "description"
    }


def problem_of(row: dict[str, Any]) -> dict[str, str]:
    """The problem of a row and its gold answer, "" for what it lacks.

    The answer may be marked, as in a worked solution. A problem that is more than a
    text, such as one with choices, is none.
    """
    texts = defaultdict(str)
    for column, value in row.items():
        # Neither true nor NaN is an answer. Numbers of a hub dataset are.
        if type(value) in (str, int, float) and value == value:
            texts[column] = str(value).strip()
    text = texts["answer"] or texts["solution"]
    answer = final_answer(text).strip() or texts["answer"]
    _, marker, rest = text.rpartition("####")
    begins_with_words = re.match(r"[*_ ]*[^\W\d_]{2}.*\n", rest)
    if marker and begins_with_words and not last_box(text):
        answer = ""  # a heading in Markdown marks no answer
    prompt = texts["prompt"] or texts["problem"] or texts["question"]
    return {"prompt": "" if any(map(row.get, MORE)) else prompt, "answer": answer}


class Dataset(NamedTuple):
    """Problems of a task, ready to sample from."""

    problems: list[dict[str, str]]  # {"prompt": ..., "answer": ...}
    prompts: list[list[int]]  # token ids, a prompt for each problem
    verifier: str
    opened: str = ""  # the tag of thoughts with which the prompts end, as <think>


def is_readable(gold: str, verifier: str) -> bool:
    """Whether a built-in verifier can read this gold answer."""
    if verifier == "exact":
        return len(gold.split()) == 1
    latex = latex_of(last_box(rf"\boxed{{{gold}}}"))
    return number_of(latex) is not None if verifier == "gsm8k" else latex != ""


def load_split(
    name_or_path: str,
    tokenizer: Any,
    split: str,
    *,
    limit: int = 0,
    room: int,
    drop_long: bool,
) -> Dataset:
    """The first `limit` problems of a task's split (0: all), with their prompts.

    Prompts of more than `room` tokens are left out and counted if `drop_long`, and
    Refused otherwise, or if no other is left. Refused is a character that the tokenizer
    cannot write, too.
    """
    task = task_of(name_or_path)
    problems = load_task(name_or_path, split)[: limit or None]
    check_characters(tokenizer, task.instruction, problems)
    prompts = [
        encode_prompt(tokenizer, problem["prompt"], task.instruction)
        for problem in problems
    ]
    if len({*map(tuple, prompts)}) == 1 < len({each["prompt"] for each in problems}):
        raise Refused(
            "the model's chat template makes one prompt of all problems: it is not one "
            "for texts"
        )
    kept = [number for number, prompt in enumerate(prompts) if len(prompt) <= room]
    dropped = len(prompts) - len(kept)
    if dropped:
        note = (
            f"{dropped} of {len(prompts)} {split} prompts of {name_or_path} have over "
            f"{max(room, 0)} tokens"
        )
        if not kept or not drop_long:
            raise Refused(
                f"{note}, which the model's context, max_response_tokens and "
                "max_prompt_tokens leave: change these, or drop such prompts (train.py "
                "does by a max_prompt_tokens above 0, eval.py by --drop_long)"
            )
        say_once(f"{note}, and are left out")
    # A chat template may open the thoughts itself, at the end of every prompt.
    prompt = tokenizer.decode(prompts[0]).rstrip()
    tag = last_thought_tag(prompt)
    is_open = tag and tag["begin"] and tag.end() == len(prompt)
    return Dataset(
        [problems[number] for number in kept],
        [prompts[number] for number in kept],
        task.verifier,
        opened=tag[0] if is_open else "",
    )


def check_characters(
    tokenizer: Any, instruction: str | None, problems: list[dict[str, str]]
) -> None:
    """Raises Refused where a prompt or a gold answer has what the model cannot write.

    Blanks and invisible signs do not matter, nor which form a character has.
    """
    texts = [text for problem in problems for text in problem.values()]
    characters = "".join([instruction or "", *texts])
    # A tokenizer of whole words may know each character, and few words.
    for text in dict.fromkeys([*characters, *texts[:100]]):
        written = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        is_written = Counter(normalize("NFKC", written))
        for character in Counter(normalize("NFKC", text)) - is_written:
            if character.isprintable() and character != " ":
                raise Refused(
                    f"the model's tokenizer cannot write {character!r} of the task, as "
                    f"in {text[:50]!r} (the embedded policy knows digits and a few "
                    "signs): give another --model"
                )


def encode_prompt(
    tokenizer: Any, problem: str, instruction: str | None = None
) -> list[int]:
    """The token ids of a prompt: a user's message, or plain text for a base model.

    A base model is one whose tokenizer has no chat template. Either way the prompt
    begins with the beginning-of-sequence token where the tokenizer, or its template,
    sets one: once.
    """
    text = f"{instruction}\n\n{problem}" if instruction else problem
    if not tokenizer.chat_template:
        token_ids = tokenizer.encode(f"{text}\n\nSolution:", add_special_tokens=True)
        # Some tokenizers append their end of sequence.
        while token_ids[-1] in tokenizer.all_special_ids:
            token_ids.pop()
        return token_ids
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],  # no system message: some refuse one
            add_generation_prompt=True,
            return_dict=False,
            # A template that prints the date prints the same one in every run.
            strftime_now=datetime(2026, 1, 1).strftime,
        )
    except Exception as error:  # the template may raise any
        raise Refused(f"the model's chat template fails: {one_line(error)}") from None


def say_once(note: str) -> None:
    """Print what the user should know on stderr, on one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(note, file=sys.stderr)
