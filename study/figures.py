"""Draws the figures of study/ in one style."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import pyplot as plt

from study.runs import Runs, select, series

# An objective has the same color in every figure. Color-blind readers can distinguish
# those of plan.MAIN, which appear together.
COLORS = {
    "p3o": "#0072B2",
    "grpo 0.2": "#D55E00",
    "grpo": "#D55E00",
    "grpo 0.4": "#E69F00",
    "reinforce": "#4D4D4D",
    "p3o, no KL": "#009E73",
    "dapo": "#C0392B",
    "gspo": "#6A3D9A",
    "cispo": "#8C564B",
    "tis": "#9A8F00",
    "m2po": "#1B7837",
    "a3po": "#B8860B",
    "bapo": "#2C7FB8",
    "asymre": "#E7298A",
    "rec": "#D95F02",
    "opmd": "#7570B3",
    "sapo": "#66A61E",
    "ipo": "#1F78B4",
    "sequence_mask": "#A6761D",
    "dppo_tv": "#B2182B",
    "icepop": "#35978F",
    "vespo": "#762A83",
    "opsm": "#4D9221",
}


def color_of(objective: str) -> str:
    """Return the color of an objective, black if it has none."""
    return COLORS.get(objective, "black")


def panels(count: int, rows: int = 1, **options: Any) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, row by row; by default they share the y-axis."""
    options = {"sharey": True} | options
    figure, axes = plt.subplots(
        rows,
        count // rows,
        figsize=(11, 3.4 * rows),
        layout="constrained",
        squeeze=False,
        **options,
    )
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, list(axes.flat)


def draw_by_step(
    runs: Runs, objectives: Sequence[str], shown: list[tuple[str, str, str]], path: Path
) -> None:
    """Draw a panel with all objectives for each (title, mismatch, metric) of `shown`.

    A thin line is a run. A thick line is the mean over seeds, at the steps at which all
    seeds have a value.
    """
    same_metric = len({metric for _, _, metric in shown}) == 1
    figure, axes = panels(len(shown), sharey=same_metric)
    for axis, (title, mismatch, metric) in zip(axes, shown, strict=True):
        for objective in reversed(objectives):  # The first one is drawn last, on top.
            color = color_of(objective)
            values_at: dict[int, list[float]] = {}
            same = select(runs, mismatch=mismatch, objective=objective).values()
            for run in same:
                points = series(run, metric)
                axis.plot(*zip(*points, strict=True), color=color, lw=0.6, alpha=0.5)
                for step, value in points:
                    values_at.setdefault(step, []).append(value)
            means = {
                step: mean(values)
                for step, values in values_at.items()
                if len(values) == len(same)
            }
            axis.plot(means.keys(), means.values(), color=color, lw=2, label=objective)
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
    lines = [
        plt.Line2D([], [], color=color_of(objective), label=objective)
        for objective in objectives
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=6)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure, and print its path."""
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)
