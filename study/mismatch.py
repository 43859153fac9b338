"""The mismatch laboratory: objectives x mismatches x seeds, each a run of train.py.

    python study/mismatch.py --part reduced
    python study/mismatch.py --part grid --workers 2

A finished run is a line of FOLDER/light.jsonl (--folder); study/report.py makes
figures and tables of these. A part can be stopped and started at will, and a run that
two parts have is made once. The parts:

    reduced      what `make reproduce` runs: 18 runs
    grid         MAIN under all MISMATCHES, five seeds; OTHERS where it breaks and at
                 T = 1.6, three seeds: 476 runs
    constants    one constant for all mismatches in place of e_B, three seeds: 126 runs
    own          the mean of the run's own e_B, and another run's e_B, step by step: 84
                 runs, which need those of P3O in `grid`
    rates        two more learning rates where it matters, three seeds: 132 runs
    heat         remedies for hot rollouts, three seeds: 81 runs
    neighbours   the objectives of papers that stand beside P3O's, and the two best of
                 five other statistics in place of e_B, three seeds, five where it
                 breaks; the other statistics and D, one seed: 481 runs
    rules        six rules that frameworks and papers of 2026 use, where it matters and
                 with 32 updates, three seeds, and what they are compared with there:
                 111 runs

What a run does not set is EVERY_RUN and the defaults of train.py. Trainer and rollouts
compute in float32, so that no result hangs on the CPU; only the engine of fp8 does not.
LEARNING_RATE was the best of four on fresh data for P3O, in the first version's runs.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study.runs import (
    ROOT,
    Cell,
    Flags,
    Runs,
    cells_of,
    grid_parser,
    read_runs,
    run_grid,
    series,
    words_of,
)
from support.command import Refused, run_script

# Half the default's responses, in one update: B is as large, and a step cheaper.
EVERY_RUN: Flags = {
    "steps": 60,
    "prompts_per_step": 16,
    "minibatches": 1,
    "dtype": "float32",
    "rollout_dtype": "float32",
}
LEARNING_RATE = 2e-4
MISMATCHES: dict[str, Flags] = {
    "on-policy": {},
    "T = 0.6": {"temperature": 0.6},
    "T = 0.8": {"temperature": 0.8},
    "T = 1.2": {"temperature": 1.2},
    "T = 1.4": {"temperature": 1.4},
    "T = 1.6": {"temperature": 1.6},
    # vLLM computes in bfloat16 around its fp8 layers.
    "fp8": {"rollout_quantization": "fp8_per_channel", "rollout_dtype": "bfloat16"},
    "lag 1": {"lag": 1},
    "lag 4": {"lag": 4},
    "lag 16": {"lag": 16},
    "4 updates": {"passes": 2, "minibatches": 2},
    "16 updates": {"passes": 4, "minibatches": 4},
    # As many batches B as in "4 updates", as small as in "16 updates", each used once.
    # The last three of a step are one to three updates old.
    "4 minibatches": {"minibatches": 4},
    "T = 1.2, lag 4": {"temperature": 1.2, "lag": 4},
}
# The off-policy part of Stanford CS336's assignment 5 (spring 2026): a step samples 256
# responses and makes one update on each group of 8, so the last is 31 updates old.
COURSE: dict[str, Flags] = {
    "32 updates": {"prompts_per_step": 32, "group_size": 8, "minibatches": 32}
}
# Where P3O, GRPO 0.2 or REINFORCE lost 0.1 or more, with the first seed, in the first
# version's runs.
BREAKING = ("lag 4", "lag 16", "4 updates", "16 updates", "4 minibatches")
MAIN = ("p3o", "grpo 0.2", "grpo 0.4", "reinforce", "p3o, no KL")
OTHERS = ("p3o, k3", "p3o, is", "p3o, no cap", "dapo", "gspo", "cispo", "tis")
CONSTANTS = ("p3o, e_B = 0.8", "p3o, e_B = 0.9", "p3o, e_B = 0.97")
OWN_MEAN, YOKED = "p3o, own mean e_B", "p3o, yoked e_B"
RAW = "p3o, raw log pi_b"
# A-3PO's alpha follows from the lag. Where that is 0 or 1, it is GRPO 0.4.
A3PO = "a3po"
D = "p3o, e_B where signal"  # A to D in study/README.md
NEIGHBOURS = ("m2po", "bapo", "asymre", "rec", "opmd", "sapo")
RULES = ("ipo", "sequence_mask", "dppo_tv", "icepop", "vespo", "opsm")
STATISTICS = (
    "p3o, e_B of responses",
    "p3o, e_B of mean ratios",
    "p3o, recent e_B",
    "p3o, e_B^0.5",
    "p3o, e_B^8",
)
# With the two statistics that are best in the mean of lags 4 and 16, 16 updates and
# T = 1.6, with the first seed.
RIVALS = (*NEIGHBOURS, "p3o, e_B of responses", "p3o, recent e_B")
NO_CLIP = "grpo, no clip"
# What the course's part compares, and P3O with the two variants that did best.
IN_COURSE = (
    "p3o",
    "grpo 0.2",
    "reinforce",
    "p3o, e_B = 0.9",
    "p3o, e_B of responses",
    "gspo",
    NO_CLIP,
)
REMEDIES = (
    "p3o, KL at one heat",  # A
    "p3o, KL where signal",  # B
    "p3o, step where signal",  # C
    D,
)


def ablation(name: str, **flags: str) -> Flags:
    """The flags of an objective of study/ablations.py."""
    return {"objective": f"study.ablations:{name}", **flags}


OBJECTIVES: dict[str, Flags] = {
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
        for name in ("dapo", "gspo", "cispo", "tis", A3PO, *NEIGHBOURS, *RULES)
    },
    **{
        f"p3o, e_B = {level}": ablation("fixed_ess", objective_args=f"level={level}")
        for level in (0.8, 0.9, 0.97, 0.999)
    },
    OWN_MEAN: ablation("fixed_ess"),  # with the level of the cell
    YOKED: ablation("yoked_ess"),  # with the file of the cell
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
# What no objective can reach: names of study/patched.py.
PATCHES = {
    RAW: "raw_logprobs",
    "p3o, KL at one heat": "kl_at_rollout_temperature",
    "p3o, step where signal": "step_where_signal",
    **dict.fromkeys((*STATISTICS, D), "ess_used"),
}
HOT = ("T = 1.2", "T = 1.6", "T = 1.2, lag 4")
SOME = ("on-policy", "T = 1.6", "lag 16", "16 updates")
at_rate = partial(cells_of, learning_rate=LEARNING_RATE)
PARTS: dict[str, list[Cell]] = {
    "reduced": at_rate(
        (*SOME, "T = 0.6", "T = 1.4"), ("p3o", "grpo 0.2", "reinforce"), [0]
    ),
    "grid": at_rate(MISMATCHES, MAIN, range(5))
    + at_rate((*BREAKING, "T = 1.6"), OTHERS, range(3)),
    "constants": at_rate(MISMATCHES, CONSTANTS, range(3)),
    "own": at_rate(MISMATCHES, (OWN_MEAN, YOKED), range(3)),
    # The grid has the rate between these two.
    "rates": [
        cell
        for rate in (1e-4, 4e-4)
        for cell in cells_of(SOME, MAIN[:4], range(3), rate)
        + cells_of(SOME[1:], ("p3o, e_B of responses", "rec"), range(3), rate)
    ],
    "heat": at_rate((*HOT, "lag 4", "lag 16", "16 updates"), REMEDIES, range(3))
    + at_rate(HOT, [RAW], range(3)),
    "neighbours": at_rate(MISMATCHES, RIVALS, range(3))
    + at_rate(BREAKING, RIVALS, (3, 4))
    + at_rate(MISMATCHES, (*STATISTICS, D), [0])
    + at_rate(("lag 16", "lag 4", "T = 1.2, lag 4"), [A3PO], range(3)),
    "rules": [
        cell
        for seed in range(3)
        for cell in at_rate(COURSE, (*IN_COURSE, *RULES), [seed])
        + at_rate(("lag 16", "16 updates", "T = 1.6", "lag 4"), RULES, [seed])
    ],
}


def script_of(objective: str) -> list[str]:
    """train.py, or the script that is train.py but for one thing."""
    if objective in PATCHES:
        return ["study/patched.py", PATCHES[objective]]
    return ["train.py"]


def command_of(cell: Cell, done: Runs, folder: Path) -> list[str]:
    """The script and flags of a run. `done` has the runs of P3O that some cells need.

    Raises Refused where one is missing.
    """
    flags = (
        EVERY_RUN | (MISMATCHES | COURSE)[cell.mismatch] | OBJECTIVES[cell.objective]
    )
    flags |= {"learning_rate": cell.learning_rate, "seed": cell.seed}
    if cell.objective == A3PO:
        flags["objective_args"] = f"alpha={1 - 1 / flags['lag']}"
    if cell.objective == OWN_MEAN:
        _, ess = ess_of_p3o(cell, done)
        flags["objective_args"] = f"level={mean(ess):.4f}"
    if cell.objective == YOKED:
        other, ess = ess_of_p3o(cell._replace(seed=(cell.seed + 1) % 3), done)
        number = list(MISMATCHES).index(cell.mismatch)
        path = folder / f"ess/{number}-{other.seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ess))
        flags["objective_args"] = f"path={os.path.relpath(path, ROOT)}"
    return [*script_of(cell.objective), *words_of(flags)]


def ess_of_p3o(cell: Cell, done: Runs) -> tuple[Cell, list[float]]:
    """P3O's run beside this one, and its e_B at each update: the mean of the step."""
    own = cell._replace(objective="p3o")
    if own not in done:
        raise Refused(f"{cell} needs the run of P3O: --part grid comes first")
    config = done[own]["config"]
    updates = config["passes"] * config["minibatches"]
    ess = [value for _, value in series(done[own], "ess") for _ in range(updates)]
    return own, ess


def main() -> None:
    args = grid_parser(__doc__, PARTS).parse_args()
    folder = args.folder.resolve()
    path = folder / "light.jsonl"
    done = read_runs(path) if path.exists() else {}
    command = partial(command_of, done=done, folder=folder)
    run_grid(PARTS[args.part], command, path, args.workers)


if __name__ == "__main__":
    run_script(main)
