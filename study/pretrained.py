"""Objectives and mismatches on a pretrained model.

    python tools/smollm2.py models/SmolLM2-135M-Instruct
    python study/pretrained.py --part heat --workers 2

SmolLM2-135M learns sums and products as in recipes/smollm2-laptop.yaml, for 20 steps
instead of 120. The first version's runs had 40, and were decided in the first 20 but
where GRPO or fp8 made them slow. A finished run is a line of FOLDER/pretrained.jsonl
(--folder), as those of mismatch.py are; study/report.py makes its figure and
table. The parts:

    heat       rollouts at T = 1.2: what the collapse of P3O hangs on: 19 runs
    stale      rollouts at T = 1.2 and a lag of 4, two seeds: 6 runs
    knowing    rollouts at T = 1.2 of a policy that is right in 0.7 of its samples: 2
               runs. --model names it: ten steps of the recipe in float32, which
               `train.py --steps 10 --dtype float32 --rollout_dtype float32` makes
    fp8        fp8 rollouts, where the CPU multiplies bfloat16 fast: 2 runs
    grid       six objectives on six kinds of data, three seeds: 108 runs. Their
               task is the same formulas after two solved ones, and their --model a
               copy of the folder whose chat_template.jinja is
               {{ messages[0]["content"] }}

A run takes a quarter of an hour of a core.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study.mismatch import MAIN, OBJECTIVES, RAW, script_of
from study.mismatch import MISMATCHES as LABORATORY
from study.runs import Cell, Flags, cells_of, grid_parser, run_grid, words_of
from support.command import run_script

LEARNING_RATE = 2e-5  # the recipe's
EVERY_RUN: Flags = {
    "config": "recipes/smollm2-laptop.yaml",
    "steps": 20,
    "eval_every": 5,
    "dtype": "float32",
    "rollout_dtype": "float32",
}
# Fewer responses than the recipe has, and shorter: the grid ends in a few nights.
OF_FORMULAS = {
    "task": "recipes/formulas",
    "prompts_per_step": 6,
    "max_response_tokens": 8,
}
GRID = {
    f"{name}, formulas": LABORATORY[name] | OF_FORMULAS
    for name in ("on-policy", "lag 4", "4 updates", "T = 1.2", "lag 16", "fp8")
}
MISMATCHES = {
    **GRID,
    **LABORATORY,
    "T = 1.2, of the policy too": {"temperature": 1.2, "policy_temperature": 1.2},
    "T = 1.2, a policy that knows": LABORATORY["T = 1.2"],
}
at_rate = partial(cells_of, learning_rate=LEARNING_RATE)
PARTS: dict[str, list[Cell]] = {
    "heat": at_rate(
        ["T = 1.2"],
        ("p3o", "p3o, no KL", "p3o, KL where signal", "p3o, step where signal"),
        range(3),
    )
    + at_rate(["T = 1.2"], (RAW, "p3o, e_B = 0.999"), (1, 2))
    + at_rate(["T = 1.2, of the policy too"], ["p3o"], range(3)),
    "stale": at_rate(
        ["T = 1.2, lag 4"], ("p3o", "p3o, KL at one heat", "p3o, no KL"), range(2)
    ),
    "knowing": at_rate(["T = 1.2, a policy that knows"], ("p3o", "p3o, no KL"), [0]),
    "fp8": at_rate(["fp8"], ("p3o, no KL", "p3o, KL where signal"), [2]),
    # The last two of the six: the best constant and neighbour on the embedded policy.
    "grid": at_rate(GRID, (*MAIN[:4], "p3o, e_B = 0.9", "opmd"), range(3)),
}


def command_of(cell: Cell, model: str) -> list[str]:
    """The script and flags of a run."""
    flags = EVERY_RUN | {"model": model, "seed": cell.seed}
    flags |= OBJECTIVES[cell.objective] | MISMATCHES[cell.mismatch]
    return [*script_of(cell.objective), *words_of(flags)]


def main() -> None:
    parser = grid_parser(__doc__, PARTS)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    path = args.folder.resolve() / "pretrained.jsonl"
    command = partial(command_of, model=args.model)
    run_grid(PARTS[args.part], command, path, args.workers)


if __name__ == "__main__":
    run_script(main)
