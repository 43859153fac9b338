"""Figures and tables of the mismatch laboratory, from the mismatch.jsonl of a folder.

    python experiments/plot.py [FOLDER]

It writes there curves.png (held-out pass@1 by step), ess.png (e_B by step), strength.png (final
pass@1 by the strength of the mismatch), others.png and ablations.png (held-out pass@1 where these
ran), and the tables, mismatch.md.

A line is the mean over seeds, a band its 95% interval (Student's t; that of three seeds would fill
the panel), dots at the right are the seeds. What ran with fewer is compared on these seeds alone.
Collapse means: final held-out pass@1 below half of the run's own best, or a run that stopped itself
on a number that is not finite. Differences are taken seed by seed: runs of one seed have the same
prompts in the same order.
"""

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.mismatch import (
    ABLATIONS,
    LEARNING_RATE,
    OBJECTIVES,
    SEEDS,
    SEEDS_OF_OTHERS,
    SETTINGS,
    SHOWN_OBJECTIVES,
    finished,
)

RESULTS = Path(__file__).resolve().parent / "results"
# Two-sided 95% quantile of Student's t by the number of seeds.
T95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
# Each name has its color in all figures.
COLORS = dict(zip(OBJECTIVES, [*(f"C{i}" for i in range(10)), "black", "gold"], strict=True))
COLORS |= dict(zip(ABLATIONS, plt.get_cmap("Dark2").colors, strict=False))
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
    """The finished runs of mismatch.jsonl, panels in the order of SETTINGS. Raises SystemExit where
    there are none."""
    rows = finished(path).values()
    if not rows:
        sys.exit(f"plot.py: {path} has no runs: experiments/mismatch.py writes it")
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


def of_seeds(runs: Runs, count: int) -> Runs:
    """The runs with the first `count` seeds."""
    return {
        panel: {o: [run for run in cell if run["seed"] < count] for o, cell in objectives.items()}
        for panel, objectives in runs.items()
    }


def title(panel: Panel) -> str:
    rate, setting = panel
    return setting if rate == LEARNING_RATE else f"{setting}, learning rate {rate:g}"


def series(run: dict, name: str) -> list[tuple[int, float]]:
    """(step, value) wherever the run has a value of the metric."""
    points = zip(run["metrics"]["step"], run["metrics"][name], strict=True)
    return [(step, value) for step, value in points if value is not None]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval: nan for one value or two, which give none."""
    if len(values) < 3:
        return statistics.mean(values), float("nan")
    return statistics.mean(values), T95[len(values)] * statistics.stdev(values) / math.sqrt(
        len(values)
    )


def accuracies(runs: list[dict]) -> dict[int, float]:
    """The final held-out pass@1 by seed."""
    return {run["seed"]: series(run, "heldout_pass@1")[-1][1] for run in runs}


def footing(run: dict) -> int | None:
    """The step at which held-out pass@1 was found below half of its best so far; None if never."""
    best = 0.0
    for step, value in series(run, "heldout_pass@1"):
        if value < best / 2:
            return step
        best = max(best, value)
    return None


def collapsed(run: dict) -> bool:
    accuracy = [value for _, value in series(run, "heldout_pass@1")]
    return bool(run["stopped"]) or accuracy[-1] < max(accuracy) / 2


def draw_curves(
    runs: Runs, panels: list[Panel], objectives: list[str], metric: str, path: Path
) -> None:
    """One panel a setting and learning rate, one line an objective. Of e_B, log10(1 - e_B)."""
    if not panels:
        return
    columns, ess = 5 if len(panels) < 6 else 4, metric == "ess"
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(15, 3.2 * rows), layout="constrained", sharey=True, squeeze=False
    )
    handles = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for i, objective in reversed([*enumerate(objectives)]):  # the first on top
            by_step: dict[int, list[float]] = defaultdict(list)
            for run in runs[panel].get(objective, []):
                for step, value in series(run, metric):
                    by_step[step].append(math.log10(max(1 - value, 1e-6)) if ess else value)
            if not by_step:
                continue
            steps, color = sorted(by_step), COLORS[objective]
            mean, half = zip(*(interval(by_step[step]) for step in steps), strict=True)
            (handles[objective],) = axis.plot(steps, mean, color=color)
            low, high = [
                [m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1)
            ]
            last = by_step[steps[-1]]
            if len(last) > 3:
                axis.fill_between(steps, low, high, color=color, alpha=0.12)
            axis.plot([steps[-1] + i + 1] * len(last), last, ".", color=color)
        axis.set(title=title(panel), xlabel="step", ylim=(-6.1, 0.1) if ess else (0, 1.02))
    for axis in axes[:, 0]:
        axis.set_ylabel("log10(1 - e_B)" if ess else "held-out pass@1")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    names = [objective for objective in objectives if objective in handles]
    figure.legend([handles[o] for o in names], names, loc="outside lower center", ncols=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_strength(runs: Runs, path: Path) -> None:
    """Final held-out pass@1 by the strength of each kind of mismatch, joined where an objective ran
    at all strengths. The last panel has a point a cell, by how large the mismatch was found to be:
    1 - e_B, over the run; P3O's below 0.9 are named."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained", sharey=True)
    cells = {p: {o: accuracies(cell) for o, cell in runs[p].items()} for p in runs}
    for objective in reversed(SHOWN_OBJECTIVES):
        style = dict(color=COLORS[objective], marker="o", markersize=3)
        for axis, (kind, settings) in zip(axes, KINDS.items(), strict=False):
            found = {
                x: interval(list(cells[LEARNING_RATE, s][objective].values()))
                for s, x in settings.items()
                if objective in cells.get((LEARNING_RATE, s), {})
            }
            if len(found) > 1:
                mean, half = zip(*found.values(), strict=True)
                line = "-" if len(found) == len(settings) else ""
                axis.errorbar(list(found), mean, half, capsize=2, linestyle=line, **style)
            axis.set(xlabel=kind)
        here = [p for p in compared(runs) if objective in runs[p]]
        x = [
            statistics.mean(1 - e for run in runs[p][objective] for _, e in series(run, "ess"))
            for p in here
        ]
        y = [statistics.mean(cells[p][objective].values()) for p in here]
        axes[3].plot(x, y, linestyle="", label=objective, **style)
        if objective == "p3o":
            for panel, *at in zip(here, x, y, strict=True):
                if at[1] < 0.9:
                    name = title(panel).replace("learning rate ", "")
                    axes[3].annotate(
                        name, at, (-4, 0), textcoords="offset points", ha="right", fontsize=7
                    )
    axes[1].set_xscale("symlog", linthresh=1)
    axes[2].set_xscale("log", base=4)
    for axis, settings in zip(axes[:3], KINDS.values(), strict=True):
        axis.set_xticks(list(settings.values()), [f"{x:g}" for x in settings.values()])
        axis.minorticks_off()
    axes[3].set(xscale="log", xlabel="1 - e_B, mean over the run")
    axes[0].set(ylabel="final held-out pass@1", ylim=(0, 1.02))
    handles, labels = axes[3].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def entry(values: list[float], form: str = ".3f") -> str:
    """mean ± half (n), without the half where n is 1 or 2"""
    if not values:
        return ""
    mean, half = interval(values)
    width = f" ± {half:.3f}" if len(values) > 2 else ""
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
    """The final held-out pass@1 of each seed, from seed 0 on."""
    found = accuracies(objectives.get(name, []))
    return ", ".join(f"{found[seed]:.2f}" for seed in sorted(found))


def footings(objectives: dict[str, list[dict]], name: str) -> str:
    """The step at which each seed lost its footing, the earliest first; - for never."""
    found = [footing(run) or math.inf for run in objectives.get(name, [])]
    return ", ".join("-" if step == math.inf else f"{step}" for step in sorted(found))


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
    lowest = partial(worst, metric="ess_min", of=min)
    largest = partial(worst, metric="grad_norm", of=max)
    panels, shown = compared(runs), SHOWN_OBJECTIVES
    few, breaks, every = of_seeds(runs, SEEDS_OF_OTHERS), broken(runs), [*shown, *OTHERS]
    rates = [p for p in runs if p[1] == "on-policy"]
    fell = "below half of its best so far (-: never), the earliest seed first"
    sections = {
        "Final held-out pass@1: mean ± 95% interval (number of seeds)": (
            runs, panels, shown, final),
        f"The same by seed, 0 to {SEEDS - 1}": (runs, panels, shown, seeds),
        "P3O's less that of another objective: mean of the differences by seed": (
            runs, panels, shown[1:], difference),
        "The lowest e_B of an update, of all seeds": (runs, panels, shown, lowest),
        "The largest gradient norm of a step (mean over its updates), before clipping to 1": (
            runs, panels, shown, largest),
        f"All objectives and ablations, where it breaks: the first {SEEDS_OF_OTHERS} seeds": (
            few, breaks, every, final),
        f"The same by seed, 0 to {SEEDS_OF_OTHERS - 1}": (few, breaks, every, seeds),
        "P3O's less that of another, the same seeds": (few, breaks, every[1:], difference),
        f"The step at which held-out pass@1 was {fell}": (few, breaks, every, footings),
        "The choice of the learning rate": (runs, rates, ["p3o"], final),
    }  # fmt: skip
    written = {heading: table(*content) for heading, content in sections.items() if content[1]}
    return "\n".join(line for heading, lines in written.items() for line in (heading, "", *lines))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    runs = load(folder / "mismatch.jsonl")
    few, accuracy = of_seeds(runs, SEEDS_OF_OTHERS), "heldout_pass@1"
    others = ["p3o", "grpo 0.2", *(o for o in OTHERS if o in OBJECTIVES)]
    draw_curves(runs, compared(runs), SHOWN_OBJECTIVES, accuracy, folder / "curves.png")
    draw_curves(runs, compared(runs), SHOWN_OBJECTIVES, "ess", folder / "ess.png")
    draw_curves(few, broken(runs), others, accuracy, folder / "others.png")
    draw_curves(few, broken(runs), ["p3o", *ABLATIONS], accuracy, folder / "ablations.png")
    draw_strength(runs, folder / "strength.png")
    text = tables(runs)
    (folder / "mismatch.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
