"""Test the limits and the arithmetic of tools/gpu_check.py, and a check on a CPU."""

import pytest
from launch import torchrun

from tools.gpu_check import CheckConfig, memory_checks


def within(row):
    least, value, most = row
    return least <= value <= most


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
@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_on_a_cpu_all_numbers_are_within_their_limits(quantization):
    flags = ["--prompts_per_step=8", "--group_size=4", "--rollout_dtype=bfloat16"]
    flags += ["--max_response_tokens=32", f"--rollout_quantization={quantization}"]
    printed = torchrun(1, "tools/gpu_check.py", *flags)
    assert "All numbers are within their limits." in printed

    def number(row: str, title: str) -> float:
        lines = printed.splitlines()
        header = next(line.split() for line in lines if title in line.split())
        [values] = [line for line in lines if line.startswith(f"{row} ")]
        return float(values.removeprefix(row).split()[header.index(title)])

    assert number("at the start", "ess") > 0.999
    assert number("after the sync", "ess") > 0.999
    differs = "logprob_abs_diff"
    assert number("without a sync", differs) > 2 * number("after the sync", differs)
    # It is minus the log of the mass that is left.
    assert number("with top-p and top-k", differs) > 0.005
    assert number("rollout 3", "seconds") > 0
