"""experiments/gpu_check.py on CPU: its arithmetic, engines that fail, whole runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_memory import random_batch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from config import Refused
from experiments import gpu_check
from policy import Policy

ROOT = Path(__file__).parents[1]
PHASES = ["engine loaded", "engine asleep", "policy built", "sync 0"]
PHASES += [f"{name} {step}" for step in (1, 2) for name in ("rollout", "update", "sync")]

# tiny: 3 layers of 128 x (4 x 128 + 3 x 384) weights, attention 128 wide, 20 tokens to choose from.
# A batch of 4 responses of 24 tokens to one prompt of 16.
LINEAR, HEAD, PAIRS = 3 * 128 * (4 * 128 + 3 * 384), 20 * 128, 3 * 128


def test_flops_of_an_update_are_those_that_torch_counts():
    model = AutoModelForCausalLM.from_pretrained("tiny", attn_implementation="eager")
    batch = random_batch(4, 40, 20)
    with FlopCounterMode(display=False) as counter:
        Policy(model)(batch).sum().backward()
    _, (tokens, flops) = gpu_check.work(model, batch, group_size=4)
    assert tokens == 4 * 40
    # Eager attention also computes the pairs that its mask drops; the head is computed once more.
    dropped, again = 3 * 4 * PAIRS * 4 * 40**2 / 2, 2 * HEAD * 4 * 24
    assert counter.get_total_flops() == pytest.approx(flops + dropped + again, rel=1e-3)


def test_flops_of_a_rollout_count_the_prompt_once_a_group():
    model = AutoModelForCausalLM.from_pretrained("tiny")
    (tokens, flops), _ = gpu_check.work(model, random_batch(4, 40, 20), group_size=4)
    assert tokens == 4 * 24
    pairs = 16**2 / 2 + 4 * (40**2 - 16**2) / 2
    assert flops == 2 * LINEAR * (16 + 4 * 24) + 4 * PAIRS * pairs + 2 * HEAD * 4 * 24


def test_speed_is_in_percent_only_of_a_peak_that_is_known():
    phases = {"rollout 2": {"seconds": 2.0}, "update 2": {"seconds": 4.0}}
    done = [[600, 989e12], [900, 4 * 989e12]]
    speed = gpu_check.speeds(done, phases, 2, "NVIDIA H200")
    assert speed["rollout"]["tokens/s"] == 300 and speed["update"]["tokens/s"] == 225
    assert speed["rollout"]["TFLOP/s a device"] == 989 / 4
    assert speed["rollout"]["% of peak"] == 25 and speed["update"]["% of peak"] == 50
    for other in "NVIDIA H20", "NVIDIA H100 PCIe", "CPU":
        assert "% of peak" not in gpu_check.speeds(done, phases, 2, other)["update"]


def made_up(engine, ess):
    """What --out has of a run of one engine."""
    row = {"ess": ess, "ratio": 1.0, "mismatch_mean": 0.1, "mismatch_max": 1.0}
    mismatch = dict.fromkeys(("as loaded", "without sync 1", "after sync 1"), row)
    speed = {"rollout": {"tokens/s": 100.0}, "update": {"tokens/s": 50.0}}
    found = {"mismatch": mismatch, "speed": speed, "phases": {"sync 0": {"seconds": 1.0}}}
    return {"device": "CPU", "ranks": 1, "engines": {engine: found}}


@pytest.fixture
def run_here(monkeypatch, tmp_path):
    """main() with processes of these results, by engine; one without a result fails."""

    def run(results, *flags):
        def process(command, **options):
            engine, out = (flag.split("=")[1] for flag in command[-2:])
            if engine in results:
                Path(out).write_text(json.dumps(results[engine]))

        out = tmp_path / "new" / "found.json"
        monkeypatch.setattr(gpu_check.subprocess, "run", process)
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", f"--out={out}", *flags])
        try:
            gpu_check.main()
        finally:
            found = json.loads(out.read_text()) if out.exists() else None
        return found

    return run


def test_an_engine_that_fails_is_named_after_the_results_of_the_other(run_here, capsys):
    with pytest.raises(Refused, match="no result of fp8_per_channel"):
        run_here({"none": made_up("none", 1.0)})
    assert "| bfloat16: after sync 1 | 1 |" in capsys.readouterr().out


def test_an_engine_that_disagrees_with_the_trainer_fails_the_check_and_fp8_may(run_here, capsys):
    fp8 = made_up("fp8_per_channel", 0.5)
    assert run_here({"none": made_up("none", 0.99), "fp8_per_channel": fp8})["ranks"] == 1
    with pytest.raises(Refused, match="should be on-policy has e_B 0.500"):
        run_here({"none": made_up("none", 0.5), "fp8_per_channel": fp8})
    assert (
        "| bfloat16: after sync 1 | 0.5 |" in capsys.readouterr().out
    )  # it is printed all the same


def test_what_cannot_run_is_refused_before_an_engine_is_built(run_here):
    for flags in ["--prompts=0"], ["--model=nowhere"], ["--max_response_tokens=1000"]:
        with pytest.raises(Refused):
            run_here({}, *flags)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu-check does it on a GPU")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_cpu(ranks, tmp_path):
    out = tmp_path / "new" / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "experiments/gpu_check.py", "--prompts=16"]
    command += ["--group_size=4", f"--out={out}"]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "The device is a CPU: this run checks nothing of CUDA."
    results = json.loads(out.read_text())
    assert results["device"] == "CPU" and results["ranks"] == ranks
    assert results["config"]["prompts_per_step"] == 16
    plain, fp8 = (results["engines"][name] for name in ("none", "fp8_per_channel"))

    # Engine and trainer agree before and after the sync, which matters: it is ten times more off
    # without. What rounding weights and activations to fp8 costs is more than rounding to bf16.
    for found, least in (plain, 0.9999), (fp8, 0.999):
        for when in "as loaded", "after sync 1":
            assert least < found["mismatch"][when]["ess"] <= 1
            assert 0.99 < found["mismatch"][when]["ratio"] < 1.01
            assert 0 < found["mismatch"][when]["mismatch_mean"] < 0.005
    before, stale, after = (
        plain["mismatch"][when]["mismatch_mean"]
        for when in ("as loaded", "without sync 1", "after sync 1")
    )
    assert stale > 5 * max(before, after)
    assert fp8["mismatch"]["after sync 1"]["mismatch_mean"] > 2 * after

    for found in plain, fp8:
        assert list(found["phases"]) == PHASES
        for row in found["phases"].values():
            assert row["seconds"] > 0 and 0.1 < row["RSS"] <= row["RSS at most"] + 0.01
        rollout, update = found["speed"]["rollout"], found["speed"]["update"]
        assert 16 * 4 <= rollout["tokens"] <= 16 * 4 * 64 < 64 * update["tokens"]
        assert rollout["tokens/s"] > 0 and rollout["TFLOP/s a device"] > 0
        ratio = rollout["tokens/s"] / plain["speed"]["rollout"]["tokens/s"]
        assert rollout["times unquantized"] == pytest.approx(ratio)
    assert 0 < fp8["speed"]["rollout"]["times unquantized"] != 1
    for name in PHASES:
        assert any(line.startswith(f"| fp8_per_channel: {name} |") for line in lines)
