"""tools/gpu_check.py: its limits, and what it finds on a CPU."""

import json

import pytest
from conftest import ROOT
from launch import TORCHRUN, run_script

from tools.gpu_check import CheckConfig, memory_checks


def within(row):
    return row["least"] <= row["value"] <= row["most"]


def test_memory_on_cuda_is_held_against_what_is_counted_and_what_sleep_lends():
    # tiny has 0.65 million weights, so its engine is its cache, 4 GB, and no update
    # adds 1 GB. The reserve is of 12 GB.
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
    phases["asleep 1"]["GB in use"] = 3.0  # so 3 of 4 GB are lent, and 1 is kept
    assert not any(within(row) for row in memory_checks(phases, cfg, 1).values())


@pytest.mark.slow  # engines in processes of their own
@pytest.mark.parametrize("size", [[], ["--size=small"]])
@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_on_a_cpu_all_is_within_its_limits(quantization, size, tmp_path):
    out = tmp_path / "new" / "found.json"
    flags = ["--prompts_per_step=8", "--group_size=4", "--rollout_dtype=bfloat16"]
    flags += ["--max_response_tokens=32", f"--out={out}"]
    command = [*TORCHRUN, "--standalone", ROOT / "tools/gpu_check.py", *flags]
    done = run_script([*command, f"--rollout_quantization={quantization}", *size])
    assert "All are within their limits." in done.stdout
    [found] = json.loads(out.read_text()).values()
    assert found["device"] == "CPU"
    start, without, after, cut = found["statistics"].values()
    assert min(start["ess"], after["ess"]) > 0.999
    assert without["logprob_abs_diff"] > 2 * after["logprob_abs_diff"]
    assert cut["logprob_abs_diff"] > 0.005  # minus the log of the mass that is left
    assert all(row["seconds"] > 0 for row in found["phases"].values())
