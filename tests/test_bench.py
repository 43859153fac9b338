"""tools/bench.py: how it compares, how it reads steps, and its table."""

import json
import subprocess
import sys
from functools import partial

import pytest
from conftest import ROOT

from tools import bench


def test_rounds_alternate_between_the_arms_and_each_starts_with_another():
    order = []
    arms = {name: partial(order.append, name) for name in "abc"}
    assert [len(found) for found in bench.in_rounds(arms, 4).values()] == [4, 4, 4]
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"


def test_ratios_are_taken_round_by_round_and_a_cell_is_their_median():
    # 2 / 1, 6 / 2 and 4 / 4. The ratio of the medians would be 4 / 2.
    found = bench.ratios([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    assert found == [2.0, 3.0, 1.0]
    assert bench.cell(found) == "2 [1, 3]"
    assert bench.cell([0.012345]) == "0.0123"
    assert bench.cell("failed: no vLLM") == "failed: no vLLM"


def test_the_first_steps_and_the_last_one_do_not_count():
    # Steps 3 and 4 take 3 and 2 seconds. This script has no sync.
    lines = [(end, "step ") for end in (0.0, 1.0, 4.0, 6.0, 16.0)]
    rows = [
        {"response_tokens": tokens, "rollout_seconds": rollout}
        for tokens, rollout in [(9, 7), (9, 7), (30, 0.5), (40, 0.7), (9, 7)]
    ]
    assert bench.medians(lines, rows) == pytest.approx(
        {"step, s": 2.5, "tokens of a response": 35.0, "rollout, s": 0.6}
    )


@pytest.mark.slow  # engines in processes of their own
def test_the_command_measures_steps_and_their_phases_and_says_why_trl_failed(tmp_path):
    out = tmp_path / "bench.json"
    flags = [f"--trl_python={sys.executable}", "--rounds=1", "--counted=1"]
    command = [sys.executable, "tools/bench.py", *flags, f"--out={out}"]
    subprocess.run(command, check=True, cwd=ROOT)
    found = json.loads(out.read_text())["columns"]["tiny, float32"]
    phases = [found[f"{phase}, s"][0] for phase in bench.PHASES]
    assert 0 < sum(phases) < 1.5 * found["step, s"][0]
    [ratio], [bare] = found["step / bare"], found["bare: step, s"]
    assert ratio == found["step, s"][0] / bare
    # This environment does not have TRL.
    row = "| step / TRL with vllm | failed: ModuleNotFoundError: No module named"
    assert row in out.with_suffix(".md").read_text()
