"""Figures and tables of the mismatch laboratory, from a folder's mismatch.jsonl.

    python experiments/plot.py [FOLDER]    # experiments/results by default

It draws whatever runs there are, and writes beside them

    scores.png     the score of each run by its mismatch: what the laboratory is for
    greedy.png     the same of the last greedy accuracy
    curves.png     sampled held-out accuracy by step
    ess.png        1 - e_B by step, the weight of P3O's KL
    others.png     the score where the other objectives and the ablations ran too
    mismatch.md    all of it in tables (experiments/tables.py)

A dot, or a thin line, is the run of one seed. A score is the mean of a run's last three
sampled held-out accuracies. curves.png, ess.png and others.png have the six settings in
which the objectives' scores lie furthest apart; mismatch.md has all settings.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from matplotlib import pyplot as plt

from experiments.colors import color_of
from experiments.mismatch import LEARNING_RATE, MAIN, OTHERS, score
from experiments.tables import (
    Run,
    Runs,
    Setting,
    first,
    interval,
    last,
    load,
    report,
    series,
    spread,
)

RESULTS = Path(__file__).resolve().parent / "results"
MOST_PANELS = 6


class Panel(NamedTuple):
    """A part of scores.png: settings side by side, one kind of mismatch."""

    title: str
    label_of: dict[str, str]  # of each mismatch, on the axis
    ordered: bool = True  # from weak to strong, so that a line between them means more


PANELS = [
    Panel(
        "temperature of the rollouts",
        {
            "T = 0.6": "0.6",
            "T = 0.8": "0.8",
            "on-policy": "1",
            "T = 1.2": "1.2",
            "T = 1.4": "1.4",
            "T = 1.6": "1.6",
        },
    ),
    Panel(
        "lag between sampling and use, steps",
        {"on-policy": "0", "lag 1": "1", "lag 4": "4", "lag 16": "16"},
    ),
    Panel(
        "optimizer steps on a rollout batch",
        {"on-policy": "1", "4 updates": "4", "16 updates": "16"},
    ),
    Panel(
        "other settings",
        {
            "on-policy": "on-policy",
            "fp8": "fp8",
            "4 minibatches": "4 mini-\nbatches",
            "changing": "changing",
        },
        ordered=False,
    ),
]


def draw_by_mismatch(
    runs: Runs, value_of: Callable[[Run], float], metric: str, label: str, path: Path
) -> None:
    """scores.png and greedy.png: a value of each run, one panel a kind of mismatch.

    metric is the one whose value before training is the dashed line.
    """
    figure, axes = plt.subplots(
        2, 2, figsize=(11, 7.6), layout="constrained", sharey=True
    )
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        draw_panel(axis, panel, runs, value_of)
        before = [
            first(run, metric)
            for of_setting in runs.values()
            for of_objective in of_setting.values()
            for run in of_objective
        ]
        axis.axhline(mean(before), color="0.6", linestyle="--", linewidth=1, zorder=0)
    for axis in axes[:, 0]:
        axis.set_ylabel(label)
    axes[0, 0].set_ylim(0, 1.02)
    handles = [
        plt.Line2D([], [], color=color_of(objective), marker="o", label=objective)
        for objective in MAIN
    ]
    handles.append(
        plt.Line2D([], [], color="0.6", linestyle="--", label="before training")
    )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        title="a dot: the run of a seed; a bar: the 95% interval of their mean",
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_panel(
    axis: plt.Axes, panel: Panel, runs: Runs, value_of: Callable[[Run], float]
) -> None:
    """One kind of mismatch: objectives side by side at each of its settings."""
    for number, objective in enumerate(MAIN):
        shift = 0.15 * (number - (len(MAIN) - 1) / 2)
        color = color_of(objective)
        places = [place + shift for place in range(len(panel.label_of))]
        means = []
        for place, mismatch in zip(places, panel.label_of, strict=True):
            setting = Setting(mismatch, LEARNING_RATE)
            of_objective = runs.get(setting, {}).get(objective, [])
            if not of_objective:
                means.append(math.nan)  # a gap in the line
                continue
            values = [value_of(run) for run in of_objective]
            found = interval(values)
            means.append(found.mean)
            axis.scatter([place] * len(values), values, s=14, color=color, linewidth=0)
            if found.count > 2:
                axis.errorbar(place, found.mean, found.half, color=color, capsize=3)
        if panel.ordered:
            axis.plot(places, means, color=color, linewidth=1, alpha=0.5)
    axis.set_xticks(range(len(panel.label_of)), list(panel.label_of.values()))
    axis.set_xlim(-0.5, len(panel.label_of) - 0.5)
    axis.set_xlabel(panel.title)
    axis.grid(axis="y", alpha=0.3)


def most_different(runs: Runs, objectives: list[str]) -> list[Setting]:
    """The settings where these objectives' scores lie furthest apart, in their order.

    At most MOST_PANELS of those where two or more of them ran.
    """
    of_these: Runs = {}
    for setting, of_setting in runs.items():
        kept = {name: of_setting[name] for name in objectives if name in of_setting}
        if len(kept) > 1:
            of_these[setting] = kept
    apart = sorted(of_these, key=lambda setting: -spread(of_these, setting))
    chosen = apart[:MOST_PANELS]
    return [setting for setting in of_these if setting in chosen]


def panels_for(count: int) -> tuple[plt.Figure, list[plt.Axes]]:
    """A figure with so many panels, three in a row."""
    rows = -(-count // 3)
    figure, axes = plt.subplots(
        rows,
        3,
        figsize=(11, 3.3 * rows),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def draw_by_step(
    runs: Runs, value_of: Callable[[Run], list[tuple[int, float]]], label: str
) -> plt.Figure | None:
    """A value by step where the objectives differ most; None where none can differ."""
    settings = most_different(runs, list(MAIN))
    if not settings:
        return None
    figure, axes = panels_for(len(settings))
    for axis, setting in zip(axes, settings, strict=True):
        for objective in reversed(MAIN):  # P3O's lines are on top.
            color = color_of(objective)
            values_at: dict[int, list[float]] = {}
            for run in runs[setting].get(objective, []):
                points = value_of(run)
                axis.plot(*zip(*points, strict=True), color=color, lw=0.6, alpha=0.5)
                for step, value in points:
                    values_at.setdefault(step, []).append(value)
            means = [mean(values) for values in values_at.values()]
            axis.plot(list(values_at), means, color=color, linewidth=2)
        axis.set(title=setting.title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(label)
    handles = [
        plt.Line2D([], [], color=color_of(objective), label=objective)
        for objective in MAIN
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(MAIN))
    return figure


def accuracy_by_step(run: Run) -> list[tuple[int, float]]:
    return series(run, "heldout_pass@1")


def lost_by_step(run: Run) -> list[tuple[int, float]]:
    """1 - e_B by step. Rounding below 1e-7 is drawn there."""
    return [(step, max(1 - ess, 1e-7)) for step, ess in series(run, "ess")]


def draw_curves(runs: Runs, path: Path) -> None:
    """Sampled held-out accuracy by step."""
    figure = draw_by_step(runs, accuracy_by_step, "sampled held-out pass@1")
    if figure is None:
        return
    figure.axes[0].set_ylim(0, 1.02)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_ess(runs: Runs, path: Path) -> None:
    """1 - e_B by step."""
    figure = draw_by_step(runs, lost_by_step, "$1 - e_B$")
    if figure is None:
        return
    figure.axes[0].set_yscale("log")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_others(runs: Runs, path: Path) -> None:
    """The score of every objective and ablation, where any beside MAIN has run."""
    with_others = {
        setting: of_setting
        for setting, of_setting in runs.items()
        if any(name in of_setting for name in OTHERS)
    }
    settings = most_different(with_others, [*MAIN, *OTHERS])
    if not settings:
        return
    names = [
        name
        for name in [*MAIN, *OTHERS]
        if any(name in runs[setting] for setting in settings)
    ]
    figure, axes = panels_for(len(settings))
    for axis, setting in zip(axes, settings, strict=True):
        for place, name in enumerate(names):
            scores = [score(run) for run in runs[setting].get(name, [])]
            if scores:
                color = color_of(name)
                axis.plot(scores, [place] * len(scores), ".", color=color)
                axis.plot(mean(scores), place, "|", color=color, markersize=14)
        axis.set(title=setting.title, xlim=(-0.02, 1.02), xlabel="score")
        axis.set_yticks(range(len(names)), names, fontsize=9)
        axis.set_ylim(len(names) - 0.5, -0.5)  # P3O at the top
        axis.grid(alpha=0.3)
    figure.set_figheight(max(3.3, 0.24 * len(names)) * -(-len(settings) // 3))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args().folder
    runs = load(folder / "mismatch.jsonl")
    draw_by_mismatch(
        runs, score, "heldout_pass@1", "score: sampled pass@1", folder / "scores.png"
    )
    draw_by_mismatch(
        runs,
        lambda run: last(run, "heldout_greedy"),
        "heldout_greedy",
        "last greedy accuracy",
        folder / "greedy.png",
    )
    draw_curves(runs, folder / "curves.png")
    draw_ess(runs, folder / "ess.png")
    draw_others(runs, folder / "others.png")
    text = report(runs)
    (folder / "mismatch.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
