"""What an evaluation leaves in its folder, written by rank 0 alone.

problems.jsonl    settings, then a line for each finished problem: an evaluation goes on from it
results.json      settings, pass@k for k = 1..n with intervals, right samples of each problem
results.md        the same as a table, for k = 1, 2, 4, ..., n
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from transformers import AutoConfig

from config import EvalConfig, Refused, Split

# What decides how fast an evaluation goes and where it writes, and not what it finds.
NO_SETTINGS = "out_dir chunk_responses rollout_tp kv_cache_gb max_num_seqs verbose".split()


def settings_of(cfg: EvalConfig, model: str, benchmarks: dict[str, Split]) -> dict:
    """All that decides the result: settings, the very weights of `model`, the very prompts."""
    settings = {name: value for name, value in asdict(cfg).items() if name not in NO_SETTINGS}
    weights = hashlib.sha256()
    for path in sorted(p for p in Path(model).glob("*") if p.suffix in (".safetensors", ".bin")):
        with path.open("rb") as file:
            weights.update(hashlib.file_digest(file, "sha256").digest())
    commit = getattr(AutoConfig.from_pretrained(model), "_commit_hash", None)  # of a hub name
    settings["weights"] = commit or weights.hexdigest()[:16]
    settings["benchmarks"] = {}
    for task, (problems, prompts, verifier, dropped) in benchmarks.items():
        content = hashlib.sha256(json.dumps([problems, prompts]).encode()).hexdigest()[:16]
        about = dict(problems=len(problems), dropped=dropped, verifier=verifier, content=content)
        settings["benchmarks"][task] = about
    return settings


def default_folder(settings: dict) -> Path:
    """runs/eval- and a hash: the same command finds its folder again, another never does."""
    return Path(f"runs/eval-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]}")


def begin_or_resume(path: Path, settings: dict) -> dict[str, list[int]]:
    """Right samples of the problems that problems.jsonl at `path` has, by task; begins a new file.

    Raises Refused on a file of other settings, or which is none of ours, and leaves it as it is.
    """
    correct: dict[str, list[int]] = {task: [] for task in settings["benchmarks"]}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n")
        return correct
    whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"  # a kill may tear the last line
    head, *lines = whole.splitlines()
    try:
        found = dict(json.loads(head))
        for row in map(json.loads, lines):
            if row["problem"] != len(correct.setdefault(row["task"], [])):
                raise ValueError(f"problem {row['problem']} is out of order")
            correct[row["task"]].append(int(row["correct"]))
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{path} does not hold results by problem: {error!r}") from error
    names = sorted(n for n in found | settings if found.get(n) != settings.get(n))
    if names:
        raise Refused(f"{path} has other settings ({', '.join(names)}): choose another out_dir")
    os.truncate(path, len(whole))
    return correct


def append(path: Path, task: str, first: int, correct: list[int]) -> None:
    """Add the finished problems first, first + 1, ... of a task."""
    rows = enumerate(correct, first)
    lines = [json.dumps({"task": task, "problem": i, "correct": c}) + "\n" for i, c in rows]
    with path.open("a") as file:
        file.write("".join(lines))


def write_report(folder: Path, settings: dict, result: dict, correct: dict) -> str:
    """results.json and results.md, whose text is returned; `result` as eval.estimate gives it."""
    content = {"settings": settings, **result, "correct": correct}
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    n, about = settings["samples"], settings["benchmarks"]
    ks = sorted({min(2**i, n) for i in range(n.bit_length() + 1)})
    rows = [["benchmark", "problems", *(f"pass@{k} [95%]" for k in ks)], ["---"] * (len(ks) + 2)]
    rows += [[t, str(about[t]["problems"]), *cells(p, ks)] for t, p in result["pass@k"].items()]
    if len(about) > 1:
        rows.append(["mean of benchmarks", "", *cells(result["average"], ks)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    told = {name: value for name, value in settings.items() if name != "benchmarks"}
    told |= {"task": " ".join(settings["task"]), "samples": f"{n} of each problem"}
    told["dropped prompts"] = ", ".join(f"{a['dropped']} of {task}" for task, a in about.items())
    told["95% intervals"] = result["intervals"]
    text = table + "\n\n" + "".join(f"- {name}: {value}\n" for name, value in told.items())
    (folder / "results.md").write_text(text)
    return text


def cells(estimates: dict, ks: list[int]) -> list[str]:
    """pass@k with its interval for each of ks."""
    found = [estimates[str(k)] for k in ks]
    return ["{:.3f} [{:.3f}, {:.3f}]".format(e["value"], *e["interval"]) for e in found]
