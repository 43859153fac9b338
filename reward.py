r"""A task: its problems, its gold answers, and what counts as correct. Try it: python reward.py

Model output is never evaluated. But comparing two formulas may take forever (98**97**96), so a
worker does it: another Python, which forks a judge. A judge that exceeds its time is killed by the
kernel (SIGALRM, default action), and the next one goes on behind that answer. One comparison may
take LIMIT seconds; each kill halves that for the rest of the batch, down to FLOOR. So k hostile
answers get 0, delay it by less than 2 * LIMIT + k * FLOOR, and cost no other answer its reward.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

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
TASKS = {  # the hub was out of reach: + agrees with a dataset card, all with programs that load it
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
    if path.exists():
        return (
            Task(path / "train.jsonl", path / "heldout.jsonl")
            if path.is_dir()
            else Task(path, path)
        )
    if re.fullmatch(r"[\w-]+/[\w.-]+(?<!\.jsonl)", name_or_path):
        return Task(f"{name_or_path} train", f"{name_or_path} test")
    raise ValueError(f"unknown task {name_or_path!r}: no such file, and none of {', '.join(TASKS)}")


def load_task(name_or_path, split):
    """[{"prompt": ..., "answer": ...}, ...] of the split "train" or "heldout". A gold answer that
    its own verifier calls wrong stops the loading of a file; of a hub dataset it is left out."""
    task, problems, lines = task_of(name_or_path), [], []
    source = {"train": task.train, "heldout": task.heldout}.get(split)
    try:
        if isinstance(source, Path):
            rows = source.read_bytes().splitlines()
        else:
            import datasets

            hub_id, hub_split, *names = source.split()
            parts = [datasets.load_dataset(hub_id, n, split=hub_split) for n in names or [None]]
            rows = datasets.concatenate_datasets(parts)
    except Exception as error:  # no such split, no such file, no hub
        raise ValueError(f"cannot load {split!r} of {name_or_path}: {source}: {error}") from None
    for line, row in enumerate(rows, 1):
        try:
            row = json.loads(row) if isinstance(row, bytes) else row
            if row.get("answer_type") == "description":  # in AMO-Bench: needs a judge who can read
                continue
            prompt = next(row[c] for c in ("prompt", "problem", "question") if row.get(c))
            gold = next(str(row[c]) for c in ("answer", "solution") if row.get(c) not in (None, ""))
            gold = gold.rpartition("####")[2].strip()
        except (ValueError, AttributeError, StopIteration) as error:
            need = "JSON object with prompt, problem or question, and answer or solution"
            raise ValueError(f"{source}, line {line}: not a {need} ({error!r})") from None
        problems.append({"prompt": prompt, "answer": last_boxed(gold) or gold})
        lines.append(line)
    golds = [problem["answer"] for problem in problems]
    texts = golds if task.verifier == "exact" else [f"\\boxed{{{gold}}}" for gold in golds]
    right = score(texts, golds, task.verifier)
    bad = [f"line {n}: {g!r}" for n, g, r in zip(lines, golds, right, strict=True) if not r]
    message = f"{source}: {len(golds)} problems, {len(bad)} with unreadable answers {bad[:3]}"
    if not any(right) or bad and isinstance(source, Path):
        raise ValueError(f"{message}; correct or remove these")
    if bad:
        print(f"{message}; left out", file=sys.stderr)
    return [problem for problem, r in zip(problems, right, strict=True) if r]


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
    value, unit = (
        r"(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)",
        r"(?:\\?%|\\text\{[^{}]*\}|[a-zA-Z ]+)",
    )
    found = re.fullmatch(rf"\s*\\?\$?\s*{value}\s*{unit}?\.?\s*", text[:MAX_ANSWER], re.ASCII)
    return found and Fraction(found[1].replace(",", ""))


def score(completions, answers, verifier="math"):
    """1.0 for a right final answer, else 0.0. exact: it is the last word. gsm8k: the last \\boxed{}
    (without one, what follows ####) is the same number. math: math-verify finds the last \\boxed{}
    equal; it ignores units, reads 18% as 18 or 0.18, 0.333333 as 1/3, and (1,2) as {1,2} too."""
    ends = [completion[-MAX_TEXT:] for completion in completions]
    if verifier == "exact":
        return [float(e.split()[-1:] == [a]) for e, a in zip(ends, answers, strict=True)]
    if verifier == "gsm8k":
        finals = [number(last_boxed(e) or "".join(e.rpartition("####")[1:])[4:]) for e in ends]
        return [
            float(f is not None and f == number(a)) for f, a in zip(finals, answers, strict=True)
        ]
    if verifier != "math":
        raise ValueError(f"unknown verifier {verifier!r}: give 'exact', 'gsm8k' or 'math'")
    pairs = [(a, last_boxed(e)) for a, e in zip(answers, ends, strict=True)]
    asked = [pair for pair in dict.fromkeys(pairs) if 0 < len(pair[1]) <= MAX_ANSWER]
    equal = dict(zip(asked, ask_worker(asked), strict=True))
    return [float(equal.get(pair, 0)) for pair in pairs]


lock, worker = threading.Lock(), None


def ask_worker(pairs):
    """1 for every pair (gold, answer) that is equal, else 0. A worker that died is replaced."""
    global worker
    with lock:
        for _ in range(3):
            if worker is None or worker.poll() is not None:
                worker = subprocess.Popen(
                    [sys.executable, HERE / "reward.py", "--worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is not for it; it ends when its stdin does
                )
            try:
                worker.stdin.write(json.dumps(pairs).encode() + b"\n")
                worker.stdin.flush()
                return json.loads(worker.stdout.readline())
            except BaseException as error:  # Ctrl-C too: a late reply must not meet the next batch
                worker.kill()
                worker.wait()
                if not isinstance(error, (BrokenPipeError, json.JSONDecodeError)):
                    raise
    raise RuntimeError("the worker cannot run; to see why: echo '[]' | python reward.py --worker")


def run_worker():
    """A batch of pairs a line in, their verdicts a line out, until the parent closes the pipe."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    def equal(*texts):  # LaTeX in a box only: the other readers of math_verify take any number
        box = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
        # it reads 1 000 as 1 * 000, and no formula that ends in a period
        texts = [
            re.sub(r"(?<=\d)(?: |~|\\[ ,;:])+(?=\d{3}(?!\d))", "", t.strip("$. ")) for t in texts
        ]
        gold, answer = (parse(f"\\boxed{{{t}}}", box, parsing_timeout=None) for t in texts)
        return verify(gold, answer, timeout_seconds=None)

    logging.disable()
    for text in (r"\frac{\sqrt{2}}{3}", "(1,2]", "x^2+1=y", r"\begin{pmatrix}1\\2\end{pmatrix}"):
        equal(text, text)  # fills the caches that every judge inherits
    equal("x^2+2x+1", "(x+1)^2")
    for line in sys.stdin:
        pairs, verdicts, limit = json.loads(line), b"", LIMIT
        while len(verdicts) < len(pairs):
            read, write = os.pipe()
            if os.fork() == 0:  # the judge
                try:
                    os.dup2(2, 1)  # only the worker speaks to its parent
                    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                    for pair in pairs[len(verdicts) :]:
                        signal.setitimer(signal.ITIMER_REAL, limit)
                        verdict = equal(*pair)
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        os.write(write, bytes([verdict]))
                finally:
                    os._exit(0)
            os.close(write)
            with open(read, "rb") as pipe:
                verdicts += pipe.read()
            os.wait()
            if len(verdicts) < len(pairs):  # the judge died of the answer that it had come to
                verdicts, limit = verdicts + b"\0", max(FLOOR, limit / 2)
        print(json.dumps(list(verdicts)), flush=True)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        run_worker()
        sys.exit()
    for verifier, gold, completion in (
        ("exact", "1283", "8+5+0=13. 7+0+1=8. 4+8+0=12. 1283"),
        ("gsm8k", "72", "48 and 24 more. #### 72"),
        ("math", r"\frac{1}{2}", r"so it is \boxed{0.5}"),
        ("math", "5", r"\boxed{98**97**96}"),
    ):
        print(
            f"{verifier:6} gold {gold:12} {score([completion], [gold], verifier)[0]} {completion}"
        )
