"""tools/bench.py: what it compares, how it reads steps, and its table."""

import json
import subprocess
import sys
from functools import partial

import pytest
from conftest import ROOT
from transformers import AutoModelForCausalLM

from policy import Policy
from tools import bench


def test_what_is_compared_runs_in_turn_and_none_of_it_is_always_first():
    order = []
    arms = {name: partial(order.append, name) for name in "abc"}
    assert [len(of_arm) for of_arm in bench.in_rounds(arms, 4).values()] == [4, 4, 4]
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"


def test_a_ratio_is_that_of_each_round_and_a_cell_its_median():
    # 2 / 1, 6 / 2 and 4 / 4. The ratio of the medians would be 4 / 2.
    found = bench.ratios([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    assert found == [2.0, 3.0, 1.0]
    assert bench.cell(found) == "2 [1, 3]"
    assert bench.cell([0.012345]) == "0.0123"
    assert bench.cell("failed: no vLLM") == "failed: no vLLM"


def test_neither_the_first_steps_nor_the_last_one_count():
    lines = [
        (0.0, "step 1 tokens 9.0 rollout 7.0 sync 1.0"),
        (1.0, "step 2 tokens 9.0 rollout 7.0 sync 1.0"),
        (4.0, "step 3 tokens 30.0 rollout 0.5 sync 0.1"),  # 3 seconds
        (6.0, "step 4 tokens 40.0 rollout 0.7 sync 0.3"),  # 2 seconds
        (16.0, "step 5 tokens 9.0 rollout 7.0 sync 1.0"),
    ]
    found = bench.steps_of_trl(lines)
    expected = {"a step": 2.5, "response_tokens": 35.0, "rollout": 0.6, "sync": 0.2}
    assert found == pytest.approx(expected)


def test_an_update_counts_the_head_for_responses_alone():
    policy = Policy(AutoModelForCausalLM.from_pretrained("tiny"))
    rollouts = bench.random_rollouts(responses=4, length=24, vocabulary=20)
    # 3 layers have 4 matrices of 128 x 128, 3 of 128 x 384, and 2 norms of 128 weights.
    layers = 3 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128)
    # 4 prompts of a token, and 4 x 24 tokens of responses.
    expected = 6 * (layers * 100 + 20 * 128 * 96)
    assert bench.update_flops(policy, rollouts) == expected


@pytest.mark.slow  # engines, in processes of their own
def test_the_command_measures_its_parts_and_keeps_the_others(tmp_path):
    out = tmp_path / "bench.json"
    kept = {"made with": "an older command", "columns": {"tiny, float32": {"a": [1.0]}}}
    out.write_text(json.dumps({"kept": kept}))
    flags = ["--parts=steps,phases,head", "--rounds=1", "--counted=1", f"--out={out}"]
    command = [sys.executable, "tools/bench.py", *flags]
    subprocess.run(command, check=True, cwd=ROOT)
    results = json.loads(out.read_text())
    assert results["kept"] == kept
    steps, phases, head = (
        results[part]["columns"]["tiny, float32"]
        for part in ("steps", "phases", "head")
    )
    of_phases = [steps[f"its {phase}, s"][0] for phase in bench.PHASES]
    assert 0 < sum(of_phases) < 1.5 * steps["a step, s"][0]
    assert 0 < phases["update, share of these"][0] < 1
    assert head["peak memory of the head / that of all logits at once"][0] < 1.1
    page = out.with_suffix(".md").read_text()
    assert "| a | 1 |\n" in page
    assert "- kept: an older command\n" in page
