"""The mismatch laboratory: what it plans, how it runs, and how it sums up."""

import json
import math
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments import mismatch, plot, tables
from experiments.colors import COLORS
from experiments.mismatch import LEARNING_RATE, MAIN, MISMATCHES, OTHERS, Cell
from experiments.tables import Setting
from support.flags import parse_flags
from train import Config

# The plan


def row_of(cell, accuracies, **changes):
    """A line of mismatch.jsonl: a run with these sampled accuracies from step 0 on."""
    steps = [10 * number for number in range(len(accuracies))]
    greedy = [accuracy / 2 for accuracy in accuracies]
    line = {
        **cell._asdict(),
        "stopped": None,
        "pass@8": 0.9,
        "config": {"steps": steps[-1], "passes": 1, "minibatches": 1},
        "metrics": {
            "step": steps,
            "heldout_pass@1": list(accuracies),
            "heldout_greedy": greedy,
            "ess": [None] + [0.75] * (len(steps) - 1),
            "entropy": [None] + [0.25] * (len(steps) - 1),
        },
    }
    return line | changes


def done_with(cells, accuracy=0.9):
    """These cells with their lines, as mismatch.finished gives them."""
    return {cell: row_of(cell, [0.4] + 3 * [accuracy]) for cell in cells}


def test_the_score_is_the_mean_of_the_last_three_sampled_accuracies():
    cell = Cell("on-policy", LEARNING_RATE, "p3o", 0)
    # (0.6 + 0.7 + 0.8) / 3
    assert mismatch.score(row_of(cell, [0.1, 0.5, 0.6, 0.7, 0.8])) == pytest.approx(0.7)
    # Steps without an evaluation do not count.
    row = row_of(cell, [0.1, 0.6, 0.7, 0.8])
    row["metrics"]["heldout_pass@1"] = [0.1, 0.6, None, 0.7, None, 0.8]
    assert mismatch.score(row) == pytest.approx(0.7)
    assert mismatch.score(row | {"stopped": "step 9: not finite"}) == 0


def test_the_full_grid_begins_with_the_rates_and_the_first_seed_of_main_everywhere():
    # As long as it is not known where it breaks, nothing else is planned.
    rates = mismatch.plan("learning_rate", done={})
    first_seeds = [
        Cell(name, LEARNING_RATE, objective, 0)
        for name in MISMATCHES
        for objective in MAIN
    ]
    # P3O on-policy at the rate that was chosen is one of both.
    assert mismatch.plan("full", done={}) == rates + first_seeds[1:]
    assert first_seeds[0] in rates


def test_the_others_run_with_three_seeds_where_one_of_three_objectives_breaks():
    done = done_with(mismatch.plan("full", done={}))
    # REINFORCE is 0.11 below itself on-policy at lag 16. That k3 is at lag 4 does not
    # count.
    for name, objective in (("lag 16", "reinforce"), ("lag 4", "p3o, k3")):
        cell = Cell(name, LEARNING_RATE, objective, 0)
        done[cell] = row_of(cell, [0.4, 0.79, 0.79, 0.79])
    assert mismatch.where_it_breaks(done) == ["lag 16"]
    others = [cell for cell in mismatch.plan("full", done) if cell.objective in OTHERS]
    # Of these one runs at T = 1.6 too, wherever it breaks.
    clamped = [cell for cell in others if cell.mismatch == "T = 1.6"]
    assert [(cell.objective, cell.seed) for cell in clamped] == [
        ("p3o, clamped k3", seed) for seed in range(3)
    ]
    others = [cell for cell in others if cell not in clamped]
    assert {cell.mismatch for cell in others} == {"lag 16"}
    assert {cell.seed for cell in others} == {0, 1, 2}
    # Raw log pi_b is P3O itself at temperature 1, decoupled is CISPO at one update.
    objectives = {cell.objective for cell in others}
    assert objectives == {*OTHERS} - {*mismatch.ONLY_IN}


def test_the_main_objectives_run_with_five_seeds_where_it_breaks_and_three_elsewhere():
    done = done_with(mismatch.plan("full", done={}))
    cell = Cell("lag 16", LEARNING_RATE, "reinforce", 0)
    done[cell] = row_of(cell, [0.4, 0.79, 0.79, 0.79])
    cells = set(mismatch.plan("full", done))
    for name in MISMATCHES:
        seeds = 5 if name == "lag 16" else 3
        for objective in MAIN:
            planned = {
                cell.seed
                for cell in cells
                if (cell.mismatch, cell.objective) == (name, objective)
            }
            assert planned == set(range(seeds))


def test_no_cell_is_planned_twice_and_every_planned_one_has_flags(tmp_path):
    done = done_with(mismatch.plan("full", done={}), accuracy=0.5)
    # On-policy is better: all others break.
    on_policy = [Cell("on-policy", LEARNING_RATE, objective, 0) for objective in MAIN]
    done |= done_with(on_policy, accuracy=0.9)
    cells = mismatch.plan("full", done)
    assert len(cells) == len(set(cells))
    # What the fixed and the yoked e_B are taken from comes before them.
    done |= done_with(cell for cell in cells if cell.objective == "p3o")
    for cell in cells:
        script, *flags = mismatch.flags_of(cell, done, tmp_path)
        assert (mismatch.ROOT / script).exists()
        assert f"--seed={cell.seed}" in flags
        assert f"--learning_rate={cell.learning_rate}" in flags


def test_the_control_of_small_batches_has_those_of_4_minibatches_and_all_are_fresh():
    def config_of(name):
        _, *flags = mismatch.flags_of(Cell(name, LEARNING_RATE, "p3o", 0), {}, None)
        return parse_flags(Config, flags)

    control, four = config_of("small batches"), config_of("4 minibatches")
    # One optimizer step on what was just sampled, 4 prompts at a time.
    assert (control.passes, control.minibatches, control.lag) == (1, 1, 0)
    assert control.prompts_per_step == 4 == four.prompts_per_step / four.minibatches
    # As many of them in the run, and between two evaluations.
    assert control.steps == four.steps * four.minibatches
    assert control.eval_every == four.eval_every * four.minibatches


def test_controls_run_with_the_objectives_that_decide_and_are_no_mismatch():
    done = done_with(mismatch.plan("full", done={}))
    cells = [c for c in mismatch.plan("full", done) if c.mismatch in mismatch.CONTROLS]
    assert len(cells) == len(mismatch.CONTROLS) * 3 * 3  # objectives, seeds
    # However badly they do, nothing else is planned for it.
    done |= done_with(cells, accuracy=0.0)
    assert mismatch.where_it_breaks(done) == []
    runs = {
        Setting(name, LEARNING_RATE): {
            "p3o": [row_of(Cell(name, LEARNING_RATE, "p3o", 0), 3 * [score])],
            "grpo 0.2": [row_of(Cell(name, LEARNING_RATE, "grpo 0.2", 0), 3 * [0.5])],
        }
        for name, score in (("lag 4", 0.6), ("small batches", 0.9))
    }
    # The pooled difference is that of lag 4 alone; the control has its own table.
    assert "| grpo 0.2 | 1 | 1 | 1 | 0 | +0.100 |" in tables.table_of_differences(runs)


def test_a_fixed_e_b_is_the_mean_of_p3os_own_run_and_waits_for_it(tmp_path):
    cell = Cell("lag 16", LEARNING_RATE, "p3o, fixed e_B", 1)
    with pytest.raises(KeyError):
        mismatch.flags_of(cell, {}, tmp_path)
    own = cell._replace(objective="p3o")
    row = row_of(own, [0.4, 0.9, 0.9])
    row["metrics"]["ess"] = [None, 1.0, 0.5]  # no update before step 1; mean 0.75
    flags = mismatch.flags_of(cell, {own: row}, tmp_path)
    assert flags[-2:] == ["--objective_args", "level=0.7500"]


def test_a_yoked_e_b_is_that_of_the_next_seed_update_by_update(tmp_path):
    cell = Cell("16 updates", LEARNING_RATE, "p3o, yoked e_B", 2)
    other = cell._replace(objective="p3o", seed=0)  # after seed 2 of 0, 1, 2
    row = row_of(other, [0.4, 0.9, 0.9])
    row["metrics"]["ess"] = [None, 0.5, 0.25]
    row["config"] |= {"passes": 1, "minibatches": 2}  # two updates a step
    flags = mismatch.flags_of(cell, {other: row}, tmp_path)
    path = flags[-1].removeprefix("path=")
    assert json.loads(open(path).read()) == [0.5, 0.5, 0.25, 0.25]


def test_torchrun_gives_a_process_its_share_of_the_cells_and_of_the_machine():
    code = (
        "import os\n"
        "from experiments.mismatch import share_of_machine\n"
        "print(*share_of_machine(), os.environ['CUDA_VISIBLE_DEVICES'],\n"
        "      len(os.sched_getaffinity(0)), 'RANK' in os.environ)"
    )
    # Rank 3 of 4, the second of two on its node: GPU 6 of 5 and 6, half of the cores.
    environment = os.environ | {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "5,6",
    }
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=mismatch.ROOT,
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    assert printed.split() == ["3", "4", "6", str(cores), "False"]


# Running it


@pytest.fixture
def grid(monkeypatch, tmp_path):
    """mismatch.main() on three cells, without training; returns what it would run."""
    names = ("on-policy", "T = 1.4", "lag 16")
    cells = [Cell(name, LEARNING_RATE, "p3o", 0) for name in names]
    ran = []
    fails = []

    def run(cell, flags, eval_flags):
        ran.append(cell.mismatch)
        if cell.mismatch in fails:
            raise RuntimeError("train.py failed: no memory")
        return row_of(cell, [0.5, 0.6, 0.6]) | {"seconds": 1.0}

    def main(failing=(), share=(0, 1)):
        fails[:] = failing
        ran.clear()
        # Not of this process, whose environment other tests need.
        monkeypatch.setattr(mismatch, "share_of_machine", lambda: share)
        monkeypatch.setattr(sys, "argv", ["mismatch.py", "--folder", str(tmp_path)])
        # A process of two waits for the other's runs; here there is no other.
        monkeypatch.setattr(mismatch.time, "sleep", stop)
        try:
            mismatch.main()
        except Waiting:
            pass
        return list(ran)

    class Waiting(Exception):
        pass

    def stop(seconds):
        raise Waiting

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mismatch, "plan", lambda grid, done: cells)
    monkeypatch.setattr(mismatch, "run", run)
    monkeypatch.setattr(mismatch.signal, "signal", lambda *_: None)
    return main


def test_a_run_that_has_its_line_is_not_run_again(grid):
    assert grid() == ["on-policy", "T = 1.4", "lag 16"]
    assert grid() == []


def test_the_shares_of_two_processes_are_disjoint_and_make_up_the_grid(grid):
    assert grid(share=(1, 2)) == ["T = 1.4"]
    assert grid(share=(0, 2)) == ["on-policy", "lag 16"]


def test_a_line_that_was_cut_short_is_replaced(grid, tmp_path):
    grid()
    file = tmp_path / "mismatch.jsonl"
    file.write_text(file.read_text()[:-20])  # killed while it wrote the third
    assert grid() == ["lag 16"]
    names = [json.loads(line)["mismatch"] for line in open(file)]
    assert names == ["on-policy", "T = 1.4", "lag 16"]


def test_a_run_that_fails_keeps_no_other_from_running(grid, capsys):
    with pytest.raises(SystemExit, match="1 runs failed"):
        grid(failing=["T = 1.4"])
    assert "no memory" in capsys.readouterr().err
    assert grid() == ["T = 1.4"]


# Summing it up


def test_an_interval_is_students():
    # 1, 2, 3: mean 2, standard deviation 1; 4.303 is t of two degrees of freedom;
    # 4.303 / sqrt(3) = 2.484
    assert tables.interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2.484, 3), abs=1e-3)
    # 0, 1: standard deviation sqrt(1/2); 12.706 of one degree; half is 12.706 / 2
    assert tables.interval([0.0, 1.0]) == pytest.approx((0.5, 6.353, 2), abs=1e-3)
    assert math.isnan(tables.interval([0.5]).half)
    assert tables.text_of(tables.interval([0.5])) == "0.500"


def test_an_interval_excludes_zero_if_its_mean_is_further_away_than_its_half():
    assert tables.interval([1.0, 1.1, 1.2]).excludes_zero()
    assert tables.interval([-1.0, -1.1, -1.2]).excludes_zero()
    assert not tables.interval([-1.0, 1.0, 1.5]).excludes_zero()
    assert not tables.interval([1.0]).excludes_zero()  # one run tells nothing


def test_a_run_has_collapsed_below_half_of_its_own_best_or_if_it_stopped():
    cell = Cell("T = 1.4", LEARNING_RATE, "p3o", 0)
    assert tables.collapsed(row_of(cell, [0.4, 0.8, 0.39]))
    assert not tables.collapsed(row_of(cell, [0.4, 0.8, 0.41]))
    # The policy before training counts: 0.19 is below half of 0.4.
    assert tables.collapsed(row_of(cell, [0.4, 0.3, 0.19]))
    assert tables.collapsed(row_of(cell, [0.4, 0.8], stopped="step 9: not finite"))


@pytest.fixture
def some_runs(tmp_path):
    """A grid that has begun: seeds are missing, a setting is, one run stopped."""
    hot = ("T = 1.4", LEARNING_RATE)
    lag = ("lag 16", LEARNING_RATE)
    scores = {
        Cell(*hot, "p3o", 0): 0.8,
        Cell(*hot, "p3o", 1): 0.6,
        Cell(*hot, "p3o", 2): 0.7,
        Cell(*hot, "p3o", 3): 0.1,  # a seed that the others do not have
        Cell(*hot, "grpo 0.2", 1): 0.2,
        Cell(*hot, "grpo 0.2", 0): 0.4,
        Cell(*hot, "grpo 0.2", 2): 0.3,
        Cell(*hot, "gspo", 0): 0.9,
        Cell(*lag, "p3o", 0): 0.9,
        Cell(*lag, "grpo 0.2", 0): 0.7,
        Cell("on-policy", 1e-3, "p3o", 0): 0.5,  # a rate that was only tried
    }
    rows = [row_of(cell, [0.4] + 3 * [score]) for cell, score in scores.items()]
    stopped = row_of(Cell(*hot, "reinforce", 0), [0.4, 0.6])
    rows.append(stopped | {"stopped": "step 11: not finite", "pass@8": None})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "mismatch.jsonl").write_text(text + '{"mismatch": "T = 1')  # cut short
    return tmp_path


def row_in(text, heading, objective):
    """The cells of an objective's row in the table below a heading."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (found,) = [row for row in rows if row[0] == objective]
    return dict(zip(rows[0], found, strict=True))


def test_settings_come_in_the_order_of_the_plan_and_tried_rates_last(some_runs):
    runs = tables.load(some_runs / "mismatch.jsonl")
    assert [setting.title for setting in runs] == [
        "T = 1.4",
        "lag 16",
        "on-policy, learning rate 0.001",
    ]
    assert list(runs[Setting("T = 1.4", LEARNING_RATE)]) == [
        "p3o",
        "grpo 0.2",
        "reinforce",
        "gspo",
    ]


def test_the_table_of_a_setting_has_every_measure_with_its_interval(some_runs):
    text = tables.report(tables.load(some_runs / "mismatch.jsonl"))
    p3o = row_in(text, "T = 1.4", "p3o")
    # 0.8, 0.6, 0.7, 0.1: mean 0.55, standard deviation 0.311, and 3.182 * 0.311 / 2
    assert p3o["seeds"] == "4"
    assert p3o["score"] == "0.550 ± 0.495"
    assert p3o["sampled"] == "0.550 ± 0.495"
    assert p3o["greedy"] == "0.275 ± 0.247"  # row_of: half of the sampled one
    assert p3o["pass@8"] == "0.900 ± 0.000"
    assert p3o["entropy"] == "0.250 ± 0.000"
    assert p3o["collapsed"] == "**1 of 4**"  # 0.1 is below half of 0.4
    assert p3o["P3O minus it"] == ""
    reinforce = row_in(text, "T = 1.4", "reinforce")
    assert reinforce["score"] == "0.000"  # it stopped itself
    assert reinforce["collapsed"] == "**1 of 1**"
    assert reinforce["pass@8"] == ""


def test_differences_are_taken_seed_by_seed(some_runs):
    text = tables.report(tables.load(some_runs / "mismatch.jsonl"))
    # 0.8 - 0.4, 0.6 - 0.2, 0.7 - 0.3 are 0.4 each, whatever the order of the lines,
    # and P3O's fourth seed has nothing to be compared with.
    assert row_in(text, "T = 1.4", "grpo 0.2")["P3O minus it"] == "+0.400 ± 0.000"
    assert row_in(text, "T = 1.4", "gspo")["P3O minus it"] == "-0.100"


def test_the_pooled_differences_are_over_the_means_of_the_settings(some_runs):
    text = tables.report(tables.load(some_runs / "mismatch.jsonl"))
    heading = "P3O's score less that of another objective, over all settings"
    grpo = row_in(text, heading, "grpo 0.2")
    assert (grpo["settings"], grpo["comparisons"]) == ("2", "4")
    assert (grpo["P3O better"], grpo["worse"]) == ("4", "0")
    # Means 0.4 and 0.9 - 0.7 = 0.2: mean 0.3, standard deviation 0.1414, and
    # 12.706 * 0.1414 / sqrt(2) = 1.271
    assert grpo["mean of the settings"] == "+0.300 ± 1.271"
    assert (grpo["least"], grpo["most"]) == ("+0.200", "+0.400")
    gspo = row_in(text, heading, "gspo")
    assert (gspo["P3O better"], gspo["worse"]) == ("0", "1")
    # One difference has several seeds: GRPO's at T = 1.4, which is 0.4 each time.
    assert "have 1 intervals of such differences, of which 1 exclude 0" in text
    assert "about 0.1 of 1 would" in text  # 5% of one


def test_differences_are_told_apart_by_whether_a_mismatch_breaks(tmp_path):
    # GRPO loses 0.2 at a lag of 16, and nothing elsewhere.
    scores = {
        Cell("on-policy", LEARNING_RATE, "p3o", 0): 0.9,
        Cell("on-policy", LEARNING_RATE, "grpo 0.2", 0): 0.9,
        Cell("T = 1.4", LEARNING_RATE, "p3o", 0): 0.9,
        Cell("T = 1.4", LEARNING_RATE, "grpo 0.2", 0): 0.8125,
        Cell("lag 16", LEARNING_RATE, "p3o", 0): 0.9,
        Cell("lag 16", LEARNING_RATE, "grpo 0.2", 0): 0.7,
    }
    rows = [row_of(cell, [0.4] + 3 * [score]) for cell, score in scores.items()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "mismatch.jsonl").write_text(text)
    text = tables.report(tables.load(tmp_path / "mismatch.jsonl"))
    there = row_in(text, "The same where it breaks: lag 16", "grpo 0.2")
    assert (there["settings"], there["mean of the settings"]) == ("1", "+0.200")
    elsewhere = row_in(text, "The same elsewhere", "grpo 0.2")
    assert (elsewhere["settings"], elsewhere["most"]) == ("2", "+0.088")
    # Greedy accuracy is half of the sampled one in these rows: 0.1, 0.04375 and 0.
    heading = "The same of the last greedy accuracy, over all settings"
    assert row_in(text, heading, "grpo 0.2")["most"] == "+0.100"


def test_the_table_of_other_objectives_has_each_seed_with_a_star_at_a_collapse(
    some_runs,
):
    text = tables.report(tables.load(some_runs / "mismatch.jsonl"))
    heading = "Scores of the other objectives, seed by seed"
    # No other objective ran at a lag of 16. The last run of P3O ended at 0.1.
    assert row_in(text, heading, "p3o") == {
        "objective": "p3o",
        "T = 1.4": "0.80, 0.60, 0.70, 0.10 *",
    }
    assert row_in(text, heading, "gspo")["T = 1.4"] == "0.90"


def test_figures_and_tables_are_made_of_whatever_runs_there_are(some_runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plot.py", str(some_runs)])
    plot.main()
    figures = {path.stem for path in some_runs.glob("*.png")}
    assert figures == {"scores", "greedy", "curves", "ess", "others"}
    assert (some_runs / "mismatch.md").read_text().startswith("# The mismatch")


def test_one_run_alone_makes_figures_where_nothing_is_compared(tmp_path, monkeypatch):
    row = row_of(Cell("on-policy", LEARNING_RATE, "p3o", 0), [0.4, 0.9, 0.9, 0.9])
    (tmp_path / "mismatch.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path)])
    plot.main()
    assert {path.stem for path in tmp_path.glob("*.png")} == {"scores", "greedy"}
    assert "No setting has two seeds" in (tmp_path / "mismatch.md").read_text()


def test_without_runs_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="has no runs"):
        plot.main()


def test_every_run_of_a_panel_is_a_dot_at_its_score(some_runs):
    runs = tables.load(some_runs / "mismatch.jsonl")
    figure, axis = plot.plt.subplots()
    temperatures = plot.PANELS[0]
    plot.draw_panel(axis, temperatures, runs, mismatch.score)
    dots = [
        (round(float(x)), round(float(y), 3))
        for collection in axis.collections
        if isinstance(collection, plot.plt.matplotlib.collections.PathCollection)
        for x, y in collection.get_offsets()
    ]
    plot.plt.close(figure)
    # T = 1.4 is the fifth of the temperatures. gspo is not one of MAIN.
    expected = [0.8, 0.6, 0.7, 0.1, 0.4, 0.2, 0.3, 0.0]
    assert sorted(dots) == sorted((4, score) for score in expected)


def test_the_settings_drawn_by_step_are_the_six_where_objectives_differ_most():
    runs = {}
    for number in range(8):  # apart by 0.0, 0.1, ..., 0.7
        setting = Setting(f"setting {number}", LEARNING_RATE)
        cells = [Cell(*setting, objective, 0) for objective in ("p3o", "grpo 0.2")]
        runs[setting] = {
            "p3o": [row_of(cells[0], 4 * [0.8])],
            "grpo 0.2": [row_of(cells[1], 4 * [0.8 - number / 10])],
        }
    alone = Setting("P3O alone", LEARNING_RATE)
    runs[alone] = {"p3o": [row_of(Cell(*alone, "p3o", 0), 4 * [0.1])]}
    chosen = plot.most_different(runs, list(MAIN))
    assert [setting.mismatch for setting in chosen] == [
        f"setting {number}" for number in range(2, 8)
    ]


def test_every_mismatch_is_in_a_panel_and_every_objective_has_a_color():
    drawn = {name for panel in plot.PANELS for name in panel.label_of}
    assert drawn == {*MISMATCHES}
    assert {*MAIN, *OTHERS} <= COLORS.keys()
    # Two that stand in one figure are never the same.
    assert len({COLORS[name] for name in [*MAIN, *OTHERS]}) == len({*MAIN, *OTHERS})


# What is committed

RESULTS = ROOT / "experiments/results"


@pytest.fixture(scope="module")
def committed():
    return tables.load(RESULTS / "mismatch.jsonl")


def test_the_committed_tables_are_those_of_the_committed_runs(committed):
    assert (RESULTS / "mismatch.md").read_text() == tables.report(committed)


def test_the_page_has_the_table_of_other_objectives(committed):
    page = (ROOT / "experiments/README.md").read_text()
    assert tables.table_of_others(committed) in page


@pytest.mark.parametrize("page", ["README.md", "experiments/README.md"])
def test_every_row_of_a_pages_table_is_that_of_the_committed_runs(page, committed):
    rows = tables.table_of_scores(committed, list(MISMATCHES)).splitlines()
    text = (ROOT / page).read_text()
    # Its cells are "score / greedy", which no other table has.
    shown = [line for line in text.splitlines() if line.count(" / ") >= len(MAIN)]
    of_mismatches = [
        line for line in shown if line.split(" | ")[0].removeprefix("| ") in MISMATCHES
    ]
    assert len(of_mismatches) >= 6
    for line in of_mismatches:
        assert line in rows
