"""Figures and tables of the laboratory, from the runs that are there.

    python study/report.py [RUNS]    # study/results/light.jsonl by default

RUNS is a file of study/mismatch.py. It writes beside that file

    scores.png       the score by strength of the mismatch: heat, lag, reuse
    curves.png       accuracy by step where the objectives differ most
    light.md         all runs in tables: the name of RUNS
    pretrained.png   SmolLM2 with hot rollouts by step, if pretrained.jsonl is there
    pretrained.md    all its runs in a table, those of gpu/ in another
    objectives.png   what a token weighs in the gradient, by its ratio

A score is the mean of a run's last three sampled held-out accuracies. A run has
collapsed, and has a star, if its last sampled accuracy is below half of its best, or if
it stopped itself on a number that is not finite. ± is half of a 95% interval of a mean
over seeds, by Student's t. Runs of one seed have the same problems in the same order,
so objectives are compared seed by seed. A run on a GPU that has P3O's runs there beside
it is compared with those.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from study import ablations
from study.figures import add_legend, color_of, draw_by_step, panels, save
from study.mismatch import BREAKING, LEARNING_RATE, MAIN, MISMATCHES, OBJECTIVES
from study.runs import (
    RESULTS,
    Runs,
    collapsed,
    last,
    read_runs,
    score,
    select,
    series,
    table,
    text_of,
)
from study.tokens import COMPARED, token_weights
from support.command import run_script

# Of scores.png: each from weak to strong.
STRENGTHS = {
    "temperature of the rollouts": [
        "T = 0.6",
        "T = 0.8",
        "on-policy",
        "T = 1.2",
        "T = 1.4",
        "T = 1.6",
    ],
    "lag, in steps": ["lag 1", "lag 4", "lag 16"],
    "updates on a batch": ["4 updates", "16 updates"],
}
# Of curves.png.
SHOWN_BY_STEP = ("T = 1.6", "lag 16", "16 updates")


def names_in(runs: Runs, field: str, known: Iterable[str]) -> list[str]:
    """The values of a field of the cells: the known ones first, in their order."""
    found = {getattr(cell, field) for cell in runs}
    return [name for name in known if name in found] + sorted(found - {*known})


# Tables


def differences(runs: Runs, objective: str) -> dict[str, dict[int, float]]:
    """P3O's score less this objective's, by mismatch and seed, where both have run.

    A run on a GPU names the runs of P3O there: those it is compared with.
    """
    found: dict[str, dict[int, float]] = {}
    for cell, run in select(runs, objective=objective).items():
        p3o = runs.get(cell._replace(objective=run.get("beside", "p3o")))
        if p3o and objective != "p3o":
            found.setdefault(cell.mismatch, {})[cell.seed] = score(p3o) - score(run)
    return found


def table_of_differences(runs: Runs, mismatches: Iterable[str]) -> str:
    """P3O's score less that of each other objective, over these mismatches.

    The interval is over seeds, with the mismatches as they are: of the mean over all
    that have the objective. A seed that one of them lacks is left out of it.
    """
    runs = {cell: run for cell, run in runs.items() if cell.mismatch in mismatches}
    columns = "objective, mismatches, P3O better, seeds, P3O minus it, least, most"
    rows = [columns.split(", ")]
    for objective in names_in(runs, "objective", OBJECTIVES):
        found = list(differences(runs, objective).values())
        if not found:
            continue
        means = [mean(by_seed.values()) for by_seed in found]
        seeds = set.intersection(*(set(by_seed) for by_seed in found))
        of_seeds = [mean(by_seed[seed] for by_seed in found) for seed in seeds]
        better = sum(value > 0 for value in means)
        row = [objective, str(len(found)), str(better), str(len(seeds))]
        row += [text_of(of_seeds, "+"), f"{min(means):+.3f}", f"{max(means):+.3f}"]
        rows.append(row)
    return table(rows)


def table_of_scores(runs: Runs) -> str:
    """A row an objective, a column a mismatch: mean score / mean last greedy accuracy.

    A star stands where a run collapsed.
    """
    mismatches = names_in(runs, "mismatch", MISMATCHES)
    rows = [["objective", *mismatches]]
    for objective in names_in(runs, "objective", OBJECTIVES):
        row = [objective]
        for mismatch in mismatches:
            same = select(runs, objective=objective, mismatch=mismatch).values()
            if not same:
                row.append("")
                continue
            greedy = mean(last(run, "heldout_greedy") for run in same)
            star = " *" if any(map(collapsed, same)) else ""
            row.append(f"{mean(map(score, same)):.2f} / {greedy:.2f}{star}")
        rows.append(row)
    return table(rows)


def table_of_runs(runs: Runs) -> str:
    """All measures, a row for each mismatch, learning rate and objective."""
    columns = (
        "mismatch, rate, objective, seeds, beside P3O on a GPU, score, P3O minus it, "
        "sampled, greedy, entropy, mean e_B, least e_B, mean in its place, collapsed"
    )
    rows = [columns.split(", ")]
    for mismatch in names_in(runs, "mismatch", MISMATCHES):
        for rate in sorted({cell.learning_rate for cell in runs}):
            beside = select(runs, mismatch=mismatch, learning_rate=rate)
            for objective in names_in(beside, "objective", OBJECTIVES):
                same = list(select(beside, objective=objective).values())
                less = differences(beside, objective).get(mismatch, {})
                # The mean of a step's updates, and the least of them.
                ess = [[value for _, value in series(run, "ess")] for run in same]
                least = [e_b for run in same for _, e_b in series(run, "ess_min")]
                measures = [
                    [score(run) for run in same],
                    list(less.values()),
                    [last(run, "heldout_pass@1") for run in same],
                    [last(run, "heldout_greedy") for run in same],
                    [last(run, "entropy") for run in same],
                ]
                beside_gpu = sum("beside" in run for run in same)
                row = [
                    mismatch,
                    f"{rate:g}",
                    objective,
                    f"{len(same)}",
                    f"{beside_gpu}",
                ]
                row += map(text_of, measures)
                row += [f"{mean(map(mean, ess)):.3f}", f"{min(least):.3f}"]
                # What an objective had in place of e_B. Old runs do not say.
                values = [
                    value
                    for run in same
                    if any(run["metrics"].get("ess_used", []))
                    for _, value in series(run, "ess_used")
                ]
                row.append(f"{mean(values):.3f}" if values else "")
                rows.append([*row, str(sum(map(collapsed, same)))])
    return table(rows)


def text_of_laboratory(runs: Runs) -> str:
    """All runs of a laboratory in tables."""
    at_rate = select(runs, learning_rate=LEARNING_RATE)
    sections = [
        f"# The mismatch laboratory: {len(runs)} runs",
        "`python study/report.py` writes this file.",
        __doc__[__doc__.index("A score is") :],
        "## P3O's score less that of another objective, over all mismatches",
        table_of_differences(at_rate, MISMATCHES),
        f"## The same over those that break: {'; '.join(BREAKING)}",
        table_of_differences(at_rate, BREAKING),
    ]
    for rate in sorted({cell.learning_rate for cell in runs}):
        sections.append(f"## Score / greedy accuracy, at a learning rate of {rate:g}")
        sections.append(table_of_scores(select(runs, learning_rate=rate)))
    sections += ["## All measures", table_of_runs(runs)]
    return "\n\n".join(section.strip() for section in sections) + "\n"


# Figures


def draw_scores(runs: Runs, path: Path) -> None:
    """A dot for each run, and a line through the means from weak to strong."""
    widths = [len(mismatches) for mismatches in STRENGTHS.values()]
    figure, axes = panels(
        len(STRENGTHS), sharey=False, gridspec_kw={"width_ratios": widths}
    )
    for axis, (title, mismatches) in zip(axes, STRENGTHS.items(), strict=True):
        for objective in reversed(MAIN):  # P3O is on top.
            color = color_of(objective)
            means = {}
            for place, mismatch in enumerate(mismatches):
                same = select(runs, objective=objective, mismatch=mismatch).values()
                scores = [score(run) for run in same]
                if scores:
                    axis.plot(
                        [place] * len(scores), scores, ".", color=color, alpha=0.4
                    )
                    means[place] = mean(scores)
            axis.plot(means.keys(), means.values(), "o-", color=color)
        axis.set_xticks(range(len(mismatches)), mismatches)
        axis.set(xlabel=title, xlim=(-0.5, len(mismatches) - 0.5))
    axes[0].set_ylabel("score: sampled accuracy")
    # Heat makes differences of 0.04, which the scale of the others would hide.
    for axis in axes[1:]:
        axis.set_ylim(-0.02, 1.02)
    add_legend(figure, MAIN)
    save(figure, path)


LOG_RATIO = torch.linspace(-2.5, 2.5, 501, dtype=torch.float64)  # log rho, nats


def weight_by_ratio(
    objective: Callable[..., torch.Tensor], advantage: float, e_b: float
) -> torch.Tensor:
    """w_t at every rho of LOG_RATIO, [M]: each token is a response of its own."""
    log_ratio = LOG_RATIO[:, None]  # [N, 1]
    weight = token_weights(
        objective,
        log_ratio,
        torch.full_like(log_ratio, -1.0),
        torch.full_like(log_ratio, advantage),
        e_b,
    )
    return weight[:, 0]


def draw_weights(path: Path) -> None:
    """The weight at A = 1, above 0, and at A = -1, below; and the pull of P3O's KL."""
    figure, axes = panels(8)
    others = (
        ("grpo", "dapo", "gspo"),
        ("cispo", "tis", "sapo"),
        ("m2po", "bapo", "a3po"),
        ("reinforce", "rec", "asymre", "opmd"),
        ("ipo", "dppo_tv", "icepop"),
        ("sequence_mask", "vespo", "opsm"),
    )
    shown = [[("p3o", e_b) for e_b in (0.9, 0.5, 0.1)]]
    shown += [[(name, 1.0) for name in names] for names in others]
    for axis, curves in zip(axes, shown, strict=False):
        for style, (name, e_b) in zip(("-", "--", ":", "-."), curves, strict=False):
            look = {"linestyle": style, "color": color_of(name)}
            label = f"p3o, $e_B$ = {e_b}" if name == "p3o" else name
            for advantage in (1.0, -1.0):
                weight = weight_by_ratio(COMPARED[name], advantage, e_b)
                axis.plot(LOG_RATIO.exp(), weight, label=label, **look)
                label = None
    # The exact KL pulls each token v that could have stood at the position, by pi_b(v)
    # times what `is` does to the sampled one.
    for name, objective in (
        ("exact, is", ablations.importance_sampled),
        ("k3", ablations.k3),
    ):
        weight = weight_by_ratio(objective, advantage=0.0, e_b=0.0)
        axes[-1].plot(LOG_RATIO.exp(), weight, label=name)
    axes[-1].set_title("KL, times $1 - e_B$", fontsize=10)
    for axis in axes:
        axis.legend(fontsize=8, loc="lower left")
        axis.set(xscale="log", ylim=(-5.5, 5.5), xlabel=r"ratio $\rho$")
    axes[0].set_ylabel(r"weight on grad log $\pi_\theta$")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?", default=RESULTS / "light.jsonl")
    path = parser.parse_args().runs
    folder, runs = path.parent, read_runs(path)
    at_rate = select(runs, learning_rate=LEARNING_RATE)
    draw_scores(at_rate, folder / "scores.png")
    shown = [(name, name, "heldout_pass@1") for name in SHOWN_BY_STEP]
    draw_by_step(at_rate, MAIN, shown, folder / "curves.png")
    draw_weights(folder / "objectives.png")
    path.with_suffix(".md").write_text(text_of_laboratory(runs))
    print(table_of_differences(at_rate, MISMATCHES))
    for found in folder.rglob("pretrained.jsonl"):
        found.with_suffix(".md").write_text(table_of_runs(read_runs(found)))
    if (folder / "pretrained.jsonl").exists():
        hot = select(read_runs(folder / "pretrained.jsonl"), mismatch="T = 1.2")
        shown = [
            ("entropy, nats a token", "T = 1.2", "entropy"),
            ("reward", "T = 1.2", "reward"),
            ("e_B", "T = 1.2", "ess"),
            ("greedy accuracy", "T = 1.2", "heldout_greedy"),
        ]
        objectives = names_in(hot, "objective", OBJECTIVES)
        draw_by_step(hot, objectives, shown, folder / "pretrained.png")


if __name__ == "__main__":
    run_script(main)
