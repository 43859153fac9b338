"""The benchmark's arithmetic, and its page: that of the committed numbers."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT

from experiments import steps
from experiments.bench_tables import (
    GOALS,
    cell,
    falls_short,
    format_number,
    numbers_of,
    report,
    table_of_goals,
    table_of_numbers,
)
from experiments.speed import in_turn, ratios
from experiments.threads import bind_threads, computing_threads, free_threads
from reward import load_task
from train import Config, problem_numbers

RESULTS = ROOT / "experiments/results"


def test_what_is_compared_runs_in_turn_and_none_of_it_is_always_first():
    order = []
    acts = {name: partial(order.append, name) for name in "abc"}
    seconds = in_turn(3, **acts)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    # The first turn is not counted.
    assert [len(of_act) for of_act in seconds.values()] == [3, 3, 3]


def test_a_ratio_is_the_median_of_the_ratios_of_the_turns():
    # 2 / 1, 6 / 2 and 4 / 4. The ratio of the medians would be 4 / 2.
    spread = ratios([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    assert spread == {"median": 2.0, "least": 1.0, "most": 3.0}


def test_the_steps_of_all_rounds_are_one_sample():
    rounds = [
        {"seconds": [1.0, 2.0], "sync": [0.1, 0.4], "tokens of a response": 10.0},
        {"seconds": [3.0, 4.0], "sync": [0.9, 2.0], "tokens of a response": 30.0},
    ]
    found = steps.summary(rounds)
    assert found["seconds"] == {"median": 2.5, "least": 1.0, "most": 4.0}
    assert found["sync"] == {"median": 0.65, "least": 0.1, "most": 2.0}
    assert found["tokens of a response"] == 20.0
    # Step by step: 0.1 / 1, 0.4 / 2, 0.9 / 3, 2 / 4, so 0.1, 0.2, 0.3, 0.5.
    expected = {"median": 0.25, "least": 0.1, "most": 0.5}
    assert found["share of the sync"] == pytest.approx(expected)


def test_a_step_lasts_from_a_line_to_the_next_one():
    lines = [(10.0, "step 0"), (11.5, "step 1"), (14.0, "step 2")]
    assert steps.seconds_between(lines) == [1.5, 2.5]


def test_the_lines_of_steps_are_those_that_begin_so_and_come_as_they_are_printed():
    code = "import time; print('hello'); print('step 1', flush=True)"
    code += "; time.sleep(1); print('step 2')"
    lines = steps.lines_of([sys.executable, "-c", code])
    assert [line for _, line in lines] == ["step 1\n", "step 2\n"]
    assert steps.seconds_between(lines)[0] > 0.5


def test_a_command_that_fails_says_why():
    code = "import sys; print('RuntimeError: no memory', file=sys.stderr); sys.exit(3)"
    with pytest.raises(steps.Failed, match="RuntimeError: no memory"):
        steps.lines_of([sys.executable, "-c", code])
    with pytest.raises(steps.Failed, match="exit status 3"):
        steps.lines_of([sys.executable, "-c", "import sys; sys.exit(3)"])


def test_ratios_are_of_the_medians_of_a_round():
    medians = {
        steps.ALL_CORES: [1.5, 1.5],
        steps.TWO_RANKS: [1.0, 2.0],
        steps.ONE_CORE: [1.8, 3.0],  # 1.8 and 1.5 times as long
        steps.HALF_THE_BATCH: [0.9, 1.6],  # 0.9 and 0.8
        "Smol, float32": [2.0, 3.0],
        "TRL with vllm, float32": [4.0, 12.0],  # ours takes 0.5 and 0.25 of it
    }
    pairs = steps.SCALING | steps.pairs_beside_trl(list(medians), "Smol")
    found = steps.compare(medians, pairs)
    cores, strong, weak, ours = (ratio["median"] for ratio in found.values())
    assert cores == pytest.approx(1.6)  # 1.2 and 2 times as long
    assert strong == pytest.approx(1.65)
    assert weak == pytest.approx(0.85)
    assert ours == pytest.approx(0.375)
    # An arm that failed has no seconds, and keeps the others from nothing.
    del medians[steps.ONE_CORE]
    assert list(steps.compare(medians, pairs)) == list(found)[2:]


def test_what_the_lines_of_trl_tell_of_the_steps_that_are_counted():
    # Neither the first two steps count, nor the last one.
    tells = [
        (0.0, "step 1 tokens 9.0 rollout 7.0 sync 1.0"),
        (1.0, "step 2 tokens 9.0 rollout 7.0 sync 1.0"),
        (4.0, "step 3 tokens 30.0 rollout 0.5 sync 0.1"),
        (6.0, "step 4 tokens 40.0 rollout 0.7 sync 0.3"),
        (16.0, "step 5 tokens 9.0 rollout 7.0 sync 1.0"),
    ]
    assert steps.trl_steps(tells) == {
        "seconds": [3.0, 2.0],
        "rollout": [0.5, 0.7],
        "sync": [0.1, 0.3],
        "tokens of a response": 35.0,
    }


def test_trl_has_the_prompts_of_our_run_in_their_order():
    cfg = Config(**steps.SIZES["cpu"])
    said = steps.prompts_of_run(cfg, steps=2)
    problems = load_task(cfg.task, "train")
    numbers = [
        number
        for step in (1, 2)
        for number in problem_numbers(cfg, step, len(problems))
    ]
    assert len(said) == 2 * cfg.prompts_per_step == len(numbers)
    for text, number in zip(said, numbers, strict=True):
        assert text.endswith(problems[number]["prompt"])


def test_an_arm_that_failed_has_no_seconds_and_is_not_tried_again(monkeypatch):
    tried = []

    def fails():
        tried.append("TRL")
        raise steps.Failed("ImportError: no vLLM")

    def works():
        return {"seconds": [2.0]}

    arms = {"Smol, float32": works, "TRL with vllm, float32": fails}
    monkeypatch.setattr(steps, "arms_of_model", lambda model, trl: arms)
    found = steps.measure_steps("Smol", trl=True)
    assert found["failed"] == {"TRL with vllm, float32": "ImportError: no vLLM"}
    assert list(found["arms"]) == ["Smol, float32"]
    assert tried == ["TRL"]


def test_bound_threads_have_a_core_each_until_they_are_free_again():
    cores = sorted(os.sched_getaffinity(0))
    count = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    try:
        threads = computing_threads()
        bind_threads(threads, cores)
        assert [os.sched_getaffinity(thread) for thread in threads] == [
            {core} for core in cores
        ]
        # They are still those that compute.
        assert set(computing_threads()) == set(threads)
        free_threads(cores)
        for thread in threads:
            assert os.sched_getaffinity(thread) == set(cores)
    finally:
        free_threads(cores)
        torch.set_num_threads(count)


@pytest.mark.parametrize(
    "value, text", [(0.01234, "0.0123"), (12.345, "12.3"), (1234.5, "1,234")]
)
def test_a_number_has_three_digits(value, text):
    assert format_number(value) == text


def test_a_cell_is_the_median_with_the_least_and_the_most():
    spread = {"median": 1.0, "least": 0.5, "most": 2.0}
    assert cell(spread) == "1 [0.5, 2]"


def test_the_median_decides_whether_a_goal_is_met():
    spread = {"median": 0.33, "least": 0.2, "most": 0.5}
    assert not falls_short(spread, "at most", 0.33)
    assert falls_short(spread, "at most", 0.32)
    assert not falls_short(0.97, "at least", 0.97)
    assert falls_short(0.96, "at least", 0.97)
    # Neither without a goal nor without a measurement.
    assert not falls_short(spread, "", 0.0)
    assert not falls_short(None, "at most", 0.33)


def rows_of(table: str) -> dict[str, list[str]]:
    """The cells of each row of a Markdown table, by its title."""
    rows = {}
    for line in table.splitlines()[2:]:
        title, *cells = (text.strip() for text in line.strip("|").split("|"))
        rows[title] = cells
    return rows


def test_each_goal_has_a_row_and_what_misses_it_is_bold():
    results = json.loads((RESULTS / "bench.json").read_text())
    rows = rows_of(table_of_goals(results))
    for title, (side, bound) in GOALS.items():
        values = [
            numbers_of(column, results)[title] for column in results["speed"]["models"]
        ]
        assert any(value is not None for value in values)  # "failed" is told too
        for value, text in zip(values, rows[title][1:], strict=True):  # after the goal
            assert text.startswith("**") == falls_short(value, side, bound)


def test_a_quantity_is_in_one_of_the_two_tables():
    results = json.loads((RESULTS / "bench.json").read_text())
    with_goal = rows_of(table_of_goals(results)).keys()
    without = rows_of(table_of_numbers(results)).keys()
    assert with_goal.isdisjoint(without)
    for column in results["speed"]["models"]:
        for title, value in numbers_of(column, results).items():
            assert value is None or title in with_goal | without


def test_the_committed_page_is_that_of_the_committed_numbers():
    results = json.loads((RESULTS / "bench.json").read_text())
    assert (RESULTS / "bench.md").read_text() == report(results)
    assert table_of_goals(results) in (ROOT / "experiments/README.md").read_text()


@pytest.mark.slow  # a process with engines of its own
def test_the_command_measures_a_part_and_keeps_the_others(tmp_path):
    head = json.loads((RESULTS / "bench.json").read_text())["head"]
    out = tmp_path / "bench.json"
    out.write_text(json.dumps({"head": head}))
    script = ROOT / "experiments/bench.py"
    flags = ["--parts", "threads", f"--out={out}"]
    subprocess.run([sys.executable, script, *flags], check=True)
    results = json.loads(out.read_text())
    assert results["head"] == head
    models = results["threads"]["models"]
    # There is nothing to bind on a single core.
    columns = {"tiny, float32", "tiny, bfloat16"}
    assert set(models) == (columns if len(os.sched_getaffinity(0)) > 1 else set())
    for ratios_of_act in models.values():
        assert ratios_of_act["rollout"]["least"] > 0
        assert ratios_of_act["gradient"]["least"] > 0
    page = out.with_suffix(".md").read_text()
    assert f"- the head: `python {head['command']}`" in page
    assert f"- threads: `python {script} {' '.join(flags)}`" in page
