r"""A task: its problems, its gold answers, and what counts as correct.

    load_task(name_or_path, split)         -> [{"prompt": ..., "answer": ...}, ...]; split: "train" or "heldout"
    score(completions, answers, verifier)  -> [1.0, 0.0, ...]
    task_of(name_or_path)                  -> the Task: its verifier, and its instruction for encode_prompt

A name is one of TASKS, a JSONL file, a folder with train.jsonl and heldout.jsonl, or a hub dataset "owner/name".

Model output is never evaluated. Comparing two formulas can take forever (98**97**96), so it happens
in a worker: a separate Python that forks a judge, which the kernel kills at its time limit (SIGALRM,
default action) while the worker lives on and forks the next one. An answer may take LIMIT seconds; each
kill halves that for the rest of its batch, down to FLOOR. So k hostile answers delay a batch by less than
2 * LIMIT + k * FLOOR seconds, get 0, and leave the other rewards as they are.

Run it: python reward.py
"""

import atexit
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

LIMIT, FLOOR = 1.0, 0.1  # seconds for one comparison, see above
MEMORY = 4 * 2**30  # bytes of address space for the worker: a memory bomb ends there
MAX_ANSWER = 300  # characters; a longer final answer is wrong


@dataclass(frozen=True)
class Task:
    train: object  # Path of a JSONL file, or (hub id, configurations, split)
    heldout: object
    verifier: str = "math"
    instruction: str | None = "Reason step by step and put the final answer in \\boxed{}."


TINY = Path(__file__).resolve().parent / "tiny"
TASKS = {"tiny": Task(TINY / "train.jsonl", TINY / "heldout.jsonl", "exact", None)}


def task_of(name_or_path):
    if name_or_path in TASKS:
        return TASKS[name_or_path]
    path = Path(name_or_path)
    if path.is_dir():
        return Task(path / "train.jsonl", path / "heldout.jsonl")
    if path.is_file():
        return Task(path, path)
    raise ValueError(f"unknown task {name_or_path!r}: the known ones are {', '.join(TASKS)}")


def load_task(name_or_path, split):
    source = getattr(task_of(name_or_path), split)
    return [json.loads(line) for line in open(source)]


def encode_prompt(tokenizer, problem, instruction=None):
    """The token ids that the model continues: by its chat template, or a plain one for a base model."""
    if tokenizer.chat_template is None:
        text = "\n\n".join(filter(None, (instruction, f"Problem: {problem}", "Solution:")))
        return tokenizer.encode(text)
    system = [{"role": "system", "content": instruction}] if instruction else []
    messages = system + [{"role": "user", "content": problem}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def score(completions, answers, verifier="math"):
    """1.0 for every completion whose final answer is right, else 0.0."""
    if verifier == "exact":
        return [float(c.split()[-1:] == [a]) for c, a in zip(completions, answers, strict=True)]
    raise NotImplementedError
