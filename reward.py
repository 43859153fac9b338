r"""A task: its problems, its gold answers, and what counts as correct. Try it: python reward.py

Model output is text to compare, never code to run. To compare numbers and words is safe; to compare
formulas may take forever, as with 98^{97^{96}}: judge.py does it, a process with a time bound."""

import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from subprocess import PIPE, run
from typing import Any, NamedTuple


class Task(NamedTuple):
    train: Path | str | None  # a JSONL file, or "hub_id split [configuration]", or there is none
    heldout: Path | str | None
    verifier: str = "math"  # how score compares: exact, gsm8k or math
    instruction: str | None = "Reason step by step and put the final answer in \\boxed{}."


HERE = Path(__file__).resolve().parent
MAX_TEXT, MAX_ANSWER = 100_000, 300  # characters read: the end of a completion; a final answer
PROMPT, GOLD = ("prompt", "problem", "question"), ("answer", "solution")  # columns: the first found
AIME24, MATH500 = "HuggingFaceH4/aime_2024 train", "HuggingFaceH4/MATH-500 test"
TASKS = {  # Unchecked on the hub. All agree with programs that load them, + also with a data card.
    "tiny": Task(HERE / "tiny/train.jsonl", HERE / "tiny/heldout.jsonl", "exact", None),
    "gsm8k": Task("openai/gsm8k train main", "openai/gsm8k test main", "gsm8k"),  # +
    "math": Task("DigitalLearningGmbH/MATH-lighteval train", MATH500),
    "math500": Task(None, MATH500),
    "deepscaler": Task("agentica-org/DeepScaleR-Preview-Dataset train", AIME24),  # +
    "aime2024": Task(None, AIME24),  # +
    "aime2025": Task(None, "MathArena/aime_2025 train"),
    "aime2026": Task(None, "MathArena/aime_2026 train"),
    "amc23": Task(None, "math-ai/amc23 test"),
    "amo-bench": Task(None, "meituan-longcat/AMO-Bench test"),  # +
}


def task_of(name_or_path: str) -> Task:
    """A name in TASKS, a folder with train.jsonl and heldout.jsonl, a JSONL file for both splits,
    or a hub dataset "owner/name" with splits train and test; else ValueError. Verifier math, as in
    Task, unless a task.json beside the JSONL says {"verifier": "exact", "instruction": null}."""
    path = Path(name_or_path)
    if name_or_path in TASKS:
        return TASKS[name_or_path]
    if path.exists():
        files = (path / "train.jsonl", path / "heldout.jsonl") if path.is_dir() else (path, path)
        settings = files[0].with_name("task.json")
        try:
            return Task(*files, **json.loads(settings.read_bytes()) if settings.exists() else {})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{settings}: not a task's verifier, instruction ({error})") from None
    if re.fullmatch(r"[\w-]+/[\w.-]+(?<!\.jsonl)", name_or_path):
        return Task(f"{name_or_path} train", f"{name_or_path} test")
    raise ValueError(f"unknown task {name_or_path!r}: no such file, and none of {', '.join(TASKS)}")


def load_task(name_or_path: str, split: str) -> list[dict[str, str]]:
    """[{"prompt": ..., "answer": gold}, ...] of the split "train" or "heldout". ValueError, in one
    sentence with file and line: no such source or split, a row without problem or answer, a gold
    answer that its own verifier calls wrong. A hub dataset is not the user's to correct: there,
    rows with such an answer are left out, and counted on stderr."""
    task, problems = task_of(name_or_path), {}  # problems: by line
    source = {"train": task.train, "heldout": task.heldout}.get(split)
    if source is None:
        raise ValueError(f"task {name_or_path!r} has no split {split!r}: try 'train' or 'heldout'")
    try:
        if isinstance(source, Path):
            rows = source.read_bytes().splitlines()
        else:
            from datasets import load_dataset

            hub_id, part, *configuration = source.split()
            rows = load_dataset(hub_id, *configuration, split=part)
    except Exception as error:
        raise ValueError(f"cannot load {source}: {' '.join(str(error).split())}") from None
    for line, row in enumerate(rows, 1):
        try:
            row = row if isinstance(row, dict) else dict(json.loads(row))
            prompt = next(t for c in PROMPT if isinstance(t := row.get(c), str) and t.strip())
            gold = next(str(row[c]) for c in GOLD if row.get(c) not in (None, ""))
        except (ValueError, TypeError, StopIteration) as error:
            need = f"a JSON object with one of {PROMPT} and one of {GOLD}"
            raise ValueError(f"{source}, line {line}: not {need} ({error!r})") from None
        if row.get("answer_type") != "description":  # AMO-Bench's: they need a judge who can read
            gold = last_boxed(gold) or gold.rpartition("####")[2].strip()  # MATH's; GSM8K's; plain
            problems[line] = {"prompt": prompt, "answer": gold}
    golds = [problem["answer"] for problem in problems.values()]
    right = score([f"\\boxed{{{gold}}} {gold}" for gold in golds], golds, task.verifier)
    bad = [f"line {n}: {g[:40]}" for n, g, ok in zip(problems, golds, right, strict=True) if not ok]
    note = f"{source}: {len(golds)} problems, {len(bad)} unreadable to {task.verifier!r} {bad[:3]}"
    if len(bad) == len(golds) or bad and isinstance(source, Path):  # or if there are no problems
        raise ValueError(f"{note}; correct or remove these lines")
    if bad:
        print(f"{note}; left out", file=sys.stderr)
    return [problem for problem, ok in zip(problems.values(), right, strict=True) if ok]


def encode_prompt(tokenizer: Any, problem: str, instruction: str | None = None) -> list[int]:
    """Prompt token ids: a user's message by the chat template, plain text for a base model."""
    text = f"{instruction}\n\n{problem}" if instruction else problem
    if not tokenizer.chat_template:
        return tokenizer.encode(f"{text}\n\nSolution:")
    chat = [{"role": "user", "content": text}]  # no system message: some templates refuse one
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def last_boxed(text: str) -> str:
    """What the last complete \\boxed{...} holds, or "": one pass, for a megabyte of braces too."""
    found, opened = "", []
    for brace in re.finditer(r"\\boxed\s*\{|(?<!\\)[{}]", text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{":
            found = text[start.end() : brace.start()].strip()
    return found


def number(text: str) -> Fraction | None:
    """The value of 1,234.50 or \\$7 or 18\\% or 12 eggs; None for anything else, as 1/2 or x=3."""
    value, unit = r"(-?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?)", r"(\\?%|\\text\{[^{}]*\}|[a-zA-Z ]+)?"
    found = re.fullmatch(rf"\s*\\?\$?\s*{value}\s*{unit}\.?\s*", text[:MAX_ANSWER], re.ASCII)
    return Fraction(found[1].replace(",", "")) if found else None


def score(completions: list[str], answers: list[str], verifier: str = "math") -> list[float]:
    """1.0 for each right final answer, else 0.0; ValueError: unequal lengths, another verifier.
    exact: it is the last word. gsm8k: the last \\boxed{} (without one, what follows ####) is the
    same number. math: math-verify finds the last \\boxed{} equal; it ignores units, reads 18% as 18
    or 0.18, 0.333333 as 1/3, and (1,2) as {1,2} too."""
    pairs = [(a, c[-MAX_TEXT:]) for a, c in zip(answers, completions, strict=True)]
    if verifier == "exact":
        return [float(text.split()[-1:] == [gold]) for gold, text in pairs]
    if verifier == "gsm8k":
        pairs = [(number(g), number(last_boxed(t) or t.rpartition("####")[2])) for g, t in pairs]
        return [float(gold == final is not None) for gold, final in pairs]
    if verifier != "math":
        raise ValueError(f"unknown verifier {verifier!r}: give 'exact', 'gsm8k' or 'math'")
    pairs = [(gold, last_boxed(text)) for gold, text in pairs]
    asked = [pair for pair in dict.fromkeys(pairs) if 0 < len(pair[1]) <= MAX_ANSWER]
    equal = dict(zip(asked, ask_judge(asked), strict=True)) if asked else {}
    return [float(equal.get(pair, 0)) for pair in pairs]


def ask_judge(pairs: list[tuple[str, str]]) -> list[int]:
    """1 for each (gold, answer) that judge.py finds equal, else 0; RuntimeError if it dies."""
    command, request = [sys.executable, HERE / "judge.py"], json.dumps(pairs)
    for _ in range(3):  # should it be killed; Ctrl-C reaches only run, which ends it
        done = run(command, input=request, stdout=PIPE, text=True, start_new_session=True)
        if done.returncode == 0:
            return json.loads(done.stdout)
    raise RuntimeError(f"{HERE / 'judge.py'} dies, code {done.returncode}: see its lines on stderr")


if __name__ == "__main__":
    print("a problem:", load_task("tiny", "train")[0])
    print("exact:", score(["8+5+0=13. 7+0+1=8. 4+8+0=12. 1283", "1284"], ["1283"] * 2, "exact"))
    print("gsm8k:", score(["48 and half of it. #### 72", "I guess 72"], ["72"] * 2, "gsm8k"))
    print("math:", score([r"\boxed{0.5}", r"\boxed{98^{97^{96}}}"], [r"\frac{1}{2}"] * 2, "math"))
