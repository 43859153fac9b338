"""The soak's arithmetic: when it kills, what it compares, and the slope of memory."""

import json
from pathlib import Path

import pytest
from conftest import ROOT

from experiments.soak import (
    first_difference,
    last_step,
    means_of_100_steps,
    moments,
    slope_of,
)


def test_the_kills_are_a_function_of_the_seed_and_come_when_there_is_a_checkpoint():
    kills = moments(seed=0, steps=200, kills=20, save_every=10)
    assert kills == moments(seed=0, steps=200, kills=20, save_every=10)
    assert kills != moments(seed=1, steps=200, kills=20, save_every=10)
    steps = [kill.step for kill in kills]
    assert steps == sorted(set(steps))
    assert len(steps) == 20
    assert steps[0] > 10
    assert steps[-1] < 200


def test_the_slope_of_memory_is_that_after_a_step_with_an_interval_around_it():
    # 1,000 MB and 0.02 MB a step; in each block of steps twice 5 MB more or less. The
    # first tenth of the steps has another slope.
    notes = []
    for step in range(1, 1001):
        resident = 1000 + 0.02 * step + 5 * (-1) ** (step // 20)
        if step < 100:
            resident = 10 * step
        notes.append({"step": step, "resident": resident * 2**20})
    slope = slope_of(notes, first=100)
    assert slope["low"] < 20 < slope["high"]
    assert slope["mb_per_1000_steps"] == pytest.approx(20, abs=3)
    assert slope["intercept_mb"] == pytest.approx(1000, abs=3)


def test_memory_is_also_told_by_100_steps():
    notes = [{"step": step, "resident": step * 2**20} for step in range(201)]
    # The means of 1 to 100 and of 101 to 200.
    assert means_of_100_steps(notes) == [50.5, 150.5]


def write_metrics(out: Path, rows: list[dict]) -> None:
    out.mkdir()
    lines = [json.dumps(row) + "\n" for row in rows]
    (out / "metrics.jsonl").write_text("".join(lines))


def test_runs_are_the_same_if_their_metrics_are_but_for_seconds_and_memory(tmp_path):
    row = {"step": 1, "reward": 0.5, "update_seconds": 1.5, "peak_memory_gb": 1.0}
    alone, same, other, short = (tmp_path / name for name in "abcd")
    write_metrics(alone, [row])
    write_metrics(same, [row | {"update_seconds": 2.5, "peak_memory_gb": 1.1}])
    write_metrics(other, [row | {"reward": 0.5000001}])
    write_metrics(short, [])
    assert first_difference(alone, same) is None
    assert first_difference(alone, other) == "step 1: reward 0.5000001, 0.5"
    assert first_difference(alone, short) == "0 lines, not 1"


def test_a_line_that_is_being_written_is_no_step_yet(tmp_path):
    assert last_step(tmp_path) == -1
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n{"step": 8')
    assert last_step(tmp_path) == 7


def test_the_soak_runs_the_default_but_for_its_length():
    text = (ROOT / "experiments/soak.py").read_text()
    for flag in "learning_rate", "prompts_per_step", "group_size", "minibatches":
        assert f"--{flag}" not in text
