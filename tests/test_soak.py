"""study/soak.py: what it compares, and a short soak."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from study.soak import first_difference, metrics


def test_runs_are_the_same_if_their_metrics_are_but_for_seconds_and_memory():
    row = {"step": 1, "reward": 0.5, "update_seconds": 1.5, "peak_memory_gb": 1.0}
    same = row | {"update_seconds": 2.5, "peak_memory_gb": 1.1}
    assert first_difference([row], [same]) is None
    other = row | {"reward": 0.5000001}
    assert first_difference([row], [other]) == "step 1: reward 0.5000001, not 0.5"
    assert first_difference([row], []) == "0 lines, not 1"


def test_a_line_that_is_being_written_is_no_line_yet(tmp_path):
    assert metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n{"step": 8')
    assert metrics(tmp_path) == [{"step": 7}]


@pytest.mark.slow  # four lives of a run
def test_a_run_that_is_killed_twice_has_the_metrics_of_the_one_left_alone(tmp_path):
    flags = ["--steps=40", "--save_every=2", "--kills=2", "--seconds=30"]
    command = [sys.executable, "study/soak.py", *flags]
    folder = tmp_path / "soak"
    done = subprocess.run([*command, f"--folder={folder}"], cwd=ROOT)
    assert done.returncode == 0
    found = json.loads((folder / "soak.json").read_text())
    assert found["first_difference"] is None
    assert len(found["step_before_each_kill"]) == 2
