"""One style for all figures of experiments/."""

from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import pyplot as plt

from experiments.runs import Run, series

# An objective has the same color in every figure. The first five, which stand together,
# are told apart by color-blind readers too.
COLORS = {
    "p3o": "#0072B2",
    "grpo 0.2": "#D55E00",
    "grpo 0.4": "#E69F00",
    "reinforce": "#4D4D4D",
    "p3o, no KL": "#009E73",
    "p3o, raw log pi_b": "#56B4E9",
    "p3o, k3": "#CC79A7",
    "p3o, is": "#7B8EC8",
    "dapo": "#C0392B",
    "gspo": "#6A3D9A",
    "cispo": "#8C564B",
    "tis": "#9A8F00",
}


def color_of(objective: str) -> str:
    """The color of an objective; black for one that stands in no figure."""
    return COLORS.get(objective, "black")


def panels(count: int, height: float = 3.4, **options: Any) -> tuple[Any, list[Any]]:
    """A figure and its panels, side by side with one vertical axis."""
    options = {"sharey": True} | options
    figure, axes = plt.subplots(
        *(1, count),
        figsize=(11, height),
        layout="constrained",
        squeeze=False,
        **options,
    )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def by_step(axis: Any, objective: str, runs: Iterable[Run], metric: str) -> None:
    """A thin line for each run of an objective, and a thick one for their mean."""
    color = color_of(objective)
    values_at: dict[int, list[float]] = {}
    for run in runs:
        points = series(run, metric)
        axis.plot(*zip(*points, strict=True), color=color, linewidth=0.6, alpha=0.5)
        for step, value in points:
            values_at.setdefault(step, []).append(value)
    means = [mean(values) for values in values_at.values()]
    axis.plot(list(values_at), means, color=color, linewidth=2, label=objective)
    axis.set_xlabel("step")


def save(figure: Any, path: Path) -> None:
    """Write a figure, with one legend below it for all of its panels."""
    handles = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            *(handles.values(), handles.keys()),
            loc="outside lower center",
            ncols=min(len(handles), 6),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)
