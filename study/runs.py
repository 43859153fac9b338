"""Runs of train.py: making a grid of them, one run a core, and reading what they left.

A cell of a grid is one run. A finished run is a line of a JSONL file, with its cell,
command, commit, configuration and metrics by step. A cell that has its line is not run
again, so a grid can be stopped and started at will.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from scipy.stats import t as student

from support.command import Refused

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "study/results"
KEPT = """step reward groups_with_signal heldout_pass@1 heldout_greedy ess ess_min
    ess_used kl above_ess entropy response_tokens truncated grad_norm ratio
    mismatch_mean""".split()


class Cell(NamedTuple):
    """What tells a run from the others of its grid."""

    mismatch: str
    objective: str
    learning_rate: float
    seed: int


Run = dict[str, Any]  # a line of the JSONL file
Runs = dict[Cell, Run]
Flags = dict[str, Any]  # of train.py, by name

# Making runs


def cells_of(
    mismatches: Iterable[str],
    objectives: Iterable[str],
    seeds: Iterable[int],
    learning_rate: float,
) -> list[Cell]:
    """All combinations, seed by seed: a grid that is stopped has whole comparisons."""
    every = itertools.product(seeds, mismatches, objectives)
    return [
        Cell(mismatch, objective, learning_rate, seed)
        for seed, mismatch, objective in every
    ]


def grid_parser(about: str, parts: Iterable[str]) -> argparse.ArgumentParser:
    """The flags of a script that makes a grid in parts."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--part", choices=parts, required=True)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    return parser


def words_of(flags: Flags) -> list[str]:
    """Flags as they stand in a command."""
    return [f"--{name}={value}" for name, value in flags.items()]


def commit_here() -> str:
    """The commit of this clone, with "-dirty" where code or data differ from it.

    What runs write into study/results does not count; 27 runs of light.jsonl are
    older than this rule, and called dirty for that alone. "no clone" outside of one.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git("diff", "--name-only", "HEAD", "--", ".", ":!study/results")
    commit = git("rev-parse", "--short=12", "HEAD") or "no clone"
    return f"{commit}-dirty" if changed else commit


def make_run(cell: Cell, command: list[str]) -> Run:
    """Run a command that is train.py with flags, and read what it wrote.

    A run that stopped itself, on a number that is not finite, keeps what it had. Any
    other failure is a RuntimeError, with what was printed.
    """
    commit, start = commit_here(), time.time()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "run")
        ended = subprocess.run(
            [sys.executable, *command, f"--out_dir={out}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        message = ended.stderr.strip()
        stopped = message.splitlines()[-1] if ended.returncode else None
        if stopped and "not finite" not in stopped:
            raise RuntimeError(message[-2000:])
        steps = [json.loads(line) for line in open(out / "metrics.jsonl")]
        config = json.loads((out / "config.json").read_text())
    metrics = {
        name: [round(row[name], 6) if name in row else None for row in steps]
        for name in KEPT
    }
    return {
        **cell._asdict(),
        "command": f"python {' '.join(command)}",
        "commit": commit,
        "seconds": round(time.time() - start, 1),
        "stopped": stopped,
        "config": config | {"out_dir": ""},
        "metrics": metrics,
    }


def take_cores(places: multiprocessing.Queue) -> None:
    """Give this worker, and all that it starts, its share of the cores."""
    os.sched_setaffinity(0, places.get())
    # Threads that spin while they wait would take the time of the others.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def shares_of(cores: list[int], workers: int) -> list[set[int]]:
    """The cores of each worker; workers that there is no core for have all of them."""
    return [set(cores[worker::workers] or cores) for worker in range(workers)]


def attempt(job: tuple[Cell, list[str]]) -> tuple[Cell, Run | None, str]:
    """A job's run, or why it failed: one that fails keeps no other from running."""
    try:
        return job[0], make_run(*job), ""
    except RuntimeError as error:
        return job[0], None, str(error)


def run_grid(
    cells: Iterable[Cell],
    command_of: Callable[[Cell], list[str]],
    path: Path,
    workers: int,
) -> None:
    """Run the cells that have no line in `path` yet, and append theirs.

    The workers share the cores of this process. A machine with a GPU has one worker.
    Raises Refused at the end where runs failed.
    """
    if torch.cuda.is_available():
        # An engine that falls asleep fails if another run takes memory meanwhile.
        workers = 1
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_runs(path) if path.exists() else {}
    jobs = [
        (cell, command_of(cell)) for cell in dict.fromkeys(cells) if cell not in done
    ]
    cores = sorted(os.sched_getaffinity(0))
    # The workers inherit it: what they run ends with the grid.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    context = multiprocessing.get_context("fork")
    places = context.Queue()
    for share in shares_of(cores, workers):
        places.put(share)
    failed = 0
    with context.Pool(workers, take_cores, (places,)) as pool:
        ended = pool.imap_unordered(attempt, jobs)
        for number, (cell, run, error) in enumerate(ended, start=1):
            place = f"{number}/{len(jobs)}  {', '.join(map(str, cell))}"
            if run is None:
                failed += 1
                print(f"{place}  failed: {error}", file=sys.stderr, flush=True)
                continue
            with open(path, "a") as file:
                file.write(json.dumps(run) + "\n")
            accuracies = [round(value, 2) for _, value in series(run, "heldout_pass@1")]
            print(f"{place}  {accuracies}  {run['seconds']:.0f} s", flush=True)
    if failed:
        raise Refused(f"{failed} runs failed, as said above; {path} keeps the others")


# Reading them


def read_runs(path: Path) -> Runs:
    """The finished runs of a file. Raises Refused where there is none."""
    try:
        runs = [json.loads(line) for line in open(path)]
    except OSError as error:
        raise Refused(f"{path} has no runs yet: {error.strerror}") from None
    return {Cell(*(run[name] for name in Cell._fields)): run for run in runs}


def select(runs: Runs, **wanted: Any) -> Runs:
    """The runs whose cells have these values."""
    return {
        cell: run
        for cell, run in runs.items()
        if all(getattr(cell, name) == value for name, value in wanted.items())
    }


def series(run: Run, metric: str) -> list[tuple[int, float]]:
    """(step, value) wherever the run has a value of the metric."""
    points = zip(run["metrics"]["step"], run["metrics"][metric], strict=True)
    return [(step, value) for step, value in points if value is not None]


def last(run: Run, metric: str) -> float:
    """The last value of a metric."""
    return series(run, metric)[-1][1]


def score(run: Run) -> float:
    """The mean of a run's last three sampled accuracies; 0 if it stopped itself."""
    accuracies = [value for _, value in series(run, "heldout_pass@1")]
    return 0.0 if run["stopped"] else mean(accuracies[-3:])


def collapsed(run: Run) -> bool:
    """Whether a run lost more than half of its best accuracy, or stopped itself."""
    accuracies = [value for _, value in series(run, "heldout_pass@1")]
    return bool(run["stopped"]) or accuracies[-1] < max(accuracies) / 2


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95% interval by Student's t; NaN for a single value."""
    count = len(values)
    if count < 2:
        return mean(values), math.nan
    half = student.ppf(0.975, count - 1) * stdev(values) / math.sqrt(count)
    return mean(values), float(half)


def text_of(values: Sequence[float], sign: str = "") -> str:
    """A cell of a table: the mean ± half of its interval; "" without values."""
    if not values:
        return ""
    middle, half = interval(values)
    text = f"{middle:{sign}.3f}"
    return text if math.isnan(half) else f"{text} ± {half:.3f}"


def table(rows: list[list[str]]) -> str:
    """A Markdown table, whose first row is the head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
