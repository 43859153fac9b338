"""The paper's strongest cases on a pretrained model: fp8 rollouts, and hot ones.

    python experiments/smollm2.py models/SmolLM2-135M-Instruct
    torchrun --nproc-per-node 2 experiments/pretrained.py
    python experiments/pretrained.py --tables

The second line makes one run on each core, hours in all. SmolLM2-135M learns sums and
products as in recipes/smollm2-laptop.yaml, for STEPS steps instead of 120. A finished
run is a line of FOLDER/pretrained.jsonl (--folder), as those of mismatch.py are, and is
not run again. The last line prints the tables of what has been run, and writes them to
FOLDER/pretrained.md.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.mismatch import (
    MAIN,
    OTHERS,
    Cell,
    finished,
    run_plan,
    score,
    script_of,
)
from experiments.tables import collapsed, interval, last, series, table, text_of

RESULTS = Path(__file__).resolve().parent / "results"
RECIPE = "recipes/smollm2-laptop.yaml"
STEPS = 40
LEARNING_RATE = 2e-5  # the recipe's
MISMATCHES = {
    "fp8": ["--rollout_quantization=fp8_per_channel"],
    "T = 1.2": ["--temperature=1.2"],
    "T = 1.2, of the policy too": ["--temperature=1.2", "--policy_temperature=1.2"],
}
# Added when P3O's first seeds had collapsed at T = 1.2: P3O without its KL, with log
# pi_b as vLLM records it by default, and with a policy of that temperature.
OBJECTIVES = {
    "fp8": ("p3o", "grpo 0.4", "reinforce"),
    "T = 1.2": ("p3o", "grpo 0.4", "reinforce", "p3o, no KL", "p3o, raw log pi_b"),
    "T = 1.2, of the policy too": ("p3o",),
}
SEEDS = 3
# Sums and products, whose responses are as long as in the recipe.
EVAL_FLAGS = ["--task=recipes/sums-and-products", "--max_response_tokens=16"]


def plan(done: dict[Cell, dict]) -> list[Cell]:
    """All runs, seed by seed; `done` lengthens no plan here."""
    return [
        Cell(mismatch, LEARNING_RATE, objective, seed)
        for seed in range(SEEDS)
        for mismatch in MISMATCHES
        for objective in OBJECTIVES[mismatch]
    ]


def flags_of(cell: Cell, done: dict[Cell, dict], model: str) -> list[str]:
    """The script and flags of a run."""
    return [
        script_of(cell),
        f"--config={RECIPE}",
        f"--model={model}",
        f"--steps={STEPS}",
        "--eval_every=10",
        *(MAIN | OTHERS)[cell.objective],
        *MISMATCHES[cell.mismatch],
        f"--seed={cell.seed}",
    ]


def mean_of(values: Sequence[float]) -> str:
    """A cell: the mean, with its 95% interval if there are two values."""
    return text_of(interval(values))


def report(done: dict[Cell, dict]) -> str:
    """A row for each mismatch and objective: means over seeds.

    The score is that of mismatch.py, here the mean accuracy after 20, 30 and 40 steps,
    with a star if a run collapsed. P3O minus it is by pairs of one seed. The columns
    from `sampled` to `entropy` are at the end.
    """
    names = ["mismatch", "objective", "seeds", "score", "P3O minus it", "sampled"]
    names += ["greedy", "pass@8", "entropy", "e_B, mean", "e_B, least"]
    lines = [names]
    for mismatch in MISMATCHES:
        for objective in OBJECTIVES[mismatch]:
            runs = {
                cell.seed: row
                for cell, row in sorted(done.items())
                if (cell.mismatch, cell.objective) == (mismatch, objective)
            }
            if not runs:
                continue
            rows = list(runs.values())
            differences = []
            for seed, row in runs.items():
                of_p3o = done.get(Cell(mismatch, LEARNING_RATE, "p3o", seed))
                if of_p3o and objective != "p3o":
                    differences.append(score(of_p3o) - score(row))
            star = " *" if any(map(collapsed, rows)) else ""
            ess = [[value for _, value in series(row, "ess")] for row in rows]
            lines.append(
                [
                    mismatch,
                    objective,
                    str(len(rows)),
                    mean_of([score(row) for row in rows]) + star,
                    mean_of(differences) if differences else "",
                    *(
                        mean_of([last(row, name) for row in rows])
                        for name in ("heldout_pass@1", "heldout_greedy")
                    ),
                    mean_of([row["pass@8"] or 0.0 for row in rows]),
                    mean_of([last(row, "entropy") for row in rows]),
                    f"{mean(map(mean, ess)):.3f}",
                    f"{min(map(min, ess)):.3f}",
                ]
            )
    return table(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument(
        "--hours", type=float, default=24, help="start no run after so long"
    )
    parser.add_argument("--tables", action="store_true", help="only write the tables")
    args = parser.parse_args()
    folder = args.folder.resolve()
    results = folder / "pretrained.jsonl"
    if not args.tables:
        of_model = partial(flags_of, model=args.model)
        run_plan(plan, of_model, results, args.hours, EVAL_FLAGS)
    text = report(finished(results))
    (folder / "pretrained.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
