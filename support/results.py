"""What an evaluation leaves in its folder, written by rank 0 alone.

problems.jsonl    settings, then a line a finished problem, to go on from
results.json      settings, pass@k for k = 1..n with intervals, right samples by problem
results.md        the same as a table, for k = 1, 2, 4, ..., n
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from support.checkpoints import write_whole
from support.flags import Refused
from support.prompts import Split
from support.tasks import task_of

# What decides how fast an evaluation goes and where it writes. What it finds does not
# depend on it, but for the rounding of other batches (eval.py's docstring).
NO_SETTINGS = {
    "out_dir",
    "chunk_responses",
    "rollout_tp",
    "kv_cache_gb",
    "max_num_seqs",
    "verbose",
}


def settings_of(
    config: dict[str, Any], model: str, benchmarks: dict[str, Split]
) -> dict[str, Any]:
    """All that decides the result: the flags, the very weights, the very prompts."""
    settings = {
        name: value for name, value in config.items() if name not in NO_SETTINGS
    }
    digest = hashlib.sha256()
    for path in sorted(Path(model).glob("*")):
        if path.suffix in (".safetensors", ".bin"):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    # A hub name has no folder here: its commit stands for the weights.
    model_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    commit = getattr(model_config, "_commit_hash", None)
    settings["weights"] = commit or digest.hexdigest()[:16]
    settings["benchmarks"] = {}
    for task, split in benchmarks.items():
        content = json.dumps([split.problems, split.prompts]).encode()
        settings["benchmarks"][task] = {
            "problems": len(split.problems),
            "dropped": split.dropped,
            "verifier": task_of(task).verifier,
            "content": hashlib.sha256(content).hexdigest()[:16],
        }
    return settings


def default_folder(settings: dict[str, Any]) -> Path:
    """runs/eval- and a hash: the same command finds its folder, another never does."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return Path(f"runs/eval-{digest[:8]}")


def begin_or_resume(path: Path, settings: dict[str, Any]) -> dict[str, list[int]]:
    """Right samples by problem, of each task, as problems.jsonl has them.

    Where there is no such file it is begun. Raises Refused on a file of other settings,
    or one that is none of ours, and leaves it as it is.
    """
    correct: dict[str, list[int]] = {task: [] for task in settings["benchmarks"]}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(settings) + "\n")
        return correct
    # A kill may have cut the last line.
    whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
    first_line, *lines = whole.splitlines()
    try:
        stored = dict(json.loads(first_line))
        for line in lines:
            row = json.loads(line)
            of_task = correct.setdefault(row["task"], [])
            if row["problem"] != len(of_task):
                raise ValueError(f"problem {row['problem']} is out of order")
            of_task.append(int(row["correct"]))
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{path} does not hold results by problem: {error!r}") from error
    names = sorted(stored.keys() | settings.keys())
    changed = [name for name in names if stored.get(name) != settings.get(name)]
    if changed:
        raise Refused(
            f"{path} has other settings ({', '.join(changed)}): choose another out_dir"
        )
    os.truncate(path, len(whole))
    return correct


def append(path: Path, task: str, first: int, correct: list[int]) -> None:
    """Add the finished problems first, first + 1, ... of a task."""
    rows = [
        {"task": task, "problem": problem, "correct": count}
        for problem, count in enumerate(correct, first)
    ]
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def write_report(
    folder: Path, settings: dict[str, Any], result: dict[str, Any], correct: dict
) -> str:
    """results.json and results.md, whose text is returned; `result` is an estimate."""
    content = {"settings": settings, **result, "correct": correct}
    write_whole(folder / "results.json", json.dumps(content, indent=1) + "\n")
    n = settings["samples"]
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if k < n] + [n]
    rows = [
        ["benchmark", "problems", *(f"pass@{k} [95%]" for k in ks)],
        ["---"] * (2 + len(ks)),
    ]
    for task, estimates in result["pass@k"].items():
        problems = str(settings["benchmarks"][task]["problems"])
        rows.append([task, problems, *cells(estimates, ks)])
    if len(result["pass@k"]) > 1:
        rows.append(["mean of benchmarks", "", *cells(result["average"], ks)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    about = {name: value for name, value in settings.items() if name != "benchmarks"}
    about["task"] = " ".join(settings["task"])
    about["samples"] = f"{n} of each problem"
    about["dropped prompts"] = ", ".join(
        f"{benchmark['dropped']} of {task}"
        for task, benchmark in settings["benchmarks"].items()
    )
    about["intervals"] = result["intervals"]
    text = (
        table
        + "\n\n"
        + "".join(f"- {name}: {value}\n" for name, value in about.items())
    )
    write_whole(folder / "results.md", text)
    return text


def cells(estimates: dict[str, Any], ks: list[int]) -> list[str]:
    """pass@k with its interval for each of ks, as text."""
    texts = []
    for k in ks:
        low, high = estimates[str(k)]["interval"]
        texts.append(f"{estimates[str(k)]['value']:.3f} [{low:.3f}, {high:.3f}]")
    return texts
