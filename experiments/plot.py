"""Figures and table of the mismatch laboratory, from the mismatch.jsonl of a folder.

    python experiments/plot.py [FOLDER]

It writes there, for each learning rate, curves-*.png (held-out pass@1 by step), ess-*.png (e_B by
step), strength-*.png (final pass@1 by the strength of the mismatch), objectives-*.png and
ablations-*.png (held-out pass@1 where these ran), and the tables mismatch.md.

A line is the mean over seeds, a band its 95% interval (Student's t); a cell with one seed has no
band. Collapse means: final held-out pass@1 below half of the run's own best. Differences are taken
seed by seed: runs of one seed have the same prompts in the same order.
"""

import json
import statistics
import sys
from collections import defaultdict
from math import sqrt
from pathlib import Path

from matplotlib import pyplot as plt
from mismatch import ABLATIONS, EVERYWHERE, OBJECTIVES, SETTINGS

RESULTS = Path(__file__).resolve().parent / "results"
# Two-sided 95% quantile of Student's t by the number of seeds.
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
# Mismatches of one kind by their strength; the same data for all at the weakest.
KINDS = {
    "temperature of the rollouts": {
        "T = 0.6": 0.6,
        "T = 0.8": 0.8,
        "on-policy": 1.0,
        "T = 1.2": 1.2,
        "T = 1.4": 1.4,
    },
    "lag, steps": {"on-policy": 0, "lag 1": 1, "lag 4": 4, "lag 16": 16},
    "updates on a rollout batch": {"on-policy": 1, "4 updates": 4, "16 updates": 16},
}
Runs = dict[tuple[float, str, str], list[dict]]  # by learning rate, setting, objective


def load(path: Path) -> Runs:
    """The finished runs of mismatch.jsonl, by cell."""
    runs: Runs = defaultdict(list)
    for line in open(path):
        row = json.loads(line)
        runs[row["learning_rate"], row["setting"], row["objective"]].append(row)
    return runs


def series(run: dict, name: str) -> list[tuple[int, float]]:
    """(step, value) wherever the run has a value of the metric."""
    points = zip(run["metrics"]["step"], run["metrics"][name], strict=True)
    return [(step, value) for step, value in points if value is not None]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval (nan for a single value)."""
    if len(values) < 2:
        return values[0], float("nan")
    return statistics.mean(values), T95[len(values)] * statistics.stdev(values) / sqrt(len(values))


def final_and_best(run: dict) -> tuple[float, float]:
    accuracy = [value for _, value in series(run, "heldout_pass@1")]
    return accuracy[-1], max(accuracy)


def collapsed(run: dict) -> bool:
    final, best = final_and_best(run)
    return final < best / 2


def draw_curves(
    runs: Runs, rate: float, objectives: list[str], metric: str, label: str, path: Path
) -> None:
    """One panel a setting that has run with any of these but P3O, one line an objective."""
    some = [o for o in objectives if o != "p3o"]
    settings = [s for s in SETTINGS if any((rate, s, o) in runs for o in some)]
    if not settings:
        return
    rows = -(-len(settings) // 4)
    figure, axes = plt.subplots(
        rows, 4, figsize=(15, 3.2 * rows), layout="constrained", sharey=True, squeeze=False
    )
    handles = {}
    for axis, setting in zip(axes.flat, settings, strict=False):
        for i, objective in enumerate(objectives):
            by_step: dict[int, list[float]] = defaultdict(list)
            for run in runs.get((rate, setting, objective), []):
                for step, value in series(run, metric):
                    by_step[step].append(value)
            if not by_step:
                continue
            steps, color = sorted(by_step), f"C{i}" if i < 10 else ("black", "lime")[i % 2]
            mean, half = zip(*(interval(by_step[step]) for step in steps), strict=True)
            (handles[objective],) = axis.plot(steps, mean, color=color)
            low, high = [
                [m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1)
            ]
            axis.fill_between(steps, low, high, color=color, alpha=0.12)
        axis.set(title=setting, xlabel="step", ylim=(0, 1.02))
    for axis in axes[:, 0]:
        axis.set_ylabel(label)
    for axis in list(axes.flat)[len(settings) :]:
        axis.set_visible(False)
    figure.legend(handles.values(), list(handles), loc="outside lower center", ncols=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_strength(runs: Runs, rate: float, path: Path) -> None:
    """Final held-out pass@1 of each objective by the strength of each kind of mismatch. The last
    panel has a point a cell, by how large the mismatch was found to be: 1 - e_B, over the run."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained", sharey=True)
    for i, objective in enumerate(EVERYWHERE):
        style = dict(color=f"C{i}", marker="o", markersize=3)
        for axis, (kind, settings) in zip(axes, KINDS.items(), strict=False):
            cells = {x: runs.get((rate, s, objective)) for s, x in settings.items()}
            found = {
                x: interval([final_and_best(run)[0] for run in cell])
                for x, cell in cells.items()
                if cell
            }
            if len(found) > 1:
                mean, half = zip(*found.values(), strict=True)
                axis.errorbar(list(found), mean, half, capsize=2, **style)
            axis.set(xlabel=kind)
        cells = [cell for (r, _, o), cell in runs.items() if r == rate and o == objective]
        x = [
            statistics.mean(1 - e for run in cell for _, e in series(run, "ess")) for cell in cells
        ]
        y = [statistics.mean(final_and_best(run)[0] for run in cell) for cell in cells]
        axes[3].plot(x, y, linestyle="", label=objective, **style)
    axes[1].set_xscale("symlog", linthresh=1)
    axes[2].set_xscale("log")
    axes[3].set(xscale="log", xlabel="1 - e_B, mean over the run")
    axes[0].set(ylabel="final held-out pass@1", ylim=(0, 1.02))
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def tables(runs: Runs, rate: float) -> str:
    """Final held-out pass@1 with collapses marked, and P3O's less each objective's: mean and 95%
    interval over seeds."""
    settings = [s for s in SETTINGS if any((rate, s, o) in runs for o in OBJECTIVES)]
    objectives = [
        o for o in (*OBJECTIVES, *ABLATIONS) if any((rate, s, o) in runs for s in settings)
    ]
    final, less = [], []
    for objective in objectives:
        final.append([objective])
        less.append([objective])
        for setting in settings:
            cell = {run["seed"]: run for run in runs.get((rate, setting, objective), [])}
            p3o = {run["seed"]: run for run in runs.get((rate, setting, "p3o"), [])}
            accuracy = {seed: final_and_best(run)[0] for seed, run in cell.items()}
            fallen = sum(map(collapsed, cell.values()))
            mark = f" **collapsed {fallen}/{len(cell)}**" if fallen else ""
            final[-1].append(entry(list(accuracy.values()), ".3f") + mark)
            both = [final_and_best(p3o[seed])[0] - accuracy[seed] for seed in p3o.keys() & cell]
            less[-1].append(entry(both, "+.3f") if objective != "p3o" else "")
    head = f"| learning rate {rate:g} | " + " | ".join(settings) + " |"
    rule = "|---" * (len(settings) + 1) + "|"
    rows = [[f"| {' | '.join(row)} |" for row in part] for part in (final, less[1:])]
    return "\n".join(
        ["Final held-out pass@1, mean ± 95% interval (number of seeds).\n", head, rule, *rows[0]]
        + ["\nP3O's less that of the objective, seed by seed.\n", head, rule, *rows[1], ""]
    )


def entry(values: list[float], form: str) -> str:
    """ "mean ± half (n)"."""
    if not values:
        return ""
    mean, half = interval(values)
    width = f" ± {half:.3f}" if len(values) > 1 else ""
    return f"{mean:{form}}{width} ({len(values)})"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    runs = load(folder / "mismatch.jsonl")
    others = [o for o in OBJECTIVES if o not in EVERYWHERE]
    text = []
    for rate in sorted({rate for rate, _, _ in runs}):
        text.append(tables(runs, rate))
        if {objective for r, _, objective in runs if r == rate} == {"p3o"}:
            continue  # the choice of the learning rate
        accuracy = "heldout_pass@1", "held-out pass@1"
        for name, objectives, metric in (
            ("curves", EVERYWHERE, accuracy),
            ("ess", EVERYWHERE, ("ess", "e_B")),
            ("objectives", EVERYWHERE + others, accuracy),
            ("ablations", ["p3o", *ABLATIONS], accuracy),
        ):
            path = folder / f"{name}-{rate:g}.png"
            draw_curves(runs, rate, objectives, *metric, path)
        draw_strength(runs, rate, folder / f"strength-{rate:g}.png")
    (folder / "mismatch.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
