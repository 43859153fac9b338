"""Turns the runs of a folder into tables and figures.

    python study/report.py [FOLDER]    # study/results by default

It reads FOLDER/embedded.jsonl and every smollm2*.jsonl in FOLDER and its subfolders,
and writes these files:

    embedded.md     tables of all runs of the embedded policy
    smollm2*.md     beside each smollm2*.jsonl, a table of its runs
    curves.png      accuracy by step on three kinds of data
    objectives.png  the weight of a token in the gradient, by its ratio

A score is the mean of a run's last three sampled held-out accuracies. A run has
collapsed if its last sampled accuracy is below half of its best, or if it stopped
because a number was not finite; a star marks a cell in which at least one run
collapsed. "±" gives half of the 95% interval of a mean over seeds, by Student's t.
Runs with the same seed see the same problems in the same order, so objectives are
compared seed by seed. Runs that were made on a GPU are compared with P3O's runs on that
GPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from loss import LOSSES
from study import ablations
from study.figures import color_of, draw_by_step, panels, save
from study.plan import BREAKING_KINDS, LEARNING_RATE, MAIN, MISMATCHES, OBJECTIVES
from study.runs import (
    RESULTS,
    Runs,
    collapsed,
    final_score,
    format_interval,
    last,
    read_runs,
    select,
    series,
    table,
)
from support.command import run_script

CURVES = ("T = 1.6", "lag 16", "16 updates")  # the panels of curves.png


def names_in(runs: Runs, field: str, known: Iterable[str]) -> list[str]:
    """Return the values of a field of the cells: those of `known` first, in order."""
    found = {getattr(cell, field) for cell in runs}
    return [name for name in known if name in found] + sorted(found - {*known})


# Tables


def differences(runs: Runs, objective: str) -> dict[str, dict[int, float]]:
    """Return P3O's score minus this objective's, by mismatch and seed.

    Seeds that only one of the two has are left out. A run on a GPU is compared with
    P3O's runs on that GPU, which its field `beside` names.
    """
    found: dict[str, dict[int, float]] = {}
    for cell, run in select(runs, objective=objective).items():
        p3o = runs.get(cell._replace(objective=run.get("beside", "p3o")))
        if p3o and objective != "p3o":
            difference = final_score(p3o) - final_score(run)
            found.setdefault(cell.mismatch, {})[cell.seed] = difference
    return found


def table_of_differences(runs: Runs, mismatches: Iterable[str]) -> str:
    """Return a table of P3O's score minus that of each other objective.

    For each seed, the difference is averaged over the mismatches on which the objective
    was run. The interval and the column "seeds" are over the seeds that all these
    mismatches have; the other columns use all seeds.
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
        mean_by_seed = [mean(by_seed[seed] for by_seed in found) for seed in seeds]
        better = sum(value > 0 for value in means)
        row = [objective, str(len(found)), str(better), str(len(seeds))]
        row.append(format_interval(mean_by_seed, "+"))
        rows.append([*row, f"{min(means):+.3f}", f"{max(means):+.3f}"])
    return table(rows)


def table_of_scores(runs: Runs) -> str:
    """Return a table of mean score / mean last greedy accuracy.

    It has a row for each objective and a column for each mismatch.
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
            row.append(f"{mean(map(final_score, same)):.2f} / {greedy:.2f}{star}")
        rows.append(row)
    return table(rows)


def table_of_runs(runs: Runs) -> str:
    """Return a table of all measures by mismatch, learning rate and objective."""
    columns = (
        "mismatch, learning rate, objective, seeds, compared with P3O on a GPU, score, "
        "P3O minus it, sampled, greedy, entropy, mean e_B, least e_B, "
        "mean of what replaces e_B, collapsed"
    )
    rows = [columns.split(", ")]
    for mismatch in names_in(runs, "mismatch", MISMATCHES):
        for rate in sorted({cell.learning_rate for cell in runs}):
            compared = select(runs, mismatch=mismatch, learning_rate=rate)
            for objective in names_in(compared, "objective", OBJECTIVES):
                same = list(select(compared, objective=objective).values())
                difference = differences(compared, objective).get(mismatch, {})
                # `ess` is the mean e_B of a step's updates, and `ess_min` the lowest.
                ess = [[value for _, value in series(run, "ess")] for run in same]
                least = [e_b for run in same for _, e_b in series(run, "ess_min")]
                measures = [
                    [final_score(run) for run in same],
                    list(difference.values()),
                    *(
                        [last(run, metric) for run in same]
                        for metric in ("heldout_pass@1", "heldout_greedy", "entropy")
                    ),
                ]
                # The number that the objective used in place of e_B, if it was logged.
                used = [
                    value
                    for run in same
                    if "ess_used" in run["metrics"]
                    for _, value in series(run, "ess_used")
                ]
                rows.append(
                    [
                        mismatch,
                        f"{rate:g}",
                        objective,
                        str(len(same)),
                        str(sum("beside" in run for run in same)),
                        *map(format_interval, measures),
                        f"{mean(map(mean, ess)):.3f}",
                        f"{min(least):.3f}",
                        f"{mean(used):.3f}" if used else "",
                        str(sum(map(collapsed, same))),
                    ]
                )
    return table(rows)


def embedded_page(runs: Runs) -> str:
    """Return the page with all tables of the embedded policy."""
    at_rate = select(runs, learning_rate=LEARNING_RATE)
    sections = [
        f"# The embedded policy: {len(runs)} runs",
        "`python study/report.py` writes this file.",
        __doc__[__doc__.index("A score is") :],
        "## P3O's score minus that of another objective, over all mismatches",
        table_of_differences(at_rate, MISMATCHES),
        f"## The same over the breaking kinds: {'; '.join(BREAKING_KINDS)}",
        table_of_differences(at_rate, BREAKING_KINDS),
    ]
    for rate in sorted({cell.learning_rate for cell in runs}):
        sections.append(f"## Score / greedy accuracy, at a learning rate of {rate:g}")
        sections.append(table_of_scores(select(runs, learning_rate=rate)))
    sections += ["## All measures", table_of_runs(runs)]
    return "\n\n".join(section.strip() for section in sections) + "\n"


# Figures


LOG_RATIO = torch.linspace(-2.5, 2.5, 501, dtype=torch.float64)  # log rho, nats


def weight_by_ratio(
    objective: Callable[..., torch.Tensor], advantage: float, e_b: float
) -> torch.Tensor:
    """Return the weight w of a token in the gradient, for each of LOG_RATIO: [M].

    The gradient of a token's loss is -w grad log pi_theta. For REINFORCE, whose loss is
    -A log pi_theta, w is A. The KL given to the objective is 0, so only the first term
    of P3O (12) counts. Each token is a response of its own.
    """
    logp_behavior = torch.full((len(LOG_RATIO), 1), -2.5, dtype=torch.float64)  # [M, 1]
    logp = (logp_behavior + LOG_RATIO[:, None]).requires_grad_()
    advantages = torch.full_like(logp_behavior, advantage)
    loss = objective(logp, logp_behavior, advantages, torch.zeros_like(logp), e_b)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    return -gradient[:, 0]


def draw_weights(path: Path) -> None:
    """Draw the weights for A = 1, below 0 those for A = -1, and the KL's pull."""
    figure, axes = panels(8, rows=2)
    shown = [[("p3o", e_b) for e_b in (0.9, 0.5, 0.1)]]
    shown += [
        [(name, 1.0) for name in names.split()]
        for names in (
            "grpo dapo gspo",
            "cispo tis sapo",
            "m2po bapo a3po",
            "reinforce rec asymre opmd",
            "ipo dppo_tv icepop",
            "sequence_mask vespo opsm",
        )
    ]
    for axis, curves in zip(axes, shown, strict=False):
        for style, (name, e_b) in zip(("-", "--", ":", "-."), curves, strict=False):
            look = {"linestyle": style, "color": color_of(name)}
            label = f"p3o, $e_B$ = {e_b}" if name == "p3o" else name
            objective = LOSSES.get(name) or resolve_name(f"tools.objectives:{name}")
            for advantage in (1.0, -1.0):
                weight = weight_by_ratio(objective, advantage, e_b)
                axis.plot(LOG_RATIO.exp(), weight, label=label, **look)
                label = None
    # The exact KL pulls at every token v of the vocabulary. Its pull is pi_b(v) times
    # the pull of the estimate `is` at a sampled v.
    for name, objective in (
        ("exact, is", ablations.importance_sampled),
        ("k3", ablations.k3),
    ):
        weight = weight_by_ratio(objective, advantage=0.0, e_b=0.0)
        axes[-1].plot(LOG_RATIO.exp(), weight, label=name)
    axes[-1].set_title("KL, without $1 - e_B$", fontsize=10)
    for axis in axes:
        axis.legend(fontsize=8, loc="lower left")
        axis.set(xscale="log", ylim=(-5.5, 5.5), xlabel=r"ratio $\rho$")
    for axis in axes[::4]:
        axis.set_ylabel(r"weight on grad log $\pi_\theta$")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=RESULTS, help="where the runs are"
    )
    folder = parser.parse_args().folder
    path = folder / "embedded.jsonl"
    runs = read_runs(path)
    at_rate = select(runs, learning_rate=LEARNING_RATE)
    path.with_suffix(".md").write_text(embedded_page(runs))
    print(table_of_differences(at_rate, MISMATCHES))
    curves = [(name, name, "heldout_pass@1") for name in CURVES]
    draw_by_step(at_rate, MAIN, curves, folder / "curves.png")
    draw_weights(folder / "objectives.png")
    for path in folder.rglob("smollm2*.jsonl"):
        path.with_suffix(".md").write_text(table_of_runs(read_runs(path)))


if __name__ == "__main__":
    run_script(main)
