"""The mismatch laboratory: objectives x mismatches x seeds, each cell a run of train.py on tiny/.

    python experiments/mismatch.py --grid reduced      # 18 runs, what `make reproduce` does
    torchrun --nproc-per-node 2 experiments/mismatch.py --grid full    # a run at a time on each of
                                                       # two cores; with 8 on each of eight GPUs

Each finished run is a line of FOLDER/mismatch.jsonl (--folder), with its command, configuration,
commit and metrics; a command that has its line is not run again, so the grid can be stopped and
started at will. After a change of the code, start with an empty folder. Held-out pass@1 is that of
the policy at temperature 1 on the same 512 problems with the same noise for all; on CUDA, with fp8,
that of its quantized copy. What the cell does not set is EVERY_RUN, and the defaults of config.py.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVERY_RUN = ["--steps=60", "--prompts_per_step=16"]  # half the default batch: noisier, cheaper
SETTINGS = {
    "on-policy": [],
    "T = 0.6": ["--temperature=0.6"],
    "T = 0.8": ["--temperature=0.8"],
    "T = 1.2": ["--temperature=1.2"],
    "T = 1.4": ["--temperature=1.4"],
    "fp8": ["--rollout_quantization=fp8_per_channel"],
    "lag 1": ["--lag=1"],
    "lag 4": ["--lag=4"],
    "lag 16": ["--lag=16"],
    "4 updates": ["--passes=2", "--minibatches=2"],
    "16 updates": ["--passes=4", "--minibatches=4"],
    "4 minibatches": ["--minibatches=4"],  # its control: as small and as many batches B, used once
}
OBJECTIVES = {
    "p3o": [],
    "grpo 0.2": ["--objective=grpo"],
    "reinforce": ["--objective=reinforce"],
    "p3o, is": ["--objective_args", "kl_estimator=is"],
    "grpo 0.4": ["--objective=grpo", "--objective_args", "eps=0.4"],
    "grpo 0.6": ["--objective=grpo", "--objective_args", "eps=0.6"],
    "dapo": ["--objective=dapo"],
    "gspo": ["--objective=gspo"],
    "cispo": ["--objective=cispo"],
    "decoupled": ["--objective=decoupled"],
    "tis": ["--objective=tis"],
    "m2po": ["--objective=m2po"],
}
ABLATIONS = {  # what follows ablations.py on the command line
    "no KL": ["cap_without_kl"],
    "no cap": ["kl_without_cap"],
    # Of some 10 responses, cut by length: so the micro-batches differ.
    "e_B of a micro-batch": ["ess_of_micro_batch", "--micro_batch_tokens=600"],
    "fixed e_B": ["fixed_ess"],  # the level is the mean e_B of P3O's run of the same seed
    "clamped KL": ["clamped_kl"],
    "p3o, raw log pi_b": ["raw_logprobs"],
    "grpo 0.2, raw log pi_b": ["raw_logprobs", "--objective=grpo"],
}
# Elsewhere these are, to rounding, p3o, grpo 0.2 and cispo.
ONLY = {name: ["T = 0.6", "T = 1.4"] for name in ABLATIONS if "raw" in name}
ONLY["decoupled"] = ["16 updates"]
EVERYWHERE = ["p3o", "grpo 0.2", "reinforce"]
SHOWN_OBJECTIVES = [*EVERYWHERE, "p3o, is"]
SEEDS, SEEDS_OF_OTHERS = 5, 3  # of what the README compares, and of what is not SHOWN_OBJECTIVES
LEARNING_RATE, LARGER = 2e-4, 5e-4  # the first chosen by --grid learning_rate
# Where seed 0 of one of EVERYWHERE ended 0.1 or more below its on-policy result.
WHERE_IT_BREAKS = [
    ("lag 16", LARGER),
    ("16 updates", LEARNING_RATE),
    ("T = 1.4", LEARNING_RATE),
    ("T = 0.6", LEARNING_RATE),
    ("T = 1.2", LEARNING_RATE),
]
SHOWN_SETTINGS = [("on-policy", LEARNING_RATE), ("on-policy", LARGER), *WHERE_IT_BREAKS]
KEPT = """step reward heldout_pass@1 ess ess_min kl capped entropy response_tokens truncated
    grad_norm ratio mismatch_mean mismatch_max""".split()

Cell = tuple[str, str, float, int]  # setting, objective, learning rate, seed


def cells(grid: str) -> list[Cell]:
    """The runs of a grid, the ones that tell most first."""
    if grid == "learning_rate":
        rates = (1e-4, 2e-4, 5e-4, 1e-3)
        return [("on-policy", "p3o", rate, seed) for seed in range(2) for rate in rates]
    if grid == "reduced":
        settings = [("on-policy", LEARNING_RATE), *WHERE_IT_BREAKS]
        return [(s, o, rate, 0) for s, rate in settings for o in EVERYWHERE]
    everywhere = [(s, o, LEARNING_RATE) for s in SETTINGS for o in EVERYWHERE]
    shown = [(s, o, rate) for s, rate in SHOWN_SETTINGS for o in SHOWN_OBJECTIVES]
    others = [o for o in (*ABLATIONS, *OBJECTIVES) if o not in EVERYWHERE]
    breaks = [(s, o, rate) for s, rate in WHERE_IT_BREAKS for o in others if s in ONLY.get(o, [s])]
    plan = [(*cell, seed) for seed in range(SEEDS) for cell in (*everywhere, *shown)]
    plan += [(*cell, seed) for cell in breaks for seed in range(SEEDS_OF_OTHERS)]
    return list(dict.fromkeys(plan))  # what is both shown and everywhere runs once


def share_of_machine() -> tuple[int, int]:
    """This process's place, and of how many, under torchrun; it then has a GPU or a part of the
    cores to itself, and what it starts knows nothing of torchrun. (0, 1) without torchrun."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:
        local, of = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[local::of] or cores)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local] if visible else str(local)
        its = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHEL", "OMP_NUM_")
        for name in [name for name in os.environ if name.startswith(its)]:
            del os.environ[name]
    return rank, world


def finished(results: Path) -> dict[Cell, dict]:
    """The lines of the results by their cells; of a cell that has several, the last. A line that a
    killed process left unfinished does not count."""
    lines = open(results) if results.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {(r["setting"], r["objective"], r["learning_rate"], r["seed"]): r for r in rows}


def append(results: Path, row: dict) -> None:
    """A line more, by one process at a time, in place of one that was left unfinished."""
    with open(results, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row).encode() + b"\n")


def flags_of(cell: Cell, done: dict[Cell, dict]) -> list[str]:
    """The script and flags of a run. Raises KeyError where it needs a run that is not done."""
    setting, objective, learning_rate, seed = cell
    script = ["experiments/ablations.py"] if objective in ABLATIONS else ["train.py"]
    flags = [*script, *(OBJECTIVES | ABLATIONS)[objective], *SETTINGS[setting], *EVERY_RUN]
    flags += [f"--learning_rate={learning_rate}", f"--seed={seed}"]
    if objective == "fixed e_B":
        ess = done[setting, "p3o", learning_rate, seed]["metrics"]["ess"][1:]  # none at step 0
        flags += ["--objective_args", f"level={sum(ess) / len(ess):.4f}"]
    return flags


def commit_here() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "not a clone"


def run(cell: Cell, flags: list[str]) -> dict:
    """One run of train.py; its configuration, commit and metrics, metric by metric.

    One that stopped itself, on a number that is not finite, keeps what it had; any other end is a
    RuntimeError, with what was printed."""
    commit, start = commit_here(), time.time()
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *flags, f"--out_dir={out}/run"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        stopped = ended.stderr.strip().splitlines()[-1:] if ended.returncode else []
        if ended.returncode and "not finite" not in "".join(stopped):
            raise RuntimeError(f"{' '.join(flags)} failed:\n{ended.stderr[-2000:]}")
        rows = [json.loads(line) for line in open(f"{out}/run/metrics.jsonl")]
        config = json.loads(Path(out, "run", "config.json").read_text())
    return {
        **dict(zip(("setting", "objective", "learning_rate", "seed"), cell, strict=True)),
        "command": f"python {' '.join(flags)}",
        "commit": commit,
        "seconds": round(time.time() - start, 1),
        "stopped": stopped[0] if stopped else None,
        "config": config | {"out_dir": ""},
        "metrics": {
            name: [round(row[name], 6) if name in row else None for row in rows] for name in KEPT
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", default="reduced", choices=("learning_rate", "reduced", "full"))
    parser.add_argument("--folder", type=Path, default=ROOT / "experiments/results")
    parser.add_argument("--hours", type=float, default=24, help="start no run after so long")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the run that is going on with it
    rank, world = share_of_machine()
    plan, begin, undone = cells(args.grid), time.time(), 0
    results = args.folder / "mismatch.jsonl"
    args.folder.mkdir(parents=True, exist_ok=True)
    done = finished(results)
    kept = [row for cell, row in done.items() if cell in plan]
    if kept and rank == 0:
        others = {row["commit"] for row in kept} - {commit_here()}
        of = f", some of other commits than this, {commit_here()}" if others else ""
        print(f"{results} has {len(kept)} of {len(plan)} runs{of}", flush=True)
    for number, cell in list(enumerate(plan, 1))[rank::world]:
        try:
            flags = flags_of(cell, done)
        except KeyError:
            print(f"{number}/{len(plan)}  {cell} waits for P3O's run of this seed: start again")
            continue
        if cell in done and done[cell]["command"] == f"python {' '.join(flags)}":
            continue
        if time.time() - begin > args.hours * 3600:
            break
        try:
            row = run(cell, flags)
        except RuntimeError as error:  # the other runs are not worse for it
            undone += 1
            print(f"{number}/{len(plan)}  {cell}  {error}", file=sys.stderr, flush=True)
            continue
        append(results, row)
        done = finished(results)  # the other ranks' runs too
        accuracy = [a for a in row["metrics"]["heldout_pass@1"] if a is not None]
        print(f"{number}/{len(plan)}  {cell}  {accuracy}  {row['seconds']} s", flush=True)
    if undone:
        sys.exit(f"mismatch.py: {undone} runs failed, for the reasons above; the rest is kept")


if __name__ == "__main__":
    main()
