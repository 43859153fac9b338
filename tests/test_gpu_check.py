"""experiments/gpu_check.py: its verdict, and what it finds on a CPU."""

import json
import subprocess

import pytest
from conftest import ROOT, TORCHRUN

from experiments.gpu_check import check_mismatch
from support.command import Refused


def test_an_engine_that_a_sync_does_not_reach_is_refused():
    check_mismatch(before=0.1, without=0.3, after=0.19)  # nearer to 0.1
    with pytest.raises(Refused, match=r"after the sync mean \|log rho\| is 0.2100"):
        check_mismatch(before=0.1, without=0.3, after=0.21)  # nearer to 0.3


@pytest.mark.slow  # engines in processes of their own
@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_engine_and_trainer_agree_before_and_after_the_sync(quantization, tmp_path):
    out = tmp_path / "new" / "found.json"
    flags = ["--prompts_per_step=16", "--group_size=4", "--rollout_dtype=bfloat16"]
    flags += [f"--rollout_quantization={quantization}", f"--out={out}"]
    command = [*TORCHRUN, "--standalone", "experiments/gpu_check.py", *flags]
    subprocess.run(command, check=True, cwd=ROOT)
    found = json.loads(out.read_text())
    assert found["device"] == "CPU"
    start, without, after = found["mismatch"].values()
    assert list(found["mismatch"])[1] == "without a sync"
    assert min(start["ess"], after["ess"]) > 0.999
    assert without["mismatch_mean"] > 2 * after["mismatch_mean"]
    assert all(row["seconds"] > 0 for row in found["phases"].values())
