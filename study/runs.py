"""Makes runs of train.py, several at a time, and reads what they wrote.

Each cell of a grid is one run. A finished run is a line of a JSONL file, with its cell,
command, commit, configuration and metrics by step. A cell that has a line is not run
again, so a grid can be interrupted and continued at any time.
"""

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
# Part of train.py's message if e_B or the gradient is not finite.
DIVERGED = "have to be finite"
METRICS = """step reward groups_with_signal heldout_pass@1 heldout_greedy ess ess_min
    mismatch_kl above_ess entropy response_tokens truncated grad_norm ratio
    logprob_abs_diff""".split()


class Cell(NamedTuple):
    """What distinguishes a run from the others of its grid."""

    mismatch: str  # the kind of data
    objective: str
    learning_rate: float
    seed: int


RunRecord = dict[str, Any]  # a line of the JSONL file
Runs = dict[Cell, RunRecord]
FlagValues = dict[str, Any]  # of train.py, by name

# Making runs


def cells_of(
    mismatches: Iterable[str],
    objectives: Iterable[str],
    seeds: Iterable[int],
    learning_rate: float,
) -> list[Cell]:
    """Return all combinations, ordered by seed.

    With this order, an interrupted grid has complete comparisons for its first seeds.
    """
    every = itertools.product(seeds, mismatches, objectives)
    return [
        Cell(mismatch, objective, learning_rate, seed)
        for seed, mismatch, objective in every
    ]


def words_of(flags: FlagValues) -> list[str]:
    """Return the flags as words of a command line."""
    return [f"--{name}={value}" for name, value in flags.items()]


def commit_here() -> str:
    """Return the commit of this folder, or "no clone" if git does not know one.

    The commit ends in "-dirty" if a tracked file outside study/results differs.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git("diff", "--name-only", "HEAD", "--", ".", ":!study/results")
    commit = git("rev-parse", "--short=12", "HEAD") or "no clone"
    return f"{commit}-dirty" if changed else commit


def make_run(cell: Cell, command: list[str]) -> RunRecord:
    """Run a command of train.py, and return the record of the run.

    If the run stopped because a number was not finite, the record has the steps before
    it stopped. Raises RuntimeError, with what was printed, on any other failure.
    """
    commit, start = commit_here(), time.time()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "run")
        finished = subprocess.run(
            [sys.executable, *command, f"--out_dir={out}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        message = finished.stderr.strip()
        stopped = message.rpartition("\n")[2] if finished.returncode else None
        if finished.returncode and DIVERGED not in stopped:
            raise RuntimeError(f"exit code {finished.returncode}: {message[-2000:]}")
        steps = [json.loads(line) for line in open(out / "metrics.jsonl")]
        config = json.loads((out / "config.json").read_text())
    metrics = {
        name: [round(row[name], 6) if name in row else None for row in steps]
        for name in METRICS
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


def take_cores(shares: multiprocessing.Queue) -> None:
    """Restrict this worker, and the processes it starts, to its share of the cores."""
    os.sched_setaffinity(0, shares.get())
    # Threads that spin while they wait would slow down the other workers.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def attempt(job: tuple[Cell, list[str]]) -> tuple[Cell, RunRecord | None, str]:
    """Make a run; return its cell, its record and, if it failed, the reason."""
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
    """Make the runs that have no line in `path` yet, and append their lines.

    The workers share the cores of this process. With a GPU there is one worker. A run
    that fails does not keep the others from running. Raises Refused at the end if any
    run failed.
    """
    if torch.cuda.is_available():
        # vLLM fails if another process takes GPU memory while an engine falls asleep.
        workers = 1
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_runs(path) if path.exists() else {}
    jobs = [
        (cell, command_of(cell)) for cell in dict.fromkeys(cells) if cell not in done
    ]
    cores = sorted(os.sched_getaffinity(0))
    # The workers inherit this handler, so a terminated grid also ends its runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    context = multiprocessing.get_context("fork")
    shares = context.Queue()
    for worker in range(workers):
        shares.put(cores[worker::workers] or cores)
    failed = 0
    with context.Pool(workers, take_cores, (shares,)) as pool:
        outcomes = pool.imap_unordered(attempt, jobs)
        for number, (cell, run, error) in enumerate(outcomes, start=1):
            title = f"{number}/{len(jobs)}  {', '.join(map(str, cell))}"
            if run is None:
                failed += 1
                print(f"{title}  failed: {error}", file=sys.stderr, flush=True)
                continue
            with open(path, "a") as file:
                file.write(json.dumps(run) + "\n")
            accuracies = [round(value, 2) for _, value in series(run, "heldout_pass@1")]
            print(f"{title}  {accuracies}  {run['seconds']:.0f} s", flush=True)
        # At its end the with-block sends SIGTERM to the workers, and a worker that is
        # still starting can miss it. So we let all of them end by themselves first.
        pool.close()
        pool.join()
    if failed:
        raise Refused(
            f"{failed} of the runs failed, for the reasons above; {path} has the others"
        )


# Reading runs


def read_runs(path: Path) -> Runs:
    """Return the finished runs of a file. Raises Refused if it cannot be read."""
    try:
        runs = [json.loads(line) for line in open(path)]
    except OSError as error:
        raise Refused(f"{path} has no runs yet: {error.strerror}") from None
    return {Cell(*(run[name] for name in Cell._fields)): run for run in runs}


def select(runs: Runs, **wanted: Any) -> Runs:
    """Return the runs whose cells have these values."""
    return {
        cell: run
        for cell, run in runs.items()
        if all(getattr(cell, name) == value for name, value in wanted.items())
    }


def series(run: RunRecord, metric: str) -> list[tuple[int, float]]:
    """Return (step, value) for every step that has a value of the metric."""
    points = zip(run["metrics"]["step"], run["metrics"][metric], strict=True)
    return [(step, value) for step, value in points if value is not None]


def last(run: RunRecord, metric: str) -> float:
    """Return the last value of a metric."""
    return series(run, metric)[-1][1]


def final_score(run: RunRecord) -> float:
    """Return the mean of the last three sampled accuracies; 0 if the run stopped."""
    accuracies = [value for _, value in series(run, "heldout_pass@1")]
    return 0.0 if run["stopped"] else mean(accuracies[-3:])


def collapsed(run: RunRecord) -> bool:
    """Return whether the run stopped, or ended below half of its best accuracy."""
    accuracies = [value for _, value in series(run, "heldout_pass@1")]
    return bool(run["stopped"]) or accuracies[-1] < max(accuracies) / 2


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95% interval, by Student's t.

    Half of the interval is NaN if there is only one value.
    """
    count = len(values)
    if count < 2:
        return mean(values), math.nan
    half = student.ppf(0.975, count - 1) * stdev(values) / math.sqrt(count)
    return mean(values), float(half)


def format_interval(values: Sequence[float], sign: str = "") -> str:
    """Return a cell of a table: the mean ± half of its interval.

    The cell is empty if there are no values.
    """
    if not values:
        return ""
    middle, half = interval(values)
    text = f"{middle:{sign}.3f}"
    return text if math.isnan(half) else f"{text} ± {half:.3f}"


def table(rows: list[list[str]]) -> str:
    """Return a Markdown table; the first row is its header."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
