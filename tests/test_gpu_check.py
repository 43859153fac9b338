"""experiments/gpu_check.py on CPU: its arithmetic, engines that fail, whole runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_memory import random_batch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from experiments import gpu_check
from experiments.gpu_check import Work, speed_of, work_of_step
from policy import Policy
from support.flags import Refused

ROOT = Path(__file__).parents[1]
PHASES = [
    *("engine loaded", "engine asleep", "policy built", "sync 0"),
    *("rollout 1", "update 1", "sync 1", "rollout 2", "update 2", "sync 2"),
]

# tiny has 3 layers with 4 matrices of 128 x 128 and 3 of 128 x 384 weights, attention
# that is 128 wide, and 20 tokens to choose from.
LINEAR = 3 * 128 * (4 * 128 + 3 * 384)
WIDTH = 3 * 128
HEAD = 20 * 128


def test_flops_of_an_update_are_those_that_torch_counts():
    """Four responses of 24 tokens to a prompt of 16."""
    model = AutoModelForCausalLM.from_pretrained("tiny", attn_implementation="eager")
    batch = random_batch(4, 40, 20, listed=5)
    with FlopCounterMode(display=False) as counter:
        logp, top_logp = Policy(model)(batch)
        (logp.sum() + top_logp.sum()).backward()
    _, update = work_of_step(Policy(model), batch, group_size=4)
    assert update.tokens == 4 * 40
    # Eager attention also computes the pairs that its mask drops, three times.
    dropped = 3 * 4 * WIDTH * 4 * 40**2 / 2
    # The head is computed once more in the backward pass.
    again = 2 * HEAD * 4 * 24
    expected = update.flops + dropped + again
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


def test_flops_of_a_rollout_count_the_prompt_once_a_group():
    model = AutoModelForCausalLM.from_pretrained("tiny")
    policy = Policy(model)
    rollout, _ = work_of_step(policy, random_batch(4, 40, 20), group_size=4)
    assert rollout.tokens == 4 * 24
    pairs = 16**2 / 2 + 4 * (40**2 - 16**2) / 2
    linear = 2 * LINEAR * (16 + 4 * 24)
    assert rollout.flops == linear + 4 * WIDTH * pairs + 2 * HEAD * 4 * 24


def test_flops_of_an_update_count_a_shared_prompt_once():
    model = AutoModelForCausalLM.from_pretrained("tiny")
    policy = Policy(model, sharing=4)
    rollout, update = work_of_step(policy, random_batch(4, 40, 20), group_size=4)
    assert update.flops == 3 * rollout.flops


def test_speed_is_by_device_and_in_percent_of_its_peak():
    """989e12 FLOPs in 2 seconds on 2 devices are a quarter of 989 TFLOP/s on each."""
    work = Work(tokens=600, flops=989e12)
    speed = speed_of(work, seconds=2.0, ranks=2, device="NVIDIA H200")
    assert speed["tokens/s"] == 600 / 2
    assert speed["TFLOP/s a device"] == 989 / 4
    assert speed["% of peak"] == 25


@pytest.mark.parametrize("device", ["NVIDIA H20", "NVIDIA H100 PCIe", "CPU"])
def test_speed_is_in_percent_only_of_a_peak_that_is_known(device):
    speed = speed_of(Work(600, 989e12), seconds=2.0, ranks=2, device=device)
    assert "% of peak" not in speed


def made_up(engine, ess):
    """What --out has of a run of one engine."""
    row = {
        "ess": ess,
        "ess_central": ess,
        "ratio": 1.0,
        "ratio_central": 1.0,
        "mismatch_mean": 0.1,
        "mismatch_max": 1.0,
    }
    found = {
        "mismatch": {
            "as loaded": row,
            "without sync 1": row,
            "after sync 1": row,
        },
        "speed": {"rollout": {"tokens/s": 100.0}, "update": {"tokens/s": 50.0}},
        "phases": {"sync 0": {"seconds": 1.0}},
    }
    return {"device": "CPU", "ranks": 1, "engines": {engine: found}}


@pytest.fixture
def run_with(monkeypatch, tmp_path):
    """main() with processes of these results, by engine; one without a result fails."""

    def run(results, *flags):
        def process(command, **options):
            *_, engine, out_flag, out = command
            assert out_flag == "--out"
            if engine in results:
                Path(out).write_text(json.dumps(results[engine]))

        out = tmp_path / "new" / "found.json"
        monkeypatch.setattr(gpu_check.subprocess, "run", process)
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", f"--out={out}", *flags])
        gpu_check.main()
        return json.loads(out.read_text())

    return run


def test_an_engine_that_fails_is_named_after_the_results_of_the_other(run_with, capsys):
    with pytest.raises(Refused, match="no result of fp8_per_channel"):
        run_with({"none": made_up("none", 1.0)})
    assert "| bfloat16: after sync 1 | 1 |" in capsys.readouterr().out


def test_fp8_may_disagree_with_the_trainer(run_with):
    results = {
        "none": made_up("none", 0.99),
        "fp8_per_channel": made_up("fp8_per_channel", 0.5),
    }
    assert run_with(results)["ranks"] == 1


def test_an_unquantized_engine_that_disagrees_with_the_trainer_is_refused(
    run_with, capsys
):
    results = {
        "none": made_up("none", 0.5),
        "fp8_per_channel": made_up("fp8_per_channel", 0.5),
    }
    with pytest.raises(Refused, match="should be on-policy has, .* e_B 0.500"):
        run_with(results)
    # It is printed all the same.
    assert "| bfloat16: after sync 1 | 0.5 |" in capsys.readouterr().out


def test_an_engine_that_a_sync_does_not_reach_is_refused(run_with):
    fp8 = made_up("fp8_per_channel", 0.9)
    mismatch = fp8["engines"]["fp8_per_channel"]["mismatch"]
    rows = {when: dict(row) for when, row in mismatch.items()}
    mismatch.update(rows)
    rows["as loaded"]["mismatch_mean"] = 0.1
    rows["without sync 1"]["mismatch_mean"] = 0.3
    rows["after sync 1"]["mismatch_mean"] = 0.19  # nearer to 0.1
    results = {"none": made_up("none", 0.99), "fp8_per_channel": fp8}
    run_with(results)
    rows["after sync 1"]["mismatch_mean"] = 0.21  # nearer to 0.3
    with pytest.raises(Refused, match="fp8_per_channel: after the sync .* 0.2100"):
        run_with(results)


@pytest.mark.parametrize(
    "flag", ["--prompts_per_step=0", "--model=nowhere", "--max_response_tokens=1000"]
)
def test_what_cannot_run_is_refused_before_an_engine_is_built(run_with, flag):
    with pytest.raises(Refused):
        run_with({}, flag)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_cpu(ranks, tmp_path):
    out = tmp_path / "new" / "found.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "experiments/gpu_check.py"),
        *("--prompts_per_step=16", "--group_size=4", f"--out={out}"),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "The device is a CPU: this checks nothing of CUDA."
    results = json.loads(out.read_text())
    assert results["device"] == "CPU"
    assert results["ranks"] == ranks
    assert results["config"]["prompts_per_step"] == 16
    plain = results["engines"]["none"]
    fp8 = results["engines"]["fp8_per_channel"]

    # Engine and trainer agree before and after the sync.
    for found, least in ((plain, 0.9999), (fp8, 0.999)):
        for when in ("as loaded", "after sync 1"):
            stats = found["mismatch"][when]
            assert least < stats["ess"] <= 1
            assert 0.99 < stats["ratio"] < 1.01
            assert 0 < stats["mismatch_mean"] < 0.005
    # And the sync matters: they are five times more off without it.
    before, stale, after = (
        plain["mismatch"][when]["mismatch_mean"]
        for when in ("as loaded", "without sync 1", "after sync 1")
    )
    assert stale > 5 * max(before, after)
    # Rounding weights and activations to fp8 costs more than rounding to bfloat16.
    assert fp8["mismatch"]["after sync 1"]["mismatch_mean"] > 2 * after

    for found in (plain, fp8):
        assert list(found["phases"]) == PHASES
        for row in found["phases"].values():
            assert row["seconds"] > 0
            assert 0.1 < row["RSS"] <= row["RSS at most"] + 0.01
        rollout = found["speed"]["rollout"]
        update = found["speed"]["update"]
        # 64 responses of 1 to 64 tokens; an update has their prompts too.
        assert 64 <= rollout["tokens"] <= 64 * 64
        assert rollout["tokens"] < update["tokens"]
        assert rollout["TFLOP/s a device"] > 0
        ratio = rollout["tokens/s"] / plain["speed"]["rollout"]["tokens/s"]
        assert rollout["times unquantized"] == pytest.approx(ratio)
    for name in PHASES:
        assert any(line.startswith(f"| fp8_per_channel: {name} |") for line in lines)
