"""Trains on rollouts that are 16 steps old, with three objectives, and draws a figure.

    python tools/compare.py    # or `make compare`

P3O, GRPO and REINFORCE train the embedded policy on the same problems with the same
sampling noise. The runs share the cores, and each takes two to three minutes of one
core. From step 17 on, each batch is 16 steps old. REINFORCE forgets what it has
learned, and P3O and GRPO do not. FOLDER/compare.png (--folder) shows accuracy and e_B
by step, and a table compares the final policies. This is one seed; study/README.md has
five.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study.figures import draw_by_step
from study.plan import command_of, embedded_cells
from study.runs import last, read_runs, run_grid, series, table
from support.command import run_script

OBJECTIVES = ("p3o", "grpo 0.2", "reinforce")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/compare"), help="where to write"
    )
    folder = parser.parse_args().folder
    path = folder / "compare.jsonl"
    cells = embedded_cells(["lag 16"], OBJECTIVES, [0])
    print(
        f"{len(cells)} runs of two to three minutes on one core; runs already in\n"
        f"{path} are not repeated: delete it after changing the code. Each run\n"
        "prints its name, its sampled accuracy every ten steps, and its seconds.",
        flush=True,
    )
    workers = min(len(cells), len(os.sched_getaffinity(0)))
    run_grid(cells, command_of, path, workers)

    runs = read_runs(path)
    rows = [["objective", "sampled accuracy", "greedy accuracy", "least e_B"]]
    for cell in cells:
        run = runs[cell]
        values = [last(run, "heldout_pass@1"), last(run, "heldout_greedy")]
        values.append(min(e_b for _, e_b in series(run, "ess_min")))
        rows.append([cell.objective, *(f"{value:.3f}" for value in values)])
    print(table(rows))
    shown = [
        ("sampled held-out accuracy", "lag 16", "heldout_pass@1"),
        ("$e_B$ of rollouts up to 16 steps old", "lag 16", "ess"),
    ]
    draw_by_step(runs, OBJECTIVES, shown, folder / "compare.png")


if __name__ == "__main__":
    run_script(main)
