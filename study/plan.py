"""The runs of the study, and the command that makes them.

    python study/plan.py --part quick                    # what `make reproduce` makes
    python study/plan.py --part grid --workers 2
    python study/plan.py --part smollm2-grid             # SmolLM2

A run is train.py with one objective on one kind of data, at one learning rate and with
one seed. A finished run is a line of FOLDER/embedded.jsonl or FOLDER/smollm2.jsonl
(--folder); study/report.py turns these lines into tables and figures. A part can be
interrupted and continued at any time. A run that belongs to two parts is made once.

These are the parts of the embedded policy (tiny/). Each run takes two to three
minutes of a core.

    quick        six kinds of data, three objectives, one seed: 18 runs
    grid         MAIN on all MISMATCHES with five seeds, and OTHERS on the
                 BREAKING_KINDS and at T = 1.6 with three seeds: 476 runs
    constants    a constant in place of e_B, with three seeds: 126 runs
    rules        RULES on four kinds of data; RULES and OBJECTIVES_AT_32 with 32 updates
                 per step (P3O and GRPO 0.2 also at 2e-4). There are three seeds, or
                 five if any of the three collapsed: 125 runs

These are the parts of SmolLM2-135M (--model). Each run takes a quarter of an hour of a
core. The policy learns as in recipes/smollm2-laptop.yaml, but for 20 steps, not 120.

    smollm2-grid   six objectives on six kinds of data with three seeds: 108 runs. The
                   task is recipes/formulas, whose prompts begin with two solved
                   problems. For --model, copy the folder that
                   recipes/README.md#a-pretrained-model-on-a-laptop makes, and change
                   the copy's chat_template.jinja to {{ messages[0]["content"] }}
    smollm2-rules  three of RULES (vespo, dppo_tv and TRL's default,
                   sequence_mask), P3O, the constant 0.9 and GRPO on old data, with
                   three seeds: 36 runs on the same task

Other parts are finished and no longer here; study/results/README.md says which commit
has them.

Trainer and engine compute in float32, because the default dtypes depend on the machine.
The exception is the fp8 engine, which computes in bfloat16 what it does not compute in
fp8.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study.runs import RESULTS, Cell, FlagValues, cells_of, run_grid, words_of
from support.command import run_script

FLOAT32: FlagValues = {"dtype": "float32", "rollout_dtype": "float32"}

# The flags of every run. For the embedded policy a step has half of the default number
# of responses and one update instead of two, so B has its default size and a step
# takes half of the time.
EMBEDDED_RUN = FLOAT32 | {"steps": 60, "prompts_per_step": 16, "minibatches": 1}
SMOLLM2_RUN = FLOAT32 | {
    "config": "recipes/smollm2-laptop.yaml",
    "steps": 20,
    "eval_every": 5,
}
# This was the best of four learning rates for P3O on fresh data, in earlier runs in
# bfloat16.
LEARNING_RATE = 2e-4
SMOLLM2_RATE = 2e-5  # the recipe's

# The kinds of data. The study's averages are over these 14.
MISMATCHES: dict[str, FlagValues] = {
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
    # A step makes four updates, each on a quarter of the rollout batch. When they are
    # used, the second, third and fourth quarter are one, two and three updates old.
    "4 minibatches": {"minibatches": 4},
    "T = 1.2, lag 4": {"temperature": 1.2, "lag": 4},
}
# The kinds of data on which P3O, GRPO 0.2 or REINFORCE scored at least 0.1 less than on
# fresh data, with the first seed, in earlier runs in bfloat16.
BREAKING_KINDS = ("lag 4", "lag 16", "4 updates", "16 updates", "4 minibatches")

# Responses are fewer and shorter than in the recipe, so that a run takes minutes.
FORMULAS: FlagValues = {
    "task": "recipes/formulas",
    "prompts_per_step": 6,
    "max_response_tokens": 8,
}
SMOLLM2_GRID = {
    f"{name}, formulas": MISMATCHES[name] | FORMULAS
    for name in ("on-policy", "lag 4", "4 updates", "T = 1.2", "lag 16", "fp8")
}
# Kinds of data that are not among the 14, so the study's averages leave them out.
OTHER_MISMATCHES: dict[str, FlagValues] = {
    # The off-policy part of Stanford CS336's assignment 5 (spring 2026): a step samples
    # 256 responses and makes an update on each group of 8. The last group is 31 updates
    # old when it is used. 20 steps are 640 updates.
    "32 updates": {
        "prompts_per_step": 32,
        "group_size": 8,
        "minibatches": 32,
        "steps": 20,
        "eval_every": 5,
    },
    **SMOLLM2_GRID,
}


def ablation(name: str, **flags: str) -> FlagValues:
    """Return the flags of an objective of study/ablations.py."""
    return {"objective": f"study.ablations:{name}", **flags}


NO_CLIP = "grpo, no clip"
NEIGHBORS = ("m2po", "bapo", "asymre", "rec", "opmd", "sapo")
RULES = ("ipo", "sequence_mask", "dppo_tv", "icepop", "vespo", "opsm")
OBJECTIVES: dict[str, FlagValues] = {
    "p3o": {},
    "grpo 0.2": {"objective": "grpo"},
    "grpo 0.4": {"objective": "grpo", "objective_args": "eps=0.4"},
    NO_CLIP: {"objective": "grpo", "objective_args": "eps=1e9"},
    "reinforce": {"objective": "reinforce"},
    "p3o, no KL": ablation("cap_without_kl"),
    "p3o, k3": ablation("k3"),
    "p3o, is": ablation("importance_sampled"),
    "p3o, no cap": ablation("kl_without_cap"),
    **{
        name: {"objective": f"tools.objectives:{name}"}
        for name in ("dapo", "gspo", "cispo", "tis", *NEIGHBORS, *RULES)
    },
    **{
        f"p3o, e_B = {level}": ablation("fixed_ess", objective_args=f"level={level}")
        for level in (0.8, 0.9, 0.97)
    },
    "p3o, KL where signal": ablation("kl_where_signal"),
    "p3o, e_B of responses": ablation("ess_of_responses"),
}
MAIN = ("p3o", "grpo 0.2", "grpo 0.4", "reinforce", "p3o, no KL")
OTHERS = ("p3o, k3", "p3o, is", "p3o, no cap", "dapo", "gspo", "cispo", "tis")
CONSTANTS = ("p3o, e_B = 0.8", "p3o, e_B = 0.9", "p3o, e_B = 0.97")
# The main learning rate with 32 updates. At 2e-4 the accuracy of P3O's first run fell
# from 0.45 to 0.09 in 20 steps.
RATE_AT_32 = 5e-5
# The objectives that run with 32 updates, besides RULES: those that the assignment of
# CS336 compares, P3O, and two good variants of P3O.
OBJECTIVES_AT_32 = (
    "p3o",
    "grpo 0.2",
    "reinforce",
    "p3o, e_B = 0.9",
    "p3o, e_B of responses",
    "gspo",
    NO_CLIP,
)
embedded_cells = partial(cells_of, learning_rate=LEARNING_RATE)
PARTS: dict[str, list[Cell]] = {
    "quick": embedded_cells(
        ("on-policy", "T = 0.6", "T = 1.4", "T = 1.6", "lag 16", "16 updates"),
        ("p3o", "grpo 0.2", "reinforce"),
        [0],
    ),
    "grid": embedded_cells(MISMATCHES, MAIN, range(5))
    + embedded_cells((*BREAKING_KINDS, "T = 1.6"), OTHERS, range(3)),
    "constants": embedded_cells(MISMATCHES, CONSTANTS, range(3)),
    "rules": cells_of(["32 updates"], (*OBJECTIVES_AT_32, *RULES), range(3), RATE_AT_32)
    + embedded_cells(("lag 16", "T = 1.6", "16 updates", "lag 4"), RULES, range(3))
    # These have two more seeds, because some of their first three runs collapsed.
    + embedded_cells(["lag 16"], ("ipo", "icepop"), [3, 4])
    + embedded_cells(["32 updates"], ("p3o", "grpo 0.2"), range(5)),
}
smollm2_cells = partial(cells_of, learning_rate=SMOLLM2_RATE)
SMOLLM2_PARTS: dict[str, list[Cell]] = {
    # On the embedded policy opmd and 0.9 are close to P3O or better.
    "smollm2-grid": smollm2_cells(
        SMOLLM2_GRID, (*MAIN[:4], "p3o, e_B = 0.9", "opmd"), range(3)
    ),
    "smollm2-rules": smollm2_cells(
        ("lag 4, formulas", "lag 16, formulas"),
        # smollm2-grid makes the runs of the last three too, and a folder gets each run
        # only once. To make those of all six on one machine, give a new --folder.
        ("vespo", "dppo_tv", "sequence_mask", "p3o", "p3o, e_B = 0.9", "grpo 0.2"),
        range(3),
    ),
}


def command_of(cell: Cell, base: FlagValues = EMBEDDED_RUN) -> list[str]:
    """Return the script and the flags of a run; `base` are the flags of every run."""
    mismatch = (MISMATCHES | OTHER_MISMATCHES)[cell.mismatch]
    flags = base | mismatch | OBJECTIVES[cell.objective]
    flags |= {"learning_rate": cell.learning_rate, "seed": cell.seed}
    return ["train.py", *words_of(flags)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = PARTS | SMOLLM2_PARTS
    parser.add_argument(
        "--part", choices=parts, required=True, help="which runs to make"
    )
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where to write")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--model", default="models/SmolLM2-135M-Instruct", help="SmolLM2's folder"
    )
    args = parser.parse_args()
    name, base = "embedded", EMBEDDED_RUN
    if args.part in SMOLLM2_PARTS:
        name, base = "smollm2", SMOLLM2_RUN | {"model": args.model}
    path = args.folder / f"{name}.jsonl"
    run_grid(parts[args.part], partial(command_of, base=base), path, args.workers)


if __name__ == "__main__":
    run_script(main)
