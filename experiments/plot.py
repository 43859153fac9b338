"""Figures and table of the mismatch laboratory, from the mismatch.jsonl of a folder.

    python experiments/plot.py [FOLDER]

It writes there, for each learning rate, curves-*.png (held-out pass@1 by step), ess-*.png (e_B by
step), strength-*.png (final pass@1 by the strength of the mismatch), and the table mismatch.md.

A line is the mean over seeds, a band its 95% interval (Student's t); a cell with one seed has no
band. Collapse means: final held-out pass@1 below half of the run's own best.
"""

import json
import statistics
import sys
from collections import defaultdict
from math import sqrt
from pathlib import Path

from matplotlib import pyplot as plt

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


def draw_curves(runs: Runs, rate: float, metric: str, label: str, path: Path) -> None:
    """One panel a setting, one line an objective, with the band over seeds."""
    settings = list(dict.fromkeys(s for r, s, _ in runs if r == rate))
    rows = -(-len(settings) // 4)
    figure, axes = plt.subplots(
        rows, 4, figsize=(15, 3.2 * rows), layout="constrained", sharey=True, squeeze=False
    )
    objectives = list(dict.fromkeys(o for r, _, o in runs if r == rate))
    for axis, setting in zip(axes.flat, settings, strict=False):
        for i, objective in enumerate(objectives):
            cell = runs.get((rate, setting, objective), [])
            by_step: dict[int, list[float]] = defaultdict(list)
            for run in cell:
                for step, value in series(run, metric):
                    by_step[step].append(value)
            if not by_step:
                continue
            steps = sorted(by_step)
            mean, half = zip(*(interval(by_step[step]) for step in steps), strict=True)
            axis.plot(steps, mean, color=f"C{i}" if i < 10 else "black", label=objective)
            low, high = [
                [m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1)
            ]
            axis.fill_between(steps, low, high, color=f"C{i}" if i < 10 else "black", alpha=0.15)
        axis.set(title=setting, xlabel="step", ylim=(0, 1.02))
    for axis in axes[:, 0]:
        axis.set_ylabel(label)
    for axis in list(axes.flat)[len(settings) :]:
        axis.set_visible(False)
    handles, labels = {}, []
    for axis in axes.flat:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    labels = list(handles)
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_strength(runs: Runs, rate: float, path: Path) -> None:
    """Final held-out pass@1 of each objective by the strength of each kind of mismatch. The last
    panel has a point a cell, by how large the mismatch was found to be: 1 - e_B, over the run."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained", sharey=True)
    objectives = list(dict.fromkeys(o for r, _, o in runs if r == rate))
    for i, objective in enumerate(objectives):
        style = dict(color=f"C{i}" if i < 10 else "black", marker="o", markersize=3)
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
    figure.legend(loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(runs: Runs, rate: float) -> str:
    """Final held-out pass@1, mean and 95% interval over seeds, collapses marked."""
    settings = list(dict.fromkeys(s for r, s, _ in runs if r == rate))
    objectives = list(dict.fromkeys(o for r, _, o in runs if r == rate))
    lines = [f"| learning rate {rate:g} | " + " | ".join(objectives) + " |"]
    lines.append("|---" * (len(objectives) + 1) + "|")
    for setting in settings:
        row = [setting]
        for objective in objectives:
            cell = runs.get((rate, setting, objective))
            if not cell:
                row.append("")
                continue
            mean, half = interval([final_and_best(run)[0] for run in cell])
            count = sum(map(collapsed, cell))
            mark = f" **collapsed {count}/{len(cell)}**" if count else ""
            width = f" ± {half:.3f}" if len(cell) > 1 else ""
            row.append(f"{mean:.3f}{width} ({len(cell)}){mark}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    runs = load(folder / "mismatch.jsonl")
    rates = sorted({rate for rate, _, _ in runs})
    text = ["Final held-out pass@1: mean ± 95% interval (number of seeds).\n"]
    for rate in rates:
        text.append(table(runs, rate) + "\n")
        if len({setting for r, setting, _ in runs if r == rate}) == 1:
            continue  # the choice of the learning rate
        draw_curves(
            runs, rate, "heldout_pass@1", "held-out pass@1", folder / f"curves-{rate:g}.png"
        )
        draw_curves(runs, rate, "ess", "e_B", folder / f"ess-{rate:g}.png")
        draw_strength(runs, rate, folder / f"strength-{rate:g}.png")
    (folder / "mismatch.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
