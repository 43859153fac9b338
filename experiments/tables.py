"""The tables of the mismatch laboratory: mismatch.md, from the runs of mismatch.jsonl.

experiments/plot.py writes them beside its figures. All intervals are 95% intervals of a
mean by Student's t. A run's score is the mean of its last three sampled held-out
accuracies (mismatch.score). A run has collapsed if its last sampled accuracy is below
half of the best that it had, or if it stopped itself on a number that is not finite.
Runs of one seed have the same problems in the same order, so objectives are compared
seed by seed: P3O's score less that of the other.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from scipy.stats import t as student

from experiments.mismatch import (
    CONTROLS,
    LEARNING_RATE,
    MAIN,
    MISMATCHES,
    OTHERS,
    Cell,
    finished,
    score,
    where_it_breaks,
)

Run = dict[str, Any]  # a line of mismatch.jsonl


class Setting(NamedTuple):
    """A mismatch at a learning rate: a table, or a place on an axis."""

    mismatch: str
    learning_rate: float

    @property
    def title(self) -> str:
        if self.learning_rate == LEARNING_RATE:
            return self.mismatch
        return f"{self.mismatch}, learning rate {self.learning_rate:g}"


class Interval(NamedTuple):
    """A mean of `count` values, and half the width of its 95% interval."""

    mean: float
    half: float  # nan of a single value
    count: int

    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half  # False where half is nan


class Differences(NamedTuple):
    """A measure of P3O's runs less that of another objective's in a setting, seed by
    seed.
    """

    setting: Setting
    values: list[float]


# By setting, in the order of the plan; then by objective, likewise; then by seed.
Runs = dict[Setting, dict[str, list[Run]]]


def load(path: Path) -> Runs:
    """The finished runs of a mismatch.jsonl. SystemExit where there are none."""
    done = finished(path)
    if not done:
        raise SystemExit(
            f"plot.py: {path} has no runs: experiments/mismatch.py writes it"
        )
    planned = [Setting(name, LEARNING_RATE) for name in [*MISMATCHES, *CONTROLS]]
    # Rates that were only tried to choose one come last.
    tried = sorted({Setting(cell.mismatch, cell.learning_rate) for cell in done})
    runs: Runs = {}
    for setting in planned + tried:
        for objective in [*MAIN, *OTHERS]:
            cells = [
                cell
                for cell in sorted(done)
                if Setting(cell.mismatch, cell.learning_rate) == setting
                and cell.objective == objective
            ]
            if cells:
                of_setting = runs.setdefault(setting, {})
                of_setting[objective] = [done[cell] for cell in cells]
    return runs


def series(run: Run, metric: str) -> list[tuple[int, float]]:
    """(step, value) wherever the run has a value of the metric."""
    points = zip(run["metrics"]["step"], run["metrics"][metric], strict=True)
    return [(step, value) for step, value in points if value is not None]


def first(run: Run, metric: str) -> float:
    return series(run, metric)[0][1]


def last(run: Run, metric: str) -> float:
    return series(run, metric)[-1][1]


def collapsed(run: Run) -> bool:
    """Whether the run lost more than half of the best accuracy that it had."""
    accuracies = [value for _, value in series(run, "heldout_pass@1")]
    return bool(run["stopped"]) or accuracies[-1] < max(accuracies) / 2


def interval(values: Sequence[float]) -> Interval:
    """The mean of some values, with its 95% interval if they are two or more."""
    count = len(values)
    if count < 2:
        return Interval(mean(values), math.nan, count)
    half = student.ppf(0.975, count - 1) * stdev(values) / math.sqrt(count)
    return Interval(mean(values), half, count)


def last_greedy(run: Run) -> float:
    return last(run, "heldout_greedy")


def differences(
    runs: Runs, objective: str, measure: Callable[[Run], float] = score
) -> list[Differences]:
    """P3O's scores less this objective's, in every setting that has both."""
    found = []
    for setting, of_setting in runs.items():
        p3o = {run["seed"]: measure(run) for run in of_setting.get("p3o", [])}
        other = {run["seed"]: measure(run) for run in of_setting.get(objective, [])}
        seeds = sorted(p3o.keys() & other.keys())
        if seeds and objective != "p3o":
            values = [p3o[seed] - other[seed] for seed in seeds]
            found.append(Differences(setting, values))
    return found


def text_of(found: Interval, sign: str = "") -> str:
    """mean ± half"""
    if math.isnan(found.half):
        return f"{found.mean:{sign}.3f}"
    return f"{found.mean:{sign}.3f} ± {found.half:.3f}"


def table(rows: list[list[str]]) -> str:
    """A Markdown table, whose first row is the head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of_setting(setting: Setting, runs: Runs) -> str:
    """One row an objective."""
    rows = [
        [
            "objective",
            "seeds",
            "score",
            "P3O minus it",
            "sampled",
            "greedy",
            "pass@8",
            "entropy",
            "collapsed",
        ]
    ]
    for objective, of_objective in runs[setting].items():
        compared = [
            text_of(interval(found.values), "+")
            for found in differences(runs, objective)
            if found.setting == setting
        ]
        # A run that stopped itself has no model to measure pass@8 of.
        pass_at_8 = [run["pass@8"] for run in of_objective if run["pass@8"] is not None]
        count = sum(collapsed(run) for run in of_objective)
        rows.append(
            [
                objective,
                str(len(of_objective)),
                text_of(interval([score(run) for run in of_objective])),
                "".join(compared),
                mean_of_last(of_objective, "heldout_pass@1"),
                mean_of_last(of_objective, "heldout_greedy"),
                text_of(interval(pass_at_8)) if pass_at_8 else "",
                mean_of_last(of_objective, "entropy"),
                f"**{count} of {len(of_objective)}**" if count else "0",
            ]
        )
    return table(rows)


def mean_of_last(of_objective: list[Run], metric: str) -> str:
    """The last value of a metric, over seeds."""
    return text_of(interval([last(run, metric) for run in of_objective]))


def table_of_scores(runs: Runs, mismatches: Sequence[str]) -> str:
    """One row a mismatch, one column an objective: score / last greedy accuracy.

    Both are means over seeds. A star stands where a run collapsed.
    """
    rows = [["mismatch", *MAIN]]
    for mismatch in mismatches:
        of_setting = runs.get(Setting(mismatch, LEARNING_RATE), {})
        row = [mismatch]
        for objective in MAIN:
            of_objective = of_setting.get(objective, [])
            text = ""
            if of_objective:
                greedy = mean(last(run, "heldout_greedy") for run in of_objective)
                text = f"{mean(map(score, of_objective)):.2f} / {greedy:.2f}"
            if any(collapsed(run) for run in of_objective):
                text += " *"
            row.append(text)
        rows.append(row)
    return table(rows)


def table_of_others(runs: Runs) -> str:
    """One row an objective of OTHERS, after P3O; one column a mismatch they ran under.

    A cell has the score of each seed, from 0 on, and a star at a run that collapsed.
    """
    settings = [
        setting
        for setting, of_setting in runs.items()
        if setting.mismatch not in CONTROLS and not OTHERS.keys().isdisjoint(of_setting)
    ]
    rows = [["objective", *(setting.mismatch for setting in settings)]]
    for objective in ["p3o", *OTHERS]:
        row = [objective]
        for setting in settings:
            of_objective = runs[setting].get(objective, [])
            scores = [
                f"{score(run):.2f}" + (" *" if collapsed(run) else "")
                for run in of_objective
            ]
            row.append(", ".join(scores))
        if any(row[1:]):
            rows.append(row)
    return table(rows)


def breaking_mismatches(runs: Runs) -> list[str]:
    """Where it breaks, by the rule of mismatch.py."""
    done = {
        Cell(*(run[name] for name in Cell._fields)): run
        for of_setting in runs.values()
        for of_objective in of_setting.values()
        for run in of_objective
    }
    return where_it_breaks(done)


def table_of_differences(
    runs: Runs,
    mismatches: Sequence[str] = tuple(MISMATCHES),
    objectives: Sequence[str] = (*MAIN, *OTHERS),
    measure: Callable[[Run], float] = score,
) -> str:
    """One row an objective: its differences to P3O over the settings that have both.

    The interval is over the settings' means: seeds of a setting are no independent
    evidence on what happens in another.
    """
    rows = [
        [
            "objective",
            "settings",
            "comparisons",
            "P3O better",
            "worse",
            "mean of the settings",
            "least",
            "most",
        ]
    ]
    for objective in objectives:
        found = [
            of_setting
            for of_setting in differences(runs, objective, measure)
            if of_setting.setting.mismatch in mismatches
        ]
        if not found:
            continue
        values = [value for of_setting in found for value in of_setting.values]
        means = [mean(of_setting.values) for of_setting in found]
        rows.append(
            [
                objective,
                str(len(found)),
                str(len(values)),
                str(sum(value > 0 for value in values)),
                str(sum(value < 0 for value in values)),
                text_of(interval(means), "+"),
                f"{min(means):+.3f}",
                f"{max(means):+.3f}",
            ]
        )
    return table(rows)


def sentence_on_chance(runs: Runs) -> str:
    """How many of the intervals of differences exclude 0, and how many would anyway."""
    intervals = []
    for objective in [*MAIN, *OTHERS]:
        for found in differences(runs, objective):
            if len(found.values) > 1:
                intervals.append(interval(found.values))
    count = len(intervals)
    if count == 0:
        return "No setting has two seeds of P3O and of another objective yet."
    excluding = sum(found.excludes_zero() for found in intervals)
    return (
        f"The tables below have {count} intervals of such differences, of which "
        f"{excluding} exclude 0. If no objective differed from P3O, about "
        f"{0.05 * count:.1f} of {count} would."
    )


def report(runs: Runs) -> str:
    """All of mismatch.md."""
    every = [
        run
        for of_setting in runs.values()
        for of_objective in of_setting.values()
        for run in of_objective
    ]
    sampled = interval([first(run, "heldout_pass@1") for run in every])
    greedy = interval([first(run, "heldout_greedy") for run in every])
    steps = sorted({run["config"]["steps"] for run in every})
    breaking = breaking_mismatches(runs)
    elsewhere = [name for name in MISMATCHES if name not in breaking]
    sections = [
        "# The mismatch laboratory",
        "`python experiments/plot.py` writes this file from mismatch.jsonl.",
        f"{len(every)} runs of {' or '.join(map(str, steps))} steps. Before training: "
        f"sampled {sampled.mean:.3f}, greedy {greedy.mean:.3f}.",
        "- score: the mean of a run's last three sampled held-out accuracies\n"
        "- sampled, greedy: the last held-out accuracy, at temperature 1 and greedy\n"
        "- pass@8: of the final policy, on 128 held-out problems\n"
        "- entropy: of the rollouts of the last step, nats a token\n"
        "- collapsed: the last sampled accuracy is below half of the run's own best, "
        "or the run stopped itself on a number that is not finite\n"
        "- ±: half of a 95% interval of the mean over seeds, by Student's t",
        "## P3O's score less that of another objective, over all settings",
        table_of_differences(runs),
        "A comparison is two runs of one seed in one setting. The interval is over the "
        f"means of the settings. {sentence_on_chance(runs)}",
        f"## The same where it breaks: {', '.join(breaking) or 'nowhere yet'}",
        table_of_differences(runs, breaking, list(MAIN)),
        "## The same elsewhere",
        table_of_differences(runs, elsewhere, list(MAIN)),
        "## The same of the last greedy accuracy, over all settings",
        table_of_differences(runs, measure=last_greedy),
        "## Score / last greedy accuracy; a star: a run collapsed",
        table_of_scores(runs, list(MISMATCHES)),
        "## Scores of the other objectives, seed by seed",
        table_of_others(runs),
    ]
    for setting in runs:
        sections += [f"## {setting.title}", table_of_setting(setting, runs)]
    return "\n\n".join(sections) + "\n"


def spread(runs: Runs, setting: Setting) -> float:
    """How far the objectives' mean scores lie apart in a setting."""
    means = [
        mean(score(run) for run in of_objective)
        for of_objective in runs[setting].values()
    ]
    return max(means) - min(means)
