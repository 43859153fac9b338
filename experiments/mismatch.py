"""The mismatch laboratory: objectives x mismatches x seeds, each cell a run of train.py on tiny/.

    python experiments/mismatch.py --grid reduced      # 18 runs, what `make reproduce` does
    python experiments/mismatch.py --grid full         # all; a core each, some five hours:
    taskset -c 0 python experiments/mismatch.py --grid full --share 0/2 &
    taskset -c 1 python experiments/mismatch.py --grid full --share 1/2
    CUDA_VISIBLE_DEVICES=3 python experiments/mismatch.py --grid full --share 3/8

Each finished run is a line of FOLDER/mismatch.jsonl (--folder), with its command, configuration,
commit and metrics; a command that has its line is not run again, so the grid can be stopped and
started at will (all shares together, if it has changed: they cut the same list). Held-out pass@1 is
that of the policy at temperature 1, on CPU unquantized, on the same 512 problems with the same
noise for all. What the cell does not set is EVERY_RUN, and the defaults of config.py.
"""

import argparse
import json
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
LEARNING_RATE, LARGER = 2e-4, 5e-4  # the first chosen by --grid learning_rate
# Where seed 0 of one of EVERYWHERE ended well below its on-policy result.
WHERE_IT_BREAKS = [
    ("lag 16", LARGER),
    ("16 updates", LEARNING_RATE),
    ("T = 1.4", LEARNING_RATE),
    ("T = 0.6", LEARNING_RATE),
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
        return [(s, o, rate, 0) for s, rate in SHOWN_SETTINGS for o in EVERYWHERE]
    everywhere = [(s, o, LEARNING_RATE) for s in SETTINGS for o in EVERYWHERE]
    shown = [(s, o, rate) for s, rate in SHOWN_SETTINGS for o in SHOWN_OBJECTIVES]
    others = [o for o in (*ABLATIONS, *OBJECTIVES) if o not in EVERYWHERE]
    breaks = [(s, o, rate) for s, rate in WHERE_IT_BREAKS for o in others if s in ONLY.get(o, [s])]
    plan = [(*cell, seed) for seed in range(5) for cell in (*everywhere, *shown)]
    plan += [(*cell, seed) for cell in breaks for seed in range(3)]
    return list(dict.fromkeys(plan))  # what is both shown and everywhere runs once


def share(text: str) -> slice:
    """i/n: every n-th run from the i-th on. ArgumentTypeError where there is no such share."""
    first, of = map(int, text.split("/"))
    if not 0 <= first < of:
        raise argparse.ArgumentTypeError(f"the shares of {of} are 0/{of} to {of - 1}/{of}")
    return slice(first, None, of)


def finished(results: Path) -> dict[Cell, dict]:
    """The lines of the results by their cells; of a cell that has several, the last."""
    rows = [json.loads(line) for line in open(results)] if results.exists() else []
    return {(r["setting"], r["objective"], r["learning_rate"], r["seed"]): r for r in rows}


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


def run(cell: Cell, flags: list[str]) -> dict:
    """One run of train.py; its configuration, commit and metrics, metric by metric.

    One that stopped itself, on a number that is not finite, keeps what it had; any other end is a
    RuntimeError, with what was printed."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit, start = subprocess.check_output(git, text=True).strip(), time.time()
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
    parser.add_argument("--share", type=share, default="0/1", help="i/n, from 0/n to n-1/n")
    parser.add_argument("--hours", type=float, default=24, help="start no run after so long")
    args = parser.parse_args()
    plan, begin = cells(args.grid)[args.share], time.time()
    results = args.folder / "mismatch.jsonl"
    args.folder.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(plan, 1):
        done = finished(results)
        try:
            flags = flags_of(cell, done)
        except KeyError:
            print(f"{number}/{len(plan)}  {cell} waits for P3O's run of this seed: start again")
            continue
        if cell in done and done[cell]["command"] == f"python {' '.join(flags)}":
            continue
        if time.time() - begin > args.hours * 3600:
            break
        row = run(cell, flags)
        with open(results, "a") as file:
            file.write(json.dumps(row) + "\n")
        accuracy = [a for a in row["metrics"]["heldout_pass@1"] if a is not None]
        print(f"{number}/{len(plan)}  {cell}  {accuracy}  {row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
