"""The runs of the study, and the command that makes them.

    python study/plan.py --part quick                    # what `make reproduce` makes
    python study/plan.py --part grid --workers 2
    python tools/smollm2.py models/SmolLM2-135M-Instruct
    python study/plan.py --part smollm2-grid

A run is train.py with one objective on one kind of data, at one learning rate and with
one seed. A finished run is a line of FOLDER/embedded.jsonl or FOLDER/smollm2.jsonl
(--folder); study/report.py turns these lines into tables and figures. A part can be
interrupted and continued at any time. A run that belongs to two parts is made once.

The parts of the embedded policy (tiny/), whose runs take two minutes of a core each:

    quick        six kinds of data, three objectives, one seed: 18 runs
    grid         MAIN on all MISMATCHES with five seeds; OTHERS where some objective
                 breaks and at T = 1.6, with three seeds: 476 runs
    constants    a constant in place of e_B, with three seeds: 126 runs
    own          the mean of the run's own e_B, or another run's e_B, in place of e_B:
                 84 runs, which need P3O's runs of `grid`
    rates        two more learning rates, with three seeds: 132 runs
    hot          remedies for hot rollouts, with three seeds: 81 runs
    neighbors    objectives of related papers, and other statistics in place of e_B:
                 481 runs
    rules        six rules that frameworks and papers of 2026 use, and what they are
                 compared with at 32 updates, with three seeds: 117 runs
    clamped      P3O with the authors' estimate of the KL, with three seeds: 3 runs

The parts of SmolLM2-135M (--model), whose runs take a quarter of an hour of a core
each. It learns as in recipes/smollm2-laptop.yaml, but for 20 steps instead of 120.

    smollm2-hot      what makes P3O collapse on rollouts at T = 1.2: 19 runs
    smollm2-stale    rollouts at T = 1.2 that are 4 steps old, two seeds: 6 runs
    smollm2-capable  rollouts at T = 1.2 of a policy that is often right (0.7): 2 runs.
                     --model is what ten steps of the recipe wrote to model/, with
                     --dtype float32 --rollout_dtype float32
    smollm2-fp8      fp8 rollouts on a CPU that multiplies bfloat16 fast: 2 runs
    smollm2-grid     six objectives on six kinds of data with three seeds: 108 runs. The
                     task is recipes/formulas, each prompt of which has two solved
                     problems. --model is a copy of the folder whose
                     chat_template.jinja is
                     {{ messages[0]["content"] }}

Trainer and engine compute in float32, so that results do not depend on the CPU. Only
the fp8 engine does not: vLLM offers fp8 only together with bfloat16.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study.runs import (
    RESULTS,
    ROOT,
    Cell,
    Flags,
    Runs,
    cells_of,
    read_runs,
    run_grid,
    series,
    words_of,
)
from support.command import Refused, run_script

FLOAT32: Flags = {"dtype": "float32", "rollout_dtype": "float32"}

# The flags of every run. The embedded policy has half the default's responses per step
# and one update instead of two, so B has the default's size and a step costs half.
EMBEDDED_RUN: Flags = FLOAT32 | {"steps": 60, "prompts_per_step": 16, "minibatches": 1}
SMOLLM2_RUN: Flags = FLOAT32 | {
    "config": "recipes/smollm2-laptop.yaml",
    "steps": 20,
    "eval_every": 5,
}
# For P3O on fresh data the best of four rates, in earlier runs in bfloat16.
LEARNING_RATE = 2e-4
SMOLLM2_RATE = 2e-5  # the recipe's

# The kinds of data. The study's averages are over these 14.
MISMATCHES: dict[str, Flags] = {
    "on-policy": {},
    "T = 0.6": {"temperature": 0.6},
    "T = 0.8": {"temperature": 0.8},
    "T = 1.2": {"temperature": 1.2},
    "T = 1.4": {"temperature": 1.4},
    "T = 1.6": {"temperature": 1.6},
    "fp8": {"rollout_quantization": "fp8_per_channel", "rollout_dtype": "bfloat16"},
    "lag 1": {"lag": 1},
    "lag 4": {"lag": 4},
    "lag 16": {"lag": 16},
    "4 updates": {"passes": 2, "minibatches": 2},
    "16 updates": {"passes": 4, "minibatches": 4},
    # As many batches B as "4 updates" has, each as small as in "16 updates" and used
    # once. The last three of a step are one to three updates old.
    "4 minibatches": {"minibatches": 4},
    "T = 1.2, lag 4": {"temperature": 1.2, "lag": 4},
}
# Where P3O, GRPO 0.2 or REINFORCE lost 0.1 or more with the first seed, in earlier runs
# in bfloat16.
BREAKING = ("lag 4", "lag 16", "4 updates", "16 updates", "4 minibatches")
HOT = ("T = 1.2", "T = 1.6", "T = 1.2, lag 4")
SOME = ("on-policy", "T = 1.6", "lag 16", "16 updates")

# Fewer and shorter responses than the recipe has, so that a run takes minutes.
FORMULAS: Flags = {
    "task": "recipes/formulas",
    "prompts_per_step": 6,
    "max_response_tokens": 8,
}
SMOLLM2_GRID = {
    f"{name}, formulas": MISMATCHES[name] | FORMULAS
    for name in ("on-policy", "lag 4", "4 updates", "T = 1.2", "lag 16", "fp8")
}
# Kinds of data that no average over the 14 includes.
OTHER_MISMATCHES: dict[str, Flags] = {
    # The off-policy part of Stanford CS336's assignment 5 (spring 2026): a step samples
    # 256 responses and makes an update on each group of 8; the last is 31 updates old.
    # 20 steps are 640 updates.
    "32 updates": {
        "prompts_per_step": 32,
        "group_size": 8,
        "minibatches": 32,
        "steps": 20,
        "eval_every": 5,
    },
    **SMOLLM2_GRID,
    "T = 1.2, of the policy too": {"temperature": 1.2, "policy_temperature": 1.2},
    "T = 1.2, a capable policy": {"temperature": 1.2},
}


def ablation(name: str, **flags: str) -> Flags:
    """The flags of an objective of study/ablations.py."""
    return {"objective": f"study.ablations:{name}", **flags}


A3PO = "a3po"  # The lag sets its alpha. If alpha is 0 or 1, it is GRPO 0.4.
OWN_MEAN, YOKED = "p3o, own mean e_B", "p3o, yoked e_B"
RAW = "p3o, raw log pi_b"
D = "p3o, e_B where signal"
NO_CLIP = "grpo, no clip"
NEIGHBORS = ("m2po", "bapo", "asymre", "rec", "opmd", "sapo")
RULES = ("ipo", "sequence_mask", "dppo_tv", "icepop", "vespo", "opsm")
OBJECTIVES: dict[str, Flags] = {
    "p3o": {},
    "grpo 0.2": {"objective": "grpo"},
    "grpo 0.4": {"objective": "grpo", "objective_args": "eps=0.4"},
    NO_CLIP: {"objective": "grpo", "objective_args": "eps=1e9"},
    "reinforce": {"objective": "reinforce"},
    "p3o, no KL": ablation("cap_without_kl"),
    "p3o, k3": ablation("k3"),
    "p3o, clamped k3": ablation("clamped_k3"),
    "p3o, is": ablation("importance_sampled"),
    "p3o, no cap": ablation("kl_without_cap"),
    **{
        name: {"objective": f"tools.objectives:{name}"}
        for name in ("dapo", "gspo", "cispo", "tis", A3PO, *NEIGHBORS, *RULES)
    },
    **{
        f"p3o, e_B = {level}": ablation("fixed_ess", objective_args=f"level={level}")
        for level in (0.8, 0.9, 0.97, 0.999)
    },
    OWN_MEAN: ablation("fixed_ess"),  # command_of adds the level.
    YOKED: ablation("yoked_ess"),  # command_of adds the file.
    RAW: {},
    "p3o, KL at one heat": {},
    "p3o, KL where signal": ablation("kl_where_signal"),
    "p3o, step where signal": {},
    D: ablation("ess_where_signal"),
    "p3o, e_B of responses": ablation("ess_of_responses"),
    "p3o, e_B of mean ratios": ablation("ess_of_mean_ratios"),
    "p3o, recent e_B": ablation("recent_ess"),
    "p3o, e_B^0.5": ablation("ess_to_a_power", objective_args="power=0.5"),
    "p3o, e_B^8": ablation("ess_to_a_power", objective_args="power=8"),
}
MAIN = ("p3o", "grpo 0.2", "grpo 0.4", "reinforce", "p3o, no KL")
OTHERS = ("p3o, k3", "p3o, is", "p3o, no cap", "dapo", "gspo", "cispo", "tis")
CONSTANTS = ("p3o, e_B = 0.8", "p3o, e_B = 0.9", "p3o, e_B = 0.97")
STATISTICS = (
    "p3o, e_B of responses",
    "p3o, e_B of mean ratios",
    "p3o, recent e_B",
    "p3o, e_B^0.5",
    "p3o, e_B^8",
)
# The neighbors, and the two statistics that are best with the first seed in the mean of
# lags 4 and 16, 16 updates and T = 1.6.
RIVALS = (*NEIGHBORS, "p3o, e_B of responses", "p3o, recent e_B")
# The rate with 32 updates. At 2e-4 a first run of P3O fell from an accuracy of 0.45 to
# 0.09 in 20 steps.
RATE_AT_32 = 5e-5
# With 32 updates: what the assignment compares, P3O, and its two best variants.
COMPARED_AT_32 = (
    "p3o",
    "grpo 0.2",
    "reinforce",
    "p3o, e_B = 0.9",
    "p3o, e_B of responses",
    "gspo",
    NO_CLIP,
)
# The study's page calls these A, B, C and D.
REMEDIES = ("p3o, KL at one heat", "p3o, KL where signal", "p3o, step where signal", D)
# What an objective cannot do: changes of study/patched.py.
PATCHES = {
    RAW: "raw_logprobs",
    "p3o, KL at one heat": "kl_at_rollout_temperature",
    "p3o, step where signal": "step_where_signal",
    **dict.fromkeys((*STATISTICS, D), "ess_used"),
}

at_rate = partial(cells_of, learning_rate=LEARNING_RATE)
PARTS: dict[str, list[Cell]] = {
    "quick": at_rate(
        (*SOME, "T = 0.6", "T = 1.4"), ("p3o", "grpo 0.2", "reinforce"), [0]
    ),
    "grid": at_rate(MISMATCHES, MAIN, range(5))
    + at_rate((*BREAKING, "T = 1.6"), OTHERS, range(3)),
    "constants": at_rate(MISMATCHES, CONSTANTS, range(3)),
    "own": at_rate(MISMATCHES, (OWN_MEAN, YOKED), range(3)),
    # `grid` has the rate between these two.
    "rates": [
        cell
        for rate in (1e-4, 4e-4)
        for cell in cells_of(SOME, MAIN[:4], range(3), rate)
        + cells_of(SOME[1:], ("p3o, e_B of responses", "rec"), range(3), rate)
    ],
    "hot": at_rate((*HOT, "lag 4", "lag 16", "16 updates"), REMEDIES, range(3))
    + at_rate(HOT, [RAW], range(3)),
    "neighbors": at_rate(MISMATCHES, RIVALS, range(3))
    + at_rate(BREAKING, RIVALS, (3, 4))
    + at_rate(MISMATCHES, (*STATISTICS, D), [0])
    + at_rate(("lag 16", "lag 4", "T = 1.2, lag 4"), [A3PO], range(3)),
    "rules": [
        cell
        for seed in range(3)
        for cell in cells_of(
            ["32 updates"], (*COMPARED_AT_32, *RULES), [seed], RATE_AT_32
        )
        + at_rate(("lag 16", "T = 1.6", "16 updates", "lag 4"), RULES, [seed])
        + at_rate(["32 updates"], ("p3o", "grpo 0.2"), [seed])
    ],
    "clamped": at_rate(["T = 1.6"], ["p3o, clamped k3"], range(3)),
}
of_smollm2 = partial(cells_of, learning_rate=SMOLLM2_RATE)
SMOLLM2_PARTS: dict[str, list[Cell]] = {
    "smollm2-hot": of_smollm2(
        ["T = 1.2"], ("p3o", "p3o, no KL", *REMEDIES[1:3]), range(3)
    )
    + of_smollm2(["T = 1.2"], (RAW, "p3o, e_B = 0.999"), (1, 2))
    + of_smollm2(["T = 1.2, of the policy too"], ["p3o"], range(3)),
    "smollm2-stale": of_smollm2(
        ["T = 1.2, lag 4"], ("p3o", "p3o, KL at one heat", "p3o, no KL"), range(2)
    ),
    "smollm2-capable": of_smollm2(
        ["T = 1.2, a capable policy"], ("p3o", "p3o, no KL"), [0]
    ),
    "smollm2-fp8": of_smollm2(["fp8"], ("p3o, no KL", "p3o, KL where signal"), [2]),
    # The last two are the best constant and the best neighbor of the embedded policy.
    "smollm2-grid": of_smollm2(
        SMOLLM2_GRID, (*MAIN[:4], "p3o, e_B = 0.9", "opmd"), range(3)
    ),
}


def command_of(
    cell: Cell, done: Runs, folder: Path, base: Flags = EMBEDDED_RUN
) -> list[str]:
    """Return the script and the flags of a run.

    `base` are the flags of every run. `done` has the runs of P3O that some cells need,
    and `folder` takes the files that YOKED reads. Raises Refused if a run of P3O that
    the cell needs is missing.
    """
    mismatch = (MISMATCHES | OTHER_MISMATCHES)[cell.mismatch]
    flags = base | mismatch | OBJECTIVES[cell.objective]
    flags |= {"learning_rate": cell.learning_rate, "seed": cell.seed}
    if cell.objective == A3PO:
        flags["objective_args"] = f"alpha={1 - 1 / flags['lag']}"
    if cell.objective == OWN_MEAN:
        flags["objective_args"] = f"level={mean(ess_of_p3o(cell, done)):.4f}"
    if cell.objective == YOKED:
        other = cell._replace(seed=(cell.seed + 1) % 3)
        number = list(MISMATCHES).index(cell.mismatch)
        path = folder / f"ess/{number}-{other.seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ess_of_p3o(other, done)))
        flags["objective_args"] = f"path={os.path.relpath(path, ROOT)}"
    script = ["train.py"]
    if cell.objective in PATCHES:
        script = ["study/patched.py", PATCHES[cell.objective]]
    return [*script, *words_of(flags)]


def ess_of_p3o(cell: Cell, done: Runs) -> list[float]:
    """Return e_B at each update of P3O's run with this mismatch, rate and seed.

    Metrics have one e_B per step, the mean over its updates. Raises Refused if the run
    is not in `done`.
    """
    cell = cell._replace(objective="p3o")
    if cell not in done:
        raise Refused(f"the run of {cell} is missing: run --part grid first")
    config = done[cell]["config"]
    updates = config["passes"] * config["minibatches"]
    return [value for _, value in series(done[cell], "ess") for _ in range(updates)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = PARTS | SMOLLM2_PARTS
    parser.add_argument("--part", choices=parts, required=True)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    name, base = "embedded", EMBEDDED_RUN
    if args.part in SMOLLM2_PARTS:
        name, base = "smollm2", SMOLLM2_RUN | {"model": args.model}
    folder = args.folder.resolve()
    path = folder / f"{name}.jsonl"
    done = read_runs(path) if path.exists() else {}
    command = partial(command_of, done=done, folder=folder, base=base)
    run_grid(parts[args.part], command, path, args.workers)


if __name__ == "__main__":
    run_script(main)
