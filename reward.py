r"""A task: its problems, its gold answers, and what counts as correct. Try it: python reward.py

Model output is never evaluated. But comparing two formulas may take forever (98^{97^{96}}), so a
worker does it: another Python, which forks a judge. A judge that exceeds its time is killed by the
kernel (SIGALRM, default action), and the next one goes on behind that answer. One comparison may
take LIMIT seconds; each kill halves that for the rest of the batch, down to FLOOR. So k hostile
answers get 0, delay it by less than 2 * LIMIT + k * FLOOR, and cost no other answer its reward.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from subprocess import PIPE, Popen

LIMIT, FLOOR, MEMORY = 1.0, 0.1, 2 * 2**30  # a judge's seconds (see above) and bytes
MAX_TEXT, MAX_ANSWER = 100_000, 300  # characters read: the end of a completion; a final answer


@dataclass(frozen=True)
class Task:
    train: Path | str | None  # a JSONL file, or "hub_id split configuration ...", or there is none
    heldout: Path | str | None
    verifier: str = "math"
    instruction: str | None = "Reason step by step and put the final answer in \\boxed{}."


HERE, SUBJECTS = Path(__file__).resolve().parent, "algebra counting_and_probability geometry "
SUBJECTS += "intermediate_algebra number_theory prealgebra precalculus"
MATH500, AIME24 = "HuggingFaceH4/MATH-500 test", "HuggingFaceH4/aime_2024 train"
TASKS = {  # Unchecked on the hub. All agree with programs that load them, + also with a data card.
    "tiny": Task(HERE / "tiny/train.jsonl", HERE / "tiny/heldout.jsonl", "exact", None),
    "gsm8k": Task("openai/gsm8k train main", "openai/gsm8k test main", "gsm8k"),  # +
    "math": Task(f"EleutherAI/hendrycks_math train {SUBJECTS}", MATH500),
    "math500": Task(None, MATH500),  # +
    "deepscaler": Task("agentica-org/DeepScaleR-Preview-Dataset train", AIME24),  # +
    "aime2024": Task(None, AIME24),  # +
    "aime2025": Task(None, "MathArena/aime_2025 train"),
    "aime2026": Task(None, "MathArena/aime_2026 train"),
    "amc23": Task(None, "math-ai/amc23 test"),
    "amo-bench": Task(None, "meituan-longcat/AMO-Bench test"),  # +
}


def task_of(name_or_path):
    """A name in TASKS, a folder with train.jsonl and heldout.jsonl, a JSONL file for both splits,
    or a dataset "owner/name" of the hub with its splits train and test."""
    path = Path(name_or_path)
    if name_or_path in TASKS:
        return TASKS[name_or_path]
    if path.is_dir():
        return Task(path / "train.jsonl", path / "heldout.jsonl")
    if path.is_file():
        return Task(path, path)
    if re.fullmatch(r"[\w-]+/[\w.-]+(?<!\.jsonl)", name_or_path):
        return Task(f"{name_or_path} train", f"{name_or_path} test")
    raise ValueError(f"unknown task {name_or_path!r}: no such file, and none of {', '.join(TASKS)}")


def load_task(name_or_path, split):
    """[{"prompt": ..., "answer": ...}, ...] of the split "train" or "heldout". A gold answer that
    its own verifier calls wrong stops the loading of a file; of a hub dataset it is left out."""
    task, problems = task_of(name_or_path), {}
    source = {"train": task.train, "heldout": task.heldout}.get(split)
    if source is None:
        raise ValueError(f"task {name_or_path!r} has no split {split!r}: try 'train' or 'heldout'")
    try:
        if isinstance(source, Path):
            rows = source.read_bytes().splitlines()
        else:
            from datasets import concatenate_datasets, load_dataset

            hub_id, part, *names = source.split()
            parts = [load_dataset(hub_id, name, split=part) for name in names or [None]]
            rows = concatenate_datasets(parts)
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(f"cannot load {source}: {why}; is the file or the hub there?") from None
    for line, row in enumerate(rows, 1):
        try:
            row = row if isinstance(row, dict) else dict(json.loads(row))
            texts = (row.get(column) for column in ("prompt", "problem", "question"))
            prompt = next(text for text in texts if isinstance(text, str) and text.strip())
            gold = next(str(row[c]) for c in ("answer", "solution") if row.get(c) not in (None, ""))
        except (ValueError, TypeError, StopIteration) as error:
            need = "a JSON object with prompt, problem or question, and answer or solution"
            raise ValueError(f"{source}, line {line}: not {need} ({error!r})") from None
        if row.get("answer_type") != "description":  # AMO-Bench's: they need a judge who can read
            _, mark, gold = gold.rpartition("####")  # GSM8K's, where 3,600 is a number
            gold = gold.replace(",", "").strip() if mark else last_boxed(gold) or gold.strip()
            problems[line] = {"prompt": prompt, "answer": gold}
    golds = [problem["answer"] for problem in problems.values()]
    texts = golds if task.verifier == "exact" else [f"\\boxed{{{gold}}}" for gold in golds]
    right = score(texts, golds, task.verifier)
    bad = {n: gold[:40] for n, gold, ok in zip(problems, golds, right, strict=True) if not ok}
    message = f"{source}: {len(golds)} problems, {len(bad)} answers unreadable by verifier "
    message += f"{task.verifier!r}, (line, answer): {list(bad.items())[:3]}"
    if len(bad) == len(golds) or bad and isinstance(source, Path):  # or if there are no problems
        raise ValueError(f"{message}; correct or remove these lines")
    if bad:
        print(f"{message}; left out", file=sys.stderr)
    return [problem for n, problem in problems.items() if n not in bad]


def encode_prompt(tokenizer, problem, instruction=None):
    """Prompt token ids by the chat template, or of plain text for a base model, which has none."""
    whole = f"{instruction}\n\n{problem}" if instruction else problem
    if not tokenizer.chat_template:
        return tokenizer.encode(f"{whole}\n\nSolution:")
    chat = [{"role": "system", "content": instruction}, {"role": "user", "content": problem}]
    if not instruction or "System role not supported" in tokenizer.chat_template:  # Gemma's
        chat = [{"role": "user", "content": whole}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def last_boxed(text):
    """What the last complete \\boxed{...} holds, or "": one pass, for a megabyte of braces too."""
    found, opened = "", []
    for brace in re.finditer(r"\\boxed\s*\{|(?<!\\)[{}]", text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{":
            found = text[start.end() : brace.start()].strip()
    return found


def number(text):
    """The value of 1,234.50 or \\$7 or 18\\% or 12 eggs; None for anything else, as 1/2 or x=3."""
    value, unit = r"(-?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?)", r"(\\?%|\\text\{[^{}]*\}|[a-zA-Z ]+)?"
    found = re.fullmatch(rf"\s*\\?\$?\s*{value}\s*{unit}\.?\s*", text[:MAX_ANSWER], re.ASCII)
    return found and Fraction(found[1].replace(",", ""))


def score(completions, answers, verifier="math"):
    """1.0 for a right final answer, else 0.0. exact: it is the last word. gsm8k: the last \\boxed{}
    (without one, what follows ####) is the same number. math: math-verify finds the last \\boxed{}
    equal; it ignores units, reads 18% as 18 or 0.18, 0.333333 as 1/3, and (1,2) as {1,2} too."""
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
    equal = dict(zip(asked, ask_worker(asked), strict=True))
    return [float(equal.get(pair, 0)) for pair in pairs]


lock, worker = threading.Lock(), None


def ask_worker(pairs):
    """For every pair (gold, answer) 1 if equal, else 0. A worker that has died is replaced."""
    global worker
    for _ in range(3):
        with lock:
            if worker is None or worker.poll() is not None:
                command = [sys.executable, HERE / "reward.py", "--worker"]
                worker = Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
            try:
                worker.stdin.write(json.dumps(pairs).encode() + b"\n")
                worker.stdin.flush()
                return json.loads(worker.stdout.readline())
            except BaseException as error:  # Ctrl-C too, whose late reply would meet the next batch
                worker.kill()
                worker.wait()
                if not isinstance(error, BrokenPipeError | json.JSONDecodeError):
                    raise
    raise RuntimeError("the worker that compares formulas dies: see what it prints on stderr")


def judge(pairs, limit, out):
    """Writes a byte 1 or 0 for every pair, until one exceeds the limit."""
    from math_verify import LatexExtractionConfig, parse, verify

    # in a box, and LaTeX only: math_verify's other readers accept any number, and evaluate
    box = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    for pair in pairs:
        signal.setitimer(signal.ITIMER_REAL, limit)
        pair = [re.sub(r"(?<=\d)( |~|\\[ ,;:])+(?=\d{3}(?!\d))", "", t).strip("$. ") for t in pair]
        gold, final = (parse(f"\\boxed{{{text}}}", box, parsing_timeout=None) for text in pair)
        equal = verify(gold, final, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(out, bytes([equal]))


def work():
    """The worker: a line of pairs in, a line of verdicts out, until its parent's pipe closes."""
    logging.disable()  # math_verify warns that its own time limit is off
    null = os.open(os.devnull, os.O_WRONLY)
    judge([(r"(\frac{1}{\sqrt{2}},3]", "x=2"), ("x^2+2x+1", "(x+1)^2")], 0, null)  # fills caches
    for line in sys.stdin:
        pairs, verdicts, limit = json.loads(line), b"", LIMIT
        while len(verdicts) < len(pairs):
            read, write = os.pipe()
            if os.fork() == 0:
                try:
                    os.dup2(null, 1)  # only the worker itself answers
                    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                    judge(pairs[len(verdicts) :], limit, write)
                finally:
                    os._exit(0)
            os.close(write)
            with open(read, "rb") as pipe:
                verdicts += pipe.read()
            os.wait()
            if len(verdicts) < len(pairs):  # the judge died of the next answer
                verdicts, limit = verdicts + b"\0", max(FLOOR, limit / 2)
        print(json.dumps(list(verdicts)), flush=True)


if __name__ == "__main__" and "--worker" in sys.argv:
    work()
elif __name__ == "__main__":
    print(f"{len(load_task('tiny', 'train'))} problems, such as {load_task('tiny', 'train')[0]}")
    for verifier, gold, *texts in (
        ("exact", "1283", "8+5+0=13. 7+0+1=8. 4+8+0=12. 1283", "8+5+0=13. 7+0+1=8. 1284"),
        ("gsm8k", "72", "48 and half of it. #### 72", "I guess 72"),
        ("math", r"\frac{1}{2}", r"So it is \boxed{0.5}.", r"\boxed{2}", r"\boxed{98^{97^{96}}}"),
    ):
        for text, reward in zip(texts, score(texts, [gold] * len(texts), verifier), strict=True):
            print(f"{verifier:6}{gold:>12}{reward:5} {text}")
