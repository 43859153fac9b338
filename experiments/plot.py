"""Figures and tables of the mismatch laboratory, from the mismatch.jsonl of a folder.

    python experiments/plot.py [FOLDER]

It writes there curves.png (held-out pass@1 by step), ess.png (e_B by step), strength.png (final
pass@1 by the strength of the mismatch), others.png and ablations.png (held-out pass@1 where these
ran), and the tables, mismatch.md.

A line is the mean over seeds, a band its 95% interval (Student's t); dots at its end are the seeds.
Collapse means: final held-out pass@1 below half of the run's own best, or a run that stopped itself
on a number that is not finite. Differences are taken seed by seed: runs of one seed have the same
prompts in the same order.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from math import sqrt
from pathlib import Path

from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.mismatch import (
    ABLATIONS,
    LEARNING_RATE,
    OBJECTIVES,
    SETTINGS,
    SHOWN_OBJECTIVES,
    finished,
)

RESULTS = Path(__file__).resolve().parent / "results"
# Two-sided 95% quantile of Student's t by the number of seeds.
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
# Mismatches of one kind by their strength.
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
OTHERS = [o for o in (*OBJECTIVES, *ABLATIONS) if o not in SHOWN_OBJECTIVES]
Panel = tuple[float, str]  # learning rate and setting
Runs = dict[Panel, dict[str, list[dict]]]  # panel -> objective -> its runs


def load(path: Path) -> Runs:
    """The finished runs of mismatch.jsonl, panels in the order of SETTINGS."""
    rows = finished(path).values()
    places = {setting: place for place, setting in enumerate(SETTINGS)}
    runs: Runs = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: (row["learning_rate"], places[row["setting"]])):
        runs[row["learning_rate"], row["setting"]][row["objective"]].append(row)
    return runs


def compared(runs: Runs) -> list[Panel]:
    """The panels with an objective besides P3O; the others are the choice of the learning rate."""
    return [p for p in runs if runs[p].keys() != {"p3o"}]


def broken(runs: Runs) -> list[Panel]:
    """The panels where all objectives and ablations were run."""
    return [p for p in runs if any(o in runs[p] for o in OTHERS)]


def title(panel: Panel) -> str:
    rate, setting = panel
    return setting if rate == LEARNING_RATE else f"{setting}, learning rate {rate:g}"


def series(run: dict, name: str) -> list[tuple[int, float]]:
    """(step, value) wherever the run has a value of the metric."""
    points = zip(run["metrics"]["step"], run["metrics"][name], strict=True)
    return [(step, value) for step, value in points if value is not None]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval (nan for a single value)."""
    if len(values) < 2:
        return values[0], float("nan")
    return statistics.mean(values), T95[len(values)] * statistics.stdev(values) / sqrt(len(values))


def accuracies(runs: list[dict]) -> dict[int, float]:
    """The final held-out pass@1 by seed."""
    return {run["seed"]: series(run, "heldout_pass@1")[-1][1] for run in runs}


def collapsed(run: dict) -> bool:
    accuracy = [value for _, value in series(run, "heldout_pass@1")]
    return bool(run["stopped"]) or accuracy[-1] < max(accuracy) / 2


def draw_curves(
    runs: Runs, panels: list[Panel], objectives: list[str], metric: str, label: str, path: Path
) -> None:
    """One panel a setting and learning rate, one line an objective."""
    if not panels:
        return
    rows = -(-len(panels) // 4)
    figure, axes = plt.subplots(
        rows, 4, figsize=(15, 3.2 * rows), layout="constrained", sharey=True, squeeze=False
    )
    handles = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for i, objective in enumerate(objectives):
            by_step: dict[int, list[float]] = defaultdict(list)
            for run in runs[panel].get(objective, []):
                for step, value in series(run, metric):
                    by_step[step].append(value)
            if not by_step:
                continue
            steps, color = sorted(by_step), f"C{i}"
            mean, half = zip(*(interval(by_step[step]) for step in steps), strict=True)
            (handles[objective],) = axis.plot(steps, mean, color=color)
            low, high = [
                [m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1)
            ]
            axis.fill_between(steps, low, high, color=color, alpha=0.12)
            axis.plot([steps[-1]] * len(by_step[steps[-1]]), by_step[steps[-1]], ".", color=color)
        axis.set(title=title(panel), xlabel="step", ylim=(0, 1.02))
    for axis in axes[:, 0]:
        axis.set_ylabel(label)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.legend(handles.values(), list(handles), loc="outside lower center", ncols=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_strength(runs: Runs, path: Path) -> None:
    """Final held-out pass@1 by the strength of each kind of mismatch. The last panel has a point
    a cell, by how large the mismatch was found to be: 1 - e_B, over the run."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained", sharey=True)
    cells = {p: {o: accuracies(cell) for o, cell in runs[p].items()} for p in runs}
    for i, objective in enumerate(SHOWN_OBJECTIVES):
        style = dict(color=f"C{i}", marker="o", markersize=3)
        for axis, (kind, settings) in zip(axes, KINDS.items(), strict=False):
            found = {
                x: interval(list(cells[LEARNING_RATE, s][objective].values()))
                for s, x in settings.items()
                if objective in cells.get((LEARNING_RATE, s), {})
            }
            if len(found) > 1:
                mean, half = zip(*found.values(), strict=True)
                axis.errorbar(list(found), mean, half, capsize=2, **style)
            axis.set(xlabel=kind)
        here = [p for p in compared(runs) if objective in runs[p]]
        x = [
            statistics.mean(1 - e for run in runs[p][objective] for _, e in series(run, "ess"))
            for p in here
        ]
        y = [statistics.mean(cells[p][objective].values()) for p in here]
        axes[3].plot(x, y, linestyle="", label=objective, **style)
    axes[1].set_xscale("symlog", linthresh=1)
    axes[2].set_xscale("log")
    axes[3].set(xscale="log", xlabel="1 - e_B, mean over the run")
    axes[0].set(ylabel="final held-out pass@1", ylim=(0, 1.02))
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def entry(values: list[float], form: str = ".3f") -> str:
    """mean ± half (n)"""
    if not values:
        return ""
    mean, half = interval(values)
    width = f" ± {half:.3f}" if len(values) > 1 else ""
    return f"{mean:{form}}{width} ({len(values)})"


def final(objectives: dict[str, list[dict]], name: str) -> str:
    """Final held-out pass@1 of a panel's objective, collapses marked."""
    runs = objectives.get(name, [])
    count = sum(map(collapsed, runs))
    mark = f" **collapsed {count}/{len(runs)}**" if count else ""
    return entry(list(accuracies(runs).values())) + mark


def difference(objectives: dict[str, list[dict]], name: str) -> str:
    """The final held-out pass@1 of P3O less that of another objective, seed by seed."""
    p3o, other = (accuracies(objectives.get(o, [])) for o in ("p3o", name))
    return entry([p3o[seed] - other[seed] for seed in p3o.keys() & other.keys()], "+.3f")


def seeds(objectives: dict[str, list[dict]], name: str) -> str:
    """The final held-out pass@1 of each seed, the lowest first."""
    return ", ".join(f"{a:.2f}" for a in sorted(accuracies(objectives.get(name, [])).values()))


def worst(objectives: dict[str, list[dict]], name: str, metric: str, of: Callable) -> str:
    """The smallest or largest value that a metric had in a step of a run."""
    found = [value for run in objectives.get(name, []) for _, value in series(run, metric)]
    return f"{of(found):.3g}" if found else ""


def table(
    runs: Runs, panels: list[Panel], objectives: list[str], cell: Callable[..., str]
) -> list[str]:
    """Lines of Markdown: panels by objectives, the more numerous of the two downwards."""
    names = [o for o in objectives if any(o in runs[p] for p in panels)]
    rows = [["", *map(title, panels)]]
    rows += [[name, *(cell(runs[p], name) for p in panels)] for name in names]
    if len(panels) > len(names):
        rows = list(zip(*rows, strict=True))
    rows.insert(1, ["---"] * len(rows[0]))
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]


def tables(runs: Runs) -> str:
    """All of mismatch.md."""
    panels = compared(runs)
    lowest = partial(worst, metric="ess_min", of=min)
    largest = partial(worst, metric="grad_norm", of=max)
    lines = ["Final held-out pass@1: mean ± 95% interval (number of seeds)", ""]
    lines += table(runs, panels, SHOWN_OBJECTIVES, final)
    lines += ["The same, seed by seed", ""]
    lines += table(runs, panels, SHOWN_OBJECTIVES, seeds)
    lines += ["P3O's less that of another objective: mean of the differences by seed", ""]
    lines += table(runs, panels, SHOWN_OBJECTIVES[1:], difference)
    lines += ["The lowest e_B of an update, of all seeds", ""]
    lines += table(runs, panels, SHOWN_OBJECTIVES, lowest)
    lines += [
        "The largest gradient norm of a step (mean over its updates), before clipping to 1",
        "",
    ]
    lines += table(runs, panels, SHOWN_OBJECTIVES, largest)
    lines += ["All objectives and ablations, where it breaks", ""]
    lines += table(runs, broken(runs), [*SHOWN_OBJECTIVES, *OTHERS], final)
    lines += ["The choice of the learning rate", ""]
    lines += table(runs, [p for p in runs if p[1] == "on-policy"], ["p3o"], final)
    return "\n".join(lines)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    runs = load(folder / "mismatch.jsonl")
    accuracy = "heldout_pass@1", "held-out pass@1"
    others = ["p3o", "grpo 0.2", *(o for o in OTHERS if o in OBJECTIVES)]
    draw_curves(runs, compared(runs), SHOWN_OBJECTIVES, *accuracy, folder / "curves.png")
    draw_curves(runs, compared(runs), SHOWN_OBJECTIVES, "ess", "e_B", folder / "ess.png")
    draw_curves(runs, broken(runs), others, *accuracy, folder / "others.png")
    draw_curves(runs, broken(runs), ["p3o", *ABLATIONS], *accuracy, folder / "ablations.png")
    draw_strength(runs, folder / "strength.png")
    text = tables(runs)
    (folder / "mismatch.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
