"""Test how the study plans, makes and summarizes its runs.

The second half recomputes the tables on the pages from the committed runs.
"""

import json
import re
from functools import cache
from statistics import mean

import pytest
import torch
from conftest import ROOT
from launch import read_metrics

from loss import grpo, p3o
from study import plan, report, runs
from study.plan import LEARNING_RATE, PARTS, SMOLLM2_PARTS, Cell, command_of
from support.command import Refused
from train import Config, find_objective

LAG = Cell("lag 16", "p3o", LEARNING_RATE, 0)
SMOLLM2 = plan.SMOLLM2_RUN | {"model": "models/SmolLM2"}
PAGE = ROOT / "study/README.md"
PAGES = "\n".join(
    page.read_text()
    for page in (PAGE, ROOT / "docs/frameworks.md", ROOT / "docs/cs336.md")
)
FRONT = ROOT / "README.md"


def says(page, text):
    """Return whether a page has this text, in lines of any length."""
    return " ".join(text.split()) in " ".join(page.read_text().split())


def run_of(cell, *accuracies, stopped=None):
    """Return a finished run with these sampled accuracies, from step 0 on."""
    steps = [10 * number for number in range(len(accuracies))]
    return {
        **cell._asdict(),
        "stopped": stopped,
        "seconds": 1.0,
        "metrics": {
            "step": steps,
            "heldout_pass@1": list(accuracies),
            "heldout_greedy": [accuracy / 2 for accuracy in accuracies],
            "ess": [None, 0.5] + [0.25] * (len(steps) - 2),
            "ess_min": [None, 0.4] + [0.1] * (len(steps) - 2),
            "ess_used": [None, 0.8] + [0.6] * (len(steps) - 2),
            "entropy": [None] + [0.25] * (len(steps) - 1),
        },
    }


# The plan


def test_every_objective_and_kind_of_data_has_flags_that_train_py_accepts():
    for parts, base in ((PARTS, plan.EMBEDDED_RUN), (SMOLLM2_PARTS, SMOLLM2)):
        cells = sum(parts.values(), [])
        one_each = {cell.objective: cell for cell in cells}
        one_each |= {cell.mismatch: cell for cell in cells}
        for cell in one_each.values():
            script, *flags = command_of(cell, base)
            assert script == "train.py"
            cfg = Config.from_flags(flags)
            find_objective(cfg.objective, cfg.objective_args)
            assert (cfg.seed, cfg.learning_rate) == (cell.seed, cell.learning_rate)
            # Results must not depend on what "auto" means on a machine.
            assert cfg.dtype == "float32"
            fp8 = cell.mismatch.startswith("fp8")
            assert cfg.rollout_dtype == ("bfloat16" if fp8 else "float32")


# Making the runs


def test_a_run_that_fails_does_not_stop_the_others_and_only_it_is_run_again(
    monkeypatch, tmp_path, capsys
):
    broken = {1}  # the seeds whose runs fail

    def make_run(cell, command):
        # The workers share the cores, so each has fewer than all if there are several.
        assert len(runs.os.sched_getaffinity(0)) < max(2, runs.os.cpu_count())
        if cell.seed in broken:
            raise RuntimeError("no memory")
        return run_of(cell, 0.4, 0.9)

    def run_grid():
        cells = [LAG._replace(seed=seed) for seed in range(3)]
        runs.run_grid(cells, lambda cell: [], tmp_path / "runs.jsonl", workers=2)

    monkeypatch.setattr(runs, "make_run", make_run)
    monkeypatch.setattr(runs.signal, "signal", lambda *_: None)
    with pytest.raises(Refused, match="1 of the runs failed, for the reasons above"):
        run_grid()
    printed = capsys.readouterr()
    assert "lag 16, p3o, 0.0002, 1  failed: no memory" in printed.err
    assert "3/3" in printed.out + printed.err
    broken.clear()
    run_grid()
    assert "1/1  lag 16, p3o, 0.0002, 1 " in capsys.readouterr().out
    found = runs.read_runs(tmp_path / "runs.jsonl")
    assert sorted(cell.seed for cell in found) == [0, 1, 2]


# Summaries of runs


def test_the_score_is_the_mean_of_the_last_three_sampled_accuracies():
    # (0.6 + 0.7 + 0.8) / 3
    run = run_of(LAG, 0.1, 0.5, 0.6, 0.7, 0.8)
    assert runs.final_score(run) == pytest.approx(0.7)
    assert runs.final_score(run | {"stopped": "step 9: not finite"}) == 0


def test_a_run_has_collapsed_if_it_ends_below_half_of_its_best_or_stopped():
    assert runs.collapsed(run_of(LAG, 0.4, 0.8, 0.39))
    assert not runs.collapsed(run_of(LAG, 0.4, 0.8, 0.41))
    assert runs.collapsed(run_of(LAG, 0.4, 0.8, stopped="step 9: not finite"))


def test_an_interval_is_students():
    # 1, 2 and 3 have the standard deviation 1. With two degrees of freedom t is 4.303,
    # and 4.303 / sqrt(3) = 2.484.
    assert runs.interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2.484), abs=1e-3)
    assert runs.format_interval([1.0, 2.0, 3.0], "+") == "+2.000 ± 2.484"
    assert runs.format_interval([0.5]) == "0.500"


def small_study():
    """Return runs of P3O and GRPO on two kinds of data; GRPO lacks one seed."""
    scores = {
        ("T = 1.4", "p3o"): (0.8, 0.6, 0.1),
        ("T = 1.4", "grpo 0.2"): (0.4, 0.4),
        ("lag 16", "p3o"): (0.9, 0.7),
        ("lag 16", "grpo 0.2"): (0.7, 0.7),
    }
    found = {}
    for (name, objective), by_seed in scores.items():
        for seed, score in enumerate(by_seed):
            cell = Cell(name, objective, LEARNING_RATE, seed)
            found[cell] = run_of(cell, 0.4, score, score, score)
    return found


def row_of(text, *begin):
    """Return the cells, by column, of the only row of a table with this beginning."""
    # The last cells may be empty.
    lines = [line[2:-2].split(" | ") for line in text.splitlines()]
    (row,) = [line for line in lines if line[: len(begin)] == list(begin)]
    return dict(zip(lines[0], row, strict=True))


def test_differences_are_taken_seed_by_seed_and_averaged_over_mismatches():
    row = row_of(
        report.table_of_differences(small_study(), plan.MISMATCHES), "grpo 0.2"
    )
    # Seed 0 has 0.4 and 0.2, with the mean 0.3; seed 1 has 0.2 and 0, with the mean
    # 0.1. The mean of both is 0.2. With one degree of freedom t is 12.706, and
    # 12.706 * 0.1414 / sqrt(2) = 1.271.
    assert row["P3O minus it"] == "+0.200 ± 1.271"
    # The means of the mismatches are 0.3 and 0.1.
    assert (row["mismatches"], row["P3O better"], row["seeds"]) == ("2", "2", "2")
    assert (row["least"], row["most"]) == ("+0.100", "+0.300")


def test_a_run_on_another_machine_is_compared_with_p3o_on_that_machine():
    found = small_study()
    cell = LAG._replace(objective="p3o on a GPU")
    found[cell] = run_of(cell, 0.4, 0.6, 0.6, 0.6)
    found[LAG._replace(objective="grpo 0.2")]["beside"] = cell.objective
    # Seed 0: 0.6 - 0.7, although P3O has 0.9 here. Seed 1: 0.7 - 0.7, as before.
    by_seed = report.differences(found, "grpo 0.2")["lag 16"]
    assert by_seed == pytest.approx({0: -0.1, 1: 0})
    # 0.9 - 0.6
    assert report.differences(found, cell.objective)["lag 16"][0] == pytest.approx(0.3)


def test_a_table_of_scores_has_greedy_accuracy_and_marks_a_collapse():
    row = row_of(report.table_of_scores(small_study()), "p3o")
    # (0.9 + 0.7) / 2 is the score, and run_of's greedy accuracy is half of it.
    assert row["lag 16"] == "0.80 / 0.40"
    # (0.8 + 0.6 + 0.1) / 3, and 0.1 is below half of 0.4.
    assert row["T = 1.4"] == "0.50 / 0.25 *"


def test_the_table_of_runs_has_every_measure():
    row = row_of(report.table_of_runs(small_study()), "lag 16", "0.0002", "grpo 0.2")
    assert row == {
        "mismatch": "lag 16",
        "learning rate": "0.0002",
        "objective": "grpo 0.2",
        "seeds": "2",
        "compared with P3O on a GPU": "0",
        "score": "0.700 ± 0.000",
        "P3O minus it": "0.100 ± 1.271",  # 0.9 - 0.7 and 0.7 - 0.7
        "sampled": "0.700 ± 0.000",
        "greedy": "0.350 ± 0.000",
        "entropy": "0.250 ± 0.000",
        "mean e_B": "0.333",  # of 0.5, 0.25 and 0.25
        "least e_B": "0.100",
        "mean of what replaces e_B": "0.667",  # of 0.8, 0.6 and 0.6
        "collapsed": "0",
    }


def test_the_drawn_weight_of_a_token_is_the_one_in_the_gradient():
    rho = report.LOG_RATIO.exp()
    # P3O has min(rho, e_B) A. GRPO has rho A, but 0 if rho > 1.2 and A > 0.
    for objective, advantage, weight in (
        (p3o, -2.0, -2 * rho.clamp(max=0.7)),
        (grpo, 1.5, 1.5 * rho * (rho <= 1.2)),
    ):
        found = report.weight_by_ratio(objective, advantage, e_b=0.7)
        torch.testing.assert_close(found, weight)


@pytest.mark.slow
def test_figures_are_drawn_from_whatever_runs_there_are(tmp_path):
    shown = [("lag 16", "lag 16", "heldout_pass@1"), ("e_B", "T = 1.6", "ess")]
    report.draw_by_step(small_study(), plan.MAIN, shown, tmp_path / "curves.png")
    report.draw_weights(tmp_path / "objectives.png")
    assert len(list(tmp_path.glob("*.png"))) == 2


# The committed runs


@cache
def embedded():
    return runs.read_runs(runs.RESULTS / "embedded.jsonl")


@cache
def front_page():
    """Return the runs of results/front_page, most of which are on the front page."""
    folder = runs.RESULTS / "front_page"
    smollm2 = runs.read_runs(folder / "smollm2.jsonl")
    return runs.read_runs(folder / "embedded.jsonl") | smollm2


def at_rate(every=None):
    return runs.select(every or embedded(), learning_rate=LEARNING_RATE)


@cache
def compared():
    """Return the runs of `make compare`."""
    return runs.read_runs(runs.RESULTS / "compare/compare.jsonl")


@cache
def on_cpu():
    """Return SmolLM2's runs on a CPU."""
    return runs.read_runs(runs.RESULTS / "smollm2.jsonl")


def smollm2():
    """Return SmolLM2's runs: on fresh data and with fp8 a CPU's, on others a GPU's."""
    on_gpu = runs.read_runs(runs.RESULTS / "gpu/smollm2.jsonl")
    kinds = ("on-policy, formulas", "fp8, formulas")
    return on_gpu | {c: run for c, run in on_cpu().items() if c.mismatch in kinds}


def on_formulas(every):
    """Return the runs on recipes/formulas, without the name of this task."""
    return {
        cell._replace(mismatch=cell.mismatch.removesuffix(", formulas")): run
        for cell, run in every.items()
        if cell.mismatch.endswith(", formulas")
    }


@pytest.mark.parametrize(
    "name",
    """embedded front_page/embedded front_page/smollm2 smollm2 gpu/smollm2
    smollm2_40_steps""".split(),
)
def test_the_committed_tables_are_those_of_the_committed_runs(name):
    path = runs.RESULTS / f"{name}.jsonl"
    page = report.embedded_page if "embedded" in name else report.table_of_runs
    assert path.with_suffix(".md").read_text() == page(runs.read_runs(path))


def front_page_configs():
    """Yield the config of each run on the front page, and of those beside them."""
    for name in "make_train", "smollm2_recipe":
        yield json.loads((runs.RESULTS / name / "config.json").read_text())
    for run in [*compared().values(), *front_page().values()]:
        yield run["config"]


def test_todays_train_py_accepts_the_config_of_each_run_on_the_front_page(tmp_path):
    path = tmp_path / "config.json"
    for config in front_page_configs():
        path.write_text(json.dumps(config))
        cfg = Config.from_flags([f"--config={path}"])
        # The run recorded every field, and its config.json gives each that value.
        recorded = {name: config[name] for name in Config.model_fields}
        assert cfg.model_dump() | {"out_dir": config["out_dir"]} == recorded


FRONT_ROWS = {
    "on-policy": "fresh",
    "T = 1.6": "rollouts at temperature 1.6",
    "fp8": "rollouts in fp8",
    "lag 16": "16 steps old",
    "16 updates": "4 passes, 16 updates",
}
FRONT_COLUMNS = ("p3o", "grpo 0.2", "reinforce")
CONSTANT = "p3o, e_B = 0.9"


def test_the_front_page_has_the_accuracies_and_e_b_of_make_train():
    first, *steps = read_metrics(runs.RESULTS / "make_train")
    for title, metric in ("sampled", "heldout_pass@1"), ("greedy", "heldout_greedy"):
        row = f"pass@1, {title} {first[metric]:.3f} {steps[-1][metric]:.3f}"
        assert says(FRONT, row)
    assert says(FRONT, "(e_B stays above 0.99):")
    assert min(row["ess_min"] for row in steps) > 0.99


def test_the_front_page_has_the_scores_of_the_committed_runs():
    # Without the stars of collapses, which the text below the table tells.
    scores = report.table_of_scores(at_rate(front_page())).replace(" *", "")
    for name, title in FRONT_ROWS.items():
        cells = [row_of(scores, objective)[name] for objective in FRONT_COLUMNS]
        assert says(FRONT, f"{title} | {' | '.join(cells)} |")


def lead(objective, mismatch, rate=LEARNING_RATE):
    """Return the mean of P3O's score minus this objective's, and half its interval."""
    every = runs.select(front_page(), learning_rate=rate)
    return runs.interval([*report.differences(every, objective)[mismatch].values()])


def repeats(objective, mismatch, rate=LEARNING_RATE):
    """Return the runs on a CPU that differ only by their seeds."""
    every = (embedded() | front_page()).items()
    return [run for cell, run in every if cell[:3] == (mismatch, objective, rate)]


def collapses(same):
    """Return how many of these runs collapsed, as text."""
    return f"{sum(map(runs.collapsed, same))} of {len(same)}"


def test_the_front_page_describes_the_figure_of_make_compare():
    p3o, grpo, reinforce = (
        compared()[LAG._replace(objective=name)] for name in FRONT_COLUMNS
    )
    step, _ = max(runs.series(reinforce, "heldout_pass@1"), key=lambda point: point[1])
    (end,) = {f"{runs.last(run, 'heldout_pass@1'):.2f}" for run in (p3o, grpo)}
    # Until step 16 the data are less than 16 steps old.
    e_b = mean(value for step, value in runs.series(p3o, "ess") if step > 16)
    kl, kl_half = lead("p3o, no KL", "lag 16")
    cap, cap_half = lead("p3o, no cap", "lag 16")
    sentences = f"""REINFORCE forgets the task from step {step} on. P3O and GRPO end at
        {end}. From step 17 on, P3O's e_B averages {e_b:.2f}, so the KL has weight
        {1 - e_b:.2f}. Yet over several seeds, dropping the KL costs P3O {kl:.2f} ±
        {kl_half:.2f} in accuracy, and dropping the cap {cap:.2f} ± {cap_half:.2f} (95%
        intervals)."""
    assert says(FRONT, sentences)


def test_the_pages_say_which_runs_collapse():
    found = [
        [collapses(repeats(objective, mismatch)) for objective in FRONT_COLUMNS]
        for mismatch in FRONT_ROWS
    ]
    assert found == [["0 of 5"] * 3] * 3 + [["0 of 5", "0 of 5", "5 of 5"]] * 2
    found = [
        collapses(repeats(objective, "16 updates", rate))
        for rate in (1e-4, 4e-4)
        for objective in FRONT_COLUMNS
    ]
    assert found == ["0 of 3", "0 of 3", "1 of 3"] + ["3 of 3"] * 3
    sentences = """**In the last two rows REINFORCE collapses (ends below half of its
        best sampled accuracy); P3O and GRPO do not.** With 16
        updates, collapse depends on the learning rate: of
        three runs per objective, one (REINFORCE) collapses at 1e-4, and all nine
        collapse at 4e-4. At 2e-4, a
        [variant](study/README.md#which-runs-collapse) that equals P3O up to rounding
        collapsed in two of three runs."""
    assert says(FRONT, sentences)
    assert collapses(repeats("p3o, KL at one heat", "16 updates")) == "2 of 3"
    p3o, grpo = (collapses(repeats(name, "32 updates")) for name in FRONT_COLUMNS[:2])
    assert says(PAGE, f"at 2e-4, P3O collapses in {p3o} runs, and GRPO 0.2 in {grpo}.")


def test_the_front_page_compares_p3o_with_grpo_and_with_a_constant():
    leads = {name: lead("grpo 0.2", name) for name in FRONT_ROWS}
    clear = {name: lead > 0 for name, (lead, half) in leads.items() if abs(lead) > half}
    assert clear == {"T = 1.6": True, "lag 16": True}
    greedy = {}
    for row in FRONT_ROWS:
        p3o, grpo, _ = (
            mean(runs.last(run, "heldout_greedy") for run in repeats(name, row))
            for name in FRONT_COLUMNS
        )
        greedy[row] = p3o - grpo
    assert [row for row in greedy if greedy[row] < 0] == ["lag 16"]
    sentences = f"""**P3O clearly leads GRPO only in sampled accuracy**, at temperature
        1.6 and on old data. In greedy accuracy it leads by at most
        {max(greedy.values()):.2f}; on old data GRPO leads by
        {-greedy["lag 16"]:.3f}."""
    assert says(FRONT, sentences)
    found = {name: lead(CONSTANT, name) for name in FRONT_ROWS}
    assert max(found.values()) == found["T = 1.6"]
    assert says(
        FRONT,
        f"""With three seeds, its lead in sampled accuracy is
        {-found["lag 16"][0]:.2f} on old data, {found["16 updates"][0]:.2f} ±
        {found["16 updates"][1]:.2f} with 16 updates, and
        {-found["T = 1.6"][0]:.2f} at temperature 1.6.""",
    )


def test_the_front_page_has_the_scores_with_smollm2():
    rate = plan.SMOLLM2_RATE
    leads = [
        -lead(name, "lag 16, formulas", rate)[0]
        for name in (CONSTANT, "sequence_mask", "dppo_tv", "vespo")
    ]
    sentence = f"""this constant and three [losses from frameworks](docs/frameworks.md)
        beat P3O by {min(leads):.2f} to {max(leads):.2f}."""
    assert says(FRONT, sentence)
    p3o, without_kl = (
        [runs.last(run, "heldout_pass@1") for run in repeats(name, "T = 1.2", rate)]
        for name in ("p3o", "p3o, no KL")
    )
    assert len(p3o) == len(without_kl) == 3
    sentence = f"""ended at sampled accuracy {max(p3o):.2f}. Three without the KL
        (`--objective study.ablations:cap_without_kl`) ended at {min(without_kl):.2f} to
        {max(without_kl):.2f}."""
    assert says(FRONT, sentence)


# The tables of the study's page. The first cell of a header says which runs the cells
# are about. A cell with several numbers has one for each of these selections.
SELECTIONS = {
    "score": lambda: [at_rate()],
    "score, seeds 0 to 2": lambda: [
        {cell: run for cell, run in at_rate().items() if cell.seed < 3}
    ],
    "score at 5e-5": lambda: [runs.select(embedded(), learning_rate=plan.RATE_AT_32)],
    "SmolLM2, formulas": lambda: [on_formulas(smollm2())],
    "SmolLM2 on a CPU": lambda: [on_formulas(on_cpu())],
    "SmolLM2, seed by seed": lambda: [
        runs.select(on_cpu(), seed=seed) for seed in range(3)
    ],
}
AVERAGES = {
    "P3O minus it, all 14": plan.MISMATCHES,
    "P3O minus it, breaking kinds": plan.BREAKING_KINDS,
}


@cache
def objectives():
    """Return all objectives that were run, by their names in lower case."""
    every = (*embedded(), *on_cpu(), *smollm2())
    return {cell.objective.lower(): cell.objective for cell in every}


def expected_cell(name, title, column):
    """Return what a cell should be, "" if it was not run.

    It is the mean score, with a star if any run collapsed, or P3O's score minus it.
    """
    # Such as A-3PO, `dppo_tv` and mean e_B of P3O.
    objective = objectives()[re.sub("mean e_B of |[`-]", "", title).lower()]
    if name == "collapsed runs":
        same = runs.select(embedded(), objective=objective, learning_rate=float(column))
        same = [run for cell, run in same.items() if cell.mismatch in plan.MISMATCHES]
        return collapses(same)
    if column in AVERAGES:
        if title == "P3O":
            return ""
        differences = report.table_of_differences(at_rate(), AVERAGES[column])
        return row_of(differences, objective)["P3O minus it"]
    if name == "P3O minus it":
        by_seed = report.differences(at_rate(), objective)[column]
        return runs.format_interval([*by_seed.values()], "+")
    cells = []
    for every in SELECTIONS[name]():
        same = runs.select(every, objective=objective, mismatch=column).values()
        if title == "mean e_B of P3O":
            means = [mean(ess for _, ess in runs.series(run, "ess")) for run in same]
            cells.append(f"{mean(means):.2f}")
        elif same:
            star = "*" * any(map(runs.collapsed, same))
            cells.append(f"{mean(map(runs.final_score, same)):.2f}{star}")
    return ", ".join(cells)


def test_every_cell_of_the_pages_tables_is_that_of_the_committed_runs():
    names, wrong = set(), []
    for text in re.findall(r"(?:^\|.*\n)+", PAGES, re.MULTILINE):
        header, _, *rows = [
            [cell.strip() for cell in line[1:-1].split("|")]
            for line in text.splitlines()
        ]
        if header[0] == "framework":  # Its numbers are intervals: see below.
            continue
        names.add(header[0])
        for title, *cells in rows:
            for column, cell in zip(header[1:], cells, strict=True):
                expected = expected_cell(header[0], title, column)
                if cell != expected:
                    wrong.append((header[0], title, column, cell, expected))
    assert wrong == []
    assert names == {*SELECTIONS, "collapsed runs", "P3O minus it"}


def test_the_page_says_how_far_runs_on_a_cpu_and_on_a_gpu_differ():
    on_gpu = runs.read_runs(runs.RESULTS / "gpu/smollm2.jsonl")
    gaps = [
        abs(runs.final_score(on_gpu[cell]) - runs.final_score(run))
        for cell, run in on_cpu().items()
        if cell in on_gpu
    ]
    sentence = f"differs between CPU and GPU by {mean(gaps):.2f} on average and"
    assert says(PAGE, f"{sentence} {max(gaps):.2f} at most")


def test_the_intervals_on_the_pages_are_in_the_tables():
    tables = "".join(path.read_text() for path in runs.RESULTS.rglob("*.md"))
    # The pages say in words which of two is above the other.
    values = re.sub(r"[+-]", "", tables)
    found = re.findall(r"\d\.\d+ ± \d\.\d+", " ".join(PAGES.split()))
    assert len(found) > 40
    assert [interval for interval in found if interval not in values] == []


def count_intervals(objectives):
    """Count the intervals of P3O minus these, those without 0, and those above 0."""
    found = [
        runs.interval(list(by_seed.values()))
        for objective in objectives
        for kind, by_seed in report.differences(at_rate(), objective).items()
        if kind in plan.MISMATCHES and len(by_seed) > 1
    ]
    clear = [middle for middle, half in found if abs(middle) > half]
    return len(found), len(clear), sum(middle > 0 for middle in clear)


def test_the_page_counts_the_intervals_that_exclude_0():
    rivals = {"a3po", "p3o, e_B of responses", "p3o, recent e_B", *plan.NEIGHBORS}
    # Remedies and other runs that the page counts nowhere. An objective with one seed
    # has no interval.
    apart = {"p3o, KL at one heat", "p3o, KL where signal", "p3o, step where signal"}
    apart |= {"p3o, e_B where signal", "p3o, raw log pi_b", "p3o on a GPU", *plan.RULES}
    others = {cell.objective for cell in at_rate()} - apart - rivals
    every, clear, above = count_intervals(others)
    assert says(PAGE, f"{every} intervals of the difference between P3O and another")
    assert says(PAGE, f"{clear} of them exclude 0, {above} in P3O's favor")
    every, clear, above = count_intervals(rivals)
    text = f"""Among {every} intervals for the neighbors and two other ways to measure
        e_B, {clear} exclude 0, {above} in P3O's favor."""
    assert says(PAGE, text)
