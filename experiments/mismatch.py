"""The mismatch laboratory: objectives x mismatches x seeds, each a run of train.py.

    python experiments/mismatch.py --grid reduced
    torchrun --nproc-per-node 2 experiments/mismatch.py --grid full

The first is what `make reproduce` does, 18 runs; the second makes one run on each core,
or on each GPU. A finished run is a line of FOLDER/mismatch.jsonl (--folder), with its
command, commit, configuration and metrics. A cell that has its line is not run again,
so the grid can be stopped and started at will. What a run does not set is EVERY_RUN and
the defaults of train.py. After each run eval.py measures pass@8 of its model. Held-out
accuracy is that of the policy, on the same problems with the same noise for all.

The plan was written down before the first run of the full grid, but for the three
changes that it tells of, and it runs by itself:
1. LEARNING_RATE is the one of LEARNING_RATES with the best score on-policy (P3O, two
   seeds). The score of a run is the mean of its last three sampled held-out accuracies.
2. MAIN objectives run under all MISMATCHES, first with one seed, then with SEEDS where
   it breaks (point 3), and with SEEDS_ELSEWHERE where it does not. It was SEEDS
   everywhere, until 128 runs told that this would take more than ten hours.
3. A mismatch is one "where it breaks" if the first seed of P3O, GRPO 0.2 or REINFORCE
   scores 0.1 or more below the same objective on-policy. All OTHERS run there, with
   SEEDS_ELSEWHERE.
4. CONTROLS run with the objectives that decide, with SEEDS_ELSEWHERE. This was added
   when the first seed of point 2 had run.
5. The authors' k3 with its clamp runs at T = 1.6 as well, with SEEDS_ELSEWHERE. This
   was added when P3O with k3, which has no clamp, had collapsed there.
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Half the default batch, all of it in one update: noisier and cheaper.
EVERY_RUN = ["--steps=60", "--prompts_per_step=16", "--minibatches=1"]
LEARNING_RATES = (1e-4, 2e-4, 5e-4, 1e-3)
LEARNING_RATE = 2e-4
MISMATCHES = {
    "on-policy": [],
    "T = 0.6": ["--temperature=0.6"],
    "T = 0.8": ["--temperature=0.8"],
    "T = 1.2": ["--temperature=1.2"],
    "T = 1.4": ["--temperature=1.4"],
    "T = 1.6": ["--temperature=1.6"],
    "fp8": ["--rollout_quantization=fp8_per_channel"],
    "lag 1": ["--lag=1"],
    "lag 4": ["--lag=4"],
    "lag 16": ["--lag=16"],
    "4 updates": ["--passes=2", "--minibatches=2"],
    "16 updates": ["--passes=4", "--minibatches=4"],
    # As many batches B as in "4 updates", as small as in "16 updates", each used once.
    # The last three of a step are one to three updates old.
    "4 minibatches": ["--minibatches=4"],
    # Fresh, stale, hot and fp8 rollouts in turn, by a script of its own.
    "changing": [],
}
# No mismatch: batches B as small and as many as with 4 minibatches, all of them fresh.
CONTROLS = {
    "small batches": ["--steps=240", "--prompts_per_step=4", "--eval_every=40"],
}
MAIN = {
    "p3o": [],
    "grpo 0.2": ["--objective=grpo"],
    "grpo 0.4": ["--objective=grpo", "--objective_args", "eps=0.4"],
    "reinforce": ["--objective=reinforce"],
    "p3o, k3": ["--objective=experiments.ablations:k3"],
}
OTHERS = {
    "p3o, is": ["--objective=experiments.ablations:importance_sampled"],
    "p3o, no KL": ["--objective=experiments.ablations:cap_without_kl"],
    "p3o, no cap": ["--objective=experiments.ablations:kl_without_cap"],
    # Of some ten responses, cut by length: so the micro-batches differ.
    "p3o, e_B of a micro-batch": [
        "--objective=experiments.ablations:ess_of_micro_batch",
        "--micro_batch_tokens=600",
    ],
    # The mean of the e_B of P3O's own run of this seed.
    "p3o, fixed e_B": ["--objective=experiments.ablations:fixed_ess"],
    # The e_B of P3O's run of the next seed, step by step.
    "p3o, yoked e_B": ["--objective=experiments.ablations:yoked_ess"],
    "p3o, clamped k3": ["--objective=experiments.ablations:clamped_k3"],
    "grpo 0.6": ["--objective=grpo", "--objective_args", "eps=0.6"],
    "dapo": ["--objective=experiments.objectives:dapo"],
    "gspo": ["--objective=experiments.objectives:gspo"],
    "cispo": ["--objective=experiments.objectives:cispo"],
    "tis": ["--objective=experiments.objectives:tis"],
    "m2po": ["--objective=experiments.objectives:m2po"],
    "decoupled": ["--objective=experiments.objectives:decoupled"],
    # log pi_b as vLLM records it by default: before the temperature.
    "p3o, raw log pi_b": [],
    "grpo 0.2, raw log pi_b": ["--objective=grpo"],
}
# Elsewhere these are, to rounding, P3O, GRPO 0.2 and CISPO.
ONLY_IN = {
    "p3o, raw log pi_b": ["T = 0.6", "T = 0.8", "T = 1.2", "T = 1.4", "T = 1.6"],
    "grpo 0.2, raw log pi_b": ["T = 0.6", "T = 0.8", "T = 1.2", "T = 1.4", "T = 1.6"],
    "decoupled": ["4 updates", "16 updates", "4 minibatches"],
}
DECIDE = ["p3o", "grpo 0.2", "reinforce"]
SEEDS = 5
SEEDS_ELSEWHERE = 3
REDUCED = ["on-policy", "T = 0.6", "T = 1.4", "T = 1.6", "lag 16", "16 updates"]
KEPT = """step reward heldout_pass@1 heldout_greedy ess ess_min kl capped entropy
    response_tokens truncated grad_norm ratio mismatch_mean mismatch_max""".split()


class Cell(NamedTuple):
    """A run of the grid."""

    mismatch: str
    learning_rate: float
    objective: str
    seed: int


def score(row: dict) -> float:
    """The mean of a run's last three sampled accuracies; 0 if it stopped itself."""
    if row["stopped"]:
        return 0.0
    accuracies = [a for a in row["metrics"]["heldout_pass@1"] if a is not None]
    last = accuracies[-3:]
    return sum(last) / len(last)


def where_it_breaks(done: dict[Cell, dict]) -> list[str]:
    """The mismatches of point 3 of the plan, among those whose first seed has run."""
    breaking = []
    for mismatch in MISMATCHES:
        for objective in DECIDE:
            here = done.get(Cell(mismatch, LEARNING_RATE, objective, 0))
            on_policy = done.get(Cell("on-policy", LEARNING_RATE, objective, 0))
            if here and on_policy and score(here) <= score(on_policy) - 0.1:
                breaking.append(mismatch)
                break
    return breaking


def cells_of(
    mismatches: Iterable[str], objectives: Iterable[str], seeds: Iterable[int]
) -> list[Cell]:
    """All combinations at LEARNING_RATE, seed by seed."""
    return [
        Cell(mismatch, LEARNING_RATE, objective, seed)
        for seed in seeds
        for mismatch in mismatches
        for objective in objectives
        if mismatch in ONLY_IN.get(objective, [mismatch])
    ]


def plan(grid: str, done: dict[Cell, dict]) -> list[Cell]:
    """The runs of a grid, those that tell most first; point 3 as far as it is known."""
    rates = [
        Cell("on-policy", rate, "p3o", seed)
        for seed in range(2)
        for rate in LEARNING_RATES
    ]
    if grid == "learning_rate":
        return rates
    if grid == "reduced":
        return cells_of(REDUCED, DECIDE, [0])
    cells = rates + cells_of(MISMATCHES, MAIN, [0])
    if all(cell in done for cell in cells):
        breaking = where_it_breaks(done)
        cells += cells_of(CONTROLS, DECIDE, range(SEEDS_ELSEWHERE))
        estimates = ["p3o", "p3o, k3", "p3o, clamped k3"]
        cells += cells_of(["T = 1.6"], estimates, range(SEEDS_ELSEWHERE))
        cells += cells_of(["on-policy", *breaking], MAIN, range(1, SEEDS_ELSEWHERE))
        for seed in range(SEEDS_ELSEWHERE):
            cells += cells_of(breaking, OTHERS, [seed])
            cells += cells_of(MISMATCHES, MAIN, [seed])
        cells += cells_of(breaking, MAIN, range(SEEDS_ELSEWHERE, SEEDS))
    return list(dict.fromkeys(cells))  # each once, at its first place


def script_of(cell: Cell) -> str:
    """The script of a run: train.py, or one that is train.py but for one thing."""
    if cell.mismatch == "changing":
        return "experiments/changing.py"
    if "raw log pi_b" in cell.objective:
        return "experiments/raw_logprobs.py"
    return "train.py"


def flags_of(cell: Cell, done: dict[Cell, dict], folder: Path) -> list[str]:
    """The script and flags of a run. KeyError where it needs a run that is not done."""
    flags = [
        script_of(cell),
        *(MAIN | OTHERS)[cell.objective],
        *EVERY_RUN,
        *(MISMATCHES | CONTROLS)[cell.mismatch],
        f"--learning_rate={cell.learning_rate}",
        f"--seed={cell.seed}",
    ]
    if cell.objective == "p3o, fixed e_B":
        of_p3o = done[cell._replace(objective="p3o")]
        ess = of_p3o["metrics"]["ess"][1:]  # Step 0 has none.
        flags += ["--objective_args", f"level={sum(ess) / len(ess):.4f}"]
    if cell.objective == "p3o, yoked e_B":
        other_seed = (cell.seed + 1) % SEEDS_ELSEWHERE
        other = cell._replace(objective="p3o", seed=other_seed)
        flags += ["--objective_args", f"path={ess_file(other, done[other], folder)}"]
    return flags


def ess_file(cell: Cell, row: dict, folder: Path) -> Path:
    """A file with the e_B of a run for each of its updates: the mean of the update's
    step.
    """
    updates = row["config"]["passes"] * row["config"]["minibatches"]
    ess = [value for value in row["metrics"]["ess"][1:] for _ in range(updates)]
    name = f"{cell.mismatch} {cell.learning_rate} {cell.seed}.json".replace(" ", "-")
    path = folder / "ess" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(ess))
    return path


def share_of_machine() -> tuple[int, int]:
    """This process's place, and of how many, under torchrun; (0, 1) without it.

    Under torchrun it gets a GPU or a part of the cores to itself, and what it starts
    knows nothing of torchrun.
    """
    if "RANK" not in os.environ:
        return 0, 1
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, of_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[local::of_node] or cores)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        visible.split(",")[local] if visible else str(local)
    )
    of_torchrun = (
        "RANK",
        "WORLD_",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "MASTER_",
        "TORCHEL",
        "OMP_NUM",
    )
    for name in list(os.environ):
        if name.startswith(of_torchrun):
            del os.environ[name]
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return rank, world


def finished(results: Path) -> dict[Cell, dict]:
    """The lines of the results by their cells; of a cell that has several, the last.

    A line that a killed process left unfinished does not count.
    """
    if not results.exists():
        return {}
    done = {}
    for line in open(results):
        if line.endswith("\n"):
            row = json.loads(line)
            done[Cell(*(row[name] for name in Cell._fields))] = row
    return done


def append(results: Path, row: dict) -> None:
    """A line more, by one process at a time, in place of one that a kill left cut."""
    with open(results, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row).encode() + b"\n")


def commit_here() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return (
        subprocess.run(command, capture_output=True, text=True).stdout.strip()
        or "no clone"
    )


def run(cell: Cell, flags: list[str], eval_flags: Iterable[str]) -> dict:
    """One run; its configuration, commit, metrics by name, and pass@8 of its model.

    A run that stopped itself, on a number that is not finite, keeps what it had. Any
    other failure is a RuntimeError, with what was printed.
    """
    commit, start = commit_here(), time.time()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "run")
        command = [sys.executable, *flags, f"--out_dir={out}"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        stopped = None
        if ended.returncode != 0:
            stopped = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            if "not finite" not in stopped:
                raise RuntimeError(f"{' '.join(flags)} failed:\n{ended.stderr[-2000:]}")
        rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
        config = json.loads((out / "config.json").read_text())
        pass_at_8 = None
        if not stopped:
            pass_at_8 = measure_pass_at_8(out, eval_flags)
    metrics = {}
    for name in KEPT:
        metrics[name] = [round(row[name], 6) if name in row else None for row in rows]
    return {
        **cell._asdict(),
        "command": f"python {' '.join(flags)}",
        "commit": commit,
        "seconds": round(time.time() - start, 1),
        "stopped": stopped,
        "pass@8": pass_at_8,
        "config": config | {"out_dir": ""},
        "metrics": metrics,
    }


def measure_pass_at_8(out: Path, eval_flags: Iterable[str]) -> float:
    """pass@8 of the model of a run, on the first 128 held-out problems at temperature
    1.
    """
    command = [sys.executable, "eval.py", f"--model={out}", f"--out_dir={out}/eval"]
    command += ["--samples=8", "--limit=128", "--dtype=bfloat16", *eval_flags]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    results = json.loads((out / "eval/results.json").read_text())
    return results["average"]["8"]["value"]


def run_plan(
    plan: Callable[[dict[Cell, dict]], list[Cell]],
    flags_of: Callable[[Cell, dict[Cell, dict]], list[str]],
    results: Path,
    hours: float,
    eval_flags: Iterable[str] = (),
) -> None:
    """Run the cells of a plan that have no line in `results` yet, and append theirs.

    `plan` and `flags_of` get the finished runs, those of the other ranks too. Under
    torchrun each rank takes its share of the cells. SystemExit at the end if runs
    failed.
    """
    os.chdir(ROOT)
    # A run that is going on ends with its grid.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rank, world = share_of_machine()
    begin = time.time()
    results.parent.mkdir(parents=True, exist_ok=True)
    failed: set[Cell] = set()
    while time.time() - begin < hours * 3600:
        done = finished(results)
        cells = plan(done)
        # Each rank takes its share of the plan.
        undone = [
            (number, cell)
            for number, cell in enumerate(cells)
            if cell not in done and cell not in failed and number % world == rank
        ]
        if not undone:
            if world > 1 and any(cell not in done for cell in cells) and not failed:
                time.sleep(10)  # what another rank runs may lengthen the plan
                continue
            break
        number, cell = undone[0]
        try:
            row = run(cell, flags_of(cell, done), eval_flags)
        except (RuntimeError, subprocess.CalledProcessError, KeyError) as error:
            failed.add(cell)  # the other runs are not worse for it
            print(
                f"{number + 1}/{len(cells)}  {cell}  {error!r}",
                file=sys.stderr,
                flush=True,
            )
            continue
        append(results, row)
        accuracies = [a for a in row["metrics"]["heldout_pass@1"] if a is not None]
        print(
            f"{number + 1}/{len(cells)}  {cell}  {accuracies}  {row['seconds']} s",
            flush=True,
        )
    if failed:
        sys.exit(
            f"{results}: {len(failed)} runs failed, as said above; the rest is kept"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--grid", default="reduced", choices=("learning_rate", "reduced", "full")
    )
    parser.add_argument("--folder", type=Path, default=Path("experiments/results"))
    parser.add_argument(
        "--hours", type=float, default=24, help="start no run after so long"
    )
    args = parser.parse_args()
    run_plan(
        partial(plan, args.grid),
        partial(flags_of, folder=args.folder),
        args.folder / "mismatch.jsonl",
        args.hours,
    )


if __name__ == "__main__":
    main()
