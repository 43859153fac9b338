"""tools/gpu_check.py: its limits, its arithmetic, and a check on a CPU."""

import json

import pytest
from conftest import ROOT
from launch import TORCHRUN, run_script
from test_memory import random_rollouts
from transformers import AutoModelForCausalLM

from policy import Policy
from tools.gpu_check import CheckConfig, memory_checks, update_flops


def within(row):
    return row["least"] <= row["value"] <= row["most"]


def test_an_update_counts_the_head_only_for_response_tokens():
    policy = Policy(AutoModelForCausalLM.from_pretrained("tiny"))
    rollouts = random_rollouts(responses=4, length=24, vocabulary=20)
    # 3 layers have 4 matrices of 128 x 128, 3 of 128 x 384, and 2 norms of 128 weights.
    layers = 3 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128)
    # 4 prompts of one token, and 4 x 24 response tokens.
    expected = 6 * (layers * 100 + 20 * 128 * 96)
    assert update_flops(policy, rollouts) == expected


def test_gpu_memory_is_compared_with_the_count_and_with_what_sleep_should_release():
    # tiny has 0.65 million weights, so its engine takes what its cache takes, 4 GB, and
    # an update adds less than 1 GB. The reserve is 12 GB.
    cfg = CheckConfig(kv_cache_gb=4, micro_batch_tokens=1000)
    phases = {
        "rollout 2": {"GB in use": 15.0},
        "update 2": {"GB added": 0.9, "GB in use": 2.0},
        "asleep 0": {"GB in use": 2.0},
        "awake 0": {"GB in use": 6.0},
        "asleep 1": {"GB in use": 2.05},
        "awake 1": {"GB in use": 6.0},
    }
    checks = memory_checks(phases, cfg, ranks=1)
    assert len(checks) == 4
    assert all(within(row) for row in checks.values())
    phases["rollout 2"]["GB in use"] = 16.5
    phases["update 2"]["GB added"] = 2.5
    phases["asleep 1"]["GB in use"] = 3.0  # so only 3 of 4 GB were released
    assert not any(within(row) for row in memory_checks(phases, cfg, 1).values())


@pytest.mark.slow  # engines in processes of their own
@pytest.mark.parametrize("size", [[], ["--size=small"]])
@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_on_a_cpu_all_numbers_are_within_their_limits(quantization, size, tmp_path):
    out = tmp_path / "new" / "found.json"
    flags = ["--prompts_per_step=8", "--group_size=4", "--rollout_dtype=bfloat16"]
    flags += ["--max_response_tokens=32", f"--out={out}"]
    command = [*TORCHRUN, "--standalone", ROOT / "tools/gpu_check.py", *flags]
    done = run_script([*command, f"--rollout_quantization={quantization}", *size])
    assert "All numbers are within their limits." in done.stdout
    [found] = json.loads(out.read_text()).values()
    assert found["device"] == "CPU"
    start, without, after, cut = found["statistics"].values()
    assert min(start["ess"], after["ess"]) > 0.999
    assert without["logprob_abs_diff"] > 2 * after["logprob_abs_diff"]
    assert cut["logprob_abs_diff"] > 0.005  # minus the log of the mass that is left
    assert all(row["seconds"] > 0 for row in found["phases"].values())
