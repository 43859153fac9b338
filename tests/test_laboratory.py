"""The mismatch laboratory: what is left out of P3O, what is run, how it is summed up."""

import json
import math
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from experiments import ablations, mismatch, plot
from loss import effective_sample_size, p3o_loss

RATIO = torch.tensor([[0.25, 0.5, 2.0], [1.0, 1.5, 9.0]])  # the 9 is masked out
MASK = torch.tensor([[True, True, True], [True, True, False]])
ADVANTAGE = torch.tensor([1.0, -2.0])
BEHAVIOR = torch.full((2, 3), -1.0)
ESS = effective_sample_size(RATIO.log(), MASK).item()  # (5.25 / 5)^2 / (7.5625 / 5) = 0.7289


def gradient(objective, **keywords):
    """Of the loss to log pi_theta, times the number of tokens: [2, 3]."""
    logp = (BEHAVIOR + RATIO.log()).requires_grad_()
    objective(logp, BEHAVIOR, ADVANTAGE, MASK, **keywords)[0].backward()
    return 5 * logp.grad


def test_the_batch_has_an_e_b_that_can_be_done_by_hand():
    assert pytest.approx(1.05**2 / 1.5125) == ESS


def test_without_kl_what_is_left_is_the_capped_ratio_times_the_advantage():
    # -min(rho, e_B) A: rho where it is below 0.7289, else 0.7289
    expected = [[-0.25, -0.5, -ESS], [2 * ESS, 2 * ESS, 0]]
    assert gradient(ablations.cap_without_kl, ess=ESS).tolist() == [
        pytest.approx(row) for row in expected
    ]


def test_without_cap_what_is_left_is_the_ratio_times_the_advantage_and_the_pull():
    pull = [[(1 - ESS) * (1 - 1 / r) for r in row] for row in RATIO.tolist()]  # of k3
    expected = [[-0.25 + pull[0][0], -0.5 + pull[0][1], -2 + pull[0][2]], [2, 3 + pull[1][1], 0]]
    assert gradient(ablations.kl_without_cap, ess=ESS).tolist() == [
        pytest.approx(row) for row in expected
    ]


def test_cap_and_pull_together_are_p3o():
    # P3O = (capped) + (uncapped and pulled) - (uncapped)
    capped = gradient(ablations.cap_without_kl, ess=ESS)
    pulled = gradient(ablations.kl_without_cap, ess=ESS)
    free = -(RATIO * ADVANTAGE[:, None] * MASK)
    assert torch.allclose(gradient(p3o_loss, ess=ESS), capped + pulled - free)


def test_a_fixed_e_b_is_p3o_where_it_is_the_batchs_own():
    fixed = gradient(ablations.fixed_ess, ess=0.123, level=ESS)
    assert torch.allclose(fixed, gradient(p3o_loss, ess=ESS))


def test_e_b_of_a_micro_batch_does_not_look_at_the_rest_of_the_batch():
    own = gradient(ablations.ess_of_micro_batch, ess=0.123)  # of a batch that this is a part of
    assert torch.allclose(own, gradient(p3o_loss, ess=ESS))


def test_the_authors_clamp_turns_the_pull_into_a_push_beyond_it():
    # rho = e^-9 and e^-11, no advantage. The KL weighs 1 - e_B = 1/4, and each token 1/2 of that,
    # times 1 - 1/rho for the first (descent raises log pi_theta), and 1 for the other (lowers it).
    logp = torch.tensor([[-10.0, -12.0]], requires_grad=True)
    batch = torch.full((1, 2), -1.0), torch.zeros(1), torch.ones(1, 2, dtype=torch.bool)
    ablations.clamped_kl(logp, *batch, ess=0.75)[0].backward()
    assert logp.grad.tolist() == [pytest.approx([0.25 * (1 - math.exp(9)) / 2, 0.25 / 2])]


def test_the_grid_has_five_seeds_of_what_is_compared_and_three_of_the_other_objectives():
    seeds = Counter(cell[:3] for cell in mismatch.cells("full"))
    for setting in mismatch.SETTINGS:
        assert all(seeds[setting, o, mismatch.LEARNING_RATE] == 5 for o in mismatch.EVERYWHERE)
    for setting, rate in mismatch.SHOWN_SETTINGS:
        assert all(seeds[setting, objective, rate] == 5 for objective in mismatch.SHOWN_OBJECTIVES)
    for setting, rate in mismatch.WHERE_IT_BREAKS:
        for objective in {*mismatch.OBJECTIVES, *mismatch.ABLATIONS} - {*mismatch.SHOWN_OBJECTIVES}:
            runs = setting in mismatch.ONLY.get(objective, [setting])
            assert seeds[setting, objective, rate] == 3 * runs


def test_torchrun_gives_a_process_its_share_of_the_cells_and_of_the_machine():
    code = """import os
from experiments.mismatch import share_of_machine
print(*share_of_machine(), os.environ["CUDA_VISIBLE_DEVICES"], len(os.sched_getaffinity(0)),
      "RANK" in os.environ, "MASTER_PORT" in os.environ)"""
    torchrun = dict(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, MASTER_PORT=1)
    its = os.environ | {name: str(value) for name, value in torchrun.items()}
    its["CUDA_VISIBLE_DEVICES"] = "5,6"
    done = subprocess.run([sys.executable, "-c", code], env=its, cwd=mismatch.ROOT, text=True,
                          capture_output=True)  # fmt: skip
    cores = max(1, len(os.sched_getaffinity(0)) // 2)  # its half of the machine, and GPU 6
    assert done.stdout.split() == ["3", "4", "6", str(cores), "False", "False"]


@pytest.fixture
def grid(monkeypatch, tmp_path):
    """mismatch.main() on three cells, without the training: the cells that it would have run."""
    plan = [(s, "p3o", 2e-4, 0) for s in ("on-policy", "T = 1.4", "lag 16")]

    def run(cell, flags):
        ran.append(cell[0])
        if cell[0] == broken:
            raise RuntimeError("train.py failed: no memory")
        return line(*cell[:2], cell[3], 0.5, 0.6, 0.6) | {
            "command": f"python {' '.join(flags)}", "commit": "abc", "seconds": 1.0,
        }  # fmt: skip

    def main(fails=None, share=(0, 1)):
        nonlocal broken
        broken = fails
        # Not of this process, whose environment other tests need.
        monkeypatch.setattr(mismatch, "share_of_machine", lambda: share)
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["mismatch.py", "--folder", str(tmp_path)])
        mismatch.main()
        return list(ran)

    ran, broken = [], None
    monkeypatch.setattr(mismatch, "cells", lambda grid: plan)
    monkeypatch.setattr(mismatch, "run", run)
    monkeypatch.setattr(mismatch.signal, "signal", lambda *_: None)
    return main


def test_a_run_that_has_its_line_is_not_run_again_unless_its_command_has_changed(
    grid, tmp_path, monkeypatch, capsys
):
    assert grid() == ["on-policy", "T = 1.4", "lag 16"]
    assert grid() == []
    assert "has 3 of 3 runs, some of other commits than this" in capsys.readouterr().out
    monkeypatch.setitem(mismatch.SETTINGS, "T = 1.4", ["--temperature=1.5"])
    assert grid() == ["T = 1.4"]
    assert len(mismatch.finished(tmp_path / "mismatch.jsonl")) == 3


def test_the_shares_of_the_processes_are_disjoint_and_make_up_the_grid(grid):
    assert grid(share=(1, 2)) == ["T = 1.4"]
    assert grid(share=(0, 2)) == ["on-policy", "lag 16"]


def test_a_line_that_was_cut_short_is_replaced(grid, tmp_path):
    grid()
    file = tmp_path / "mismatch.jsonl"
    file.write_text(file.read_text()[:-20])  # killed while it wrote the third
    assert grid() == ["lag 16"]
    assert [json.loads(row)["setting"] for row in open(file)] == ["on-policy", "T = 1.4", "lag 16"]


def test_a_run_that_fails_keeps_no_other_from_running(grid, capsys):
    with pytest.raises(SystemExit, match="1 runs failed"):
        grid(fails="T = 1.4")
    assert "no memory" in capsys.readouterr().err
    assert grid() == ["T = 1.4"]


@pytest.mark.slow  # two runs of train.py
def test_an_ablation_is_a_run_of_train_py_under_its_own_name(tmp_path):
    few = "--steps=2 --prompts_per_step=8 --temperature=1.4 --eval_problems=16".split()
    rows = {}
    for name in "cap_without_kl", "raw_logprobs":
        command = [sys.executable, "experiments/ablations.py", name, *few]
        subprocess.run([*command, f"--out_dir={tmp_path}/{name}"], cwd=mismatch.ROOT, check=True)
        rows[name] = [json.loads(row) for row in open(tmp_path / name / "metrics.jsonl")]
        told = json.loads((tmp_path / name / "config.json").read_text())["objective"]
        assert told == ("p3o" if name == "raw_logprobs" else name)
    # The same responses, sampled at 1.4: in the one e_B sees it, with raw log-probabilities not.
    assert rows["cap_without_kl"][1]["reward"] == rows["raw_logprobs"][1]["reward"]
    assert rows["cap_without_kl"][1]["ess"] < 0.99 and rows["raw_logprobs"][1]["ess"] > 0.9999


def test_a_fixed_e_b_is_the_mean_of_p3os_own_run_and_waits_for_it():
    cell = "lag 16", "fixed e_B", 5e-4, 1
    with pytest.raises(KeyError):
        mismatch.flags_of(cell, {})
    p3o = {"metrics": {"ess": [None, 1.0, 0.5]}}  # no update before step 1; mean 0.75
    flags = mismatch.flags_of(cell, {("lag 16", "p3o", 5e-4, 1): p3o})
    assert flags[-2:] == ["--objective_args", "level=0.7500"] and "--seed=1" in flags


@pytest.mark.parametrize("setting, rate", mismatch.WHERE_IT_BREAKS)
def test_the_ablation_of_micro_batches_has_several_in_a_batch(setting, rate):
    flags = mismatch.flags_of((setting, "e_B of a micro-batch", rate, 0), {})
    given = dict(flag.removeprefix("--").split("=") for flag in flags if "=" in flag)
    responses = int(given["prompts_per_step"]) * 8 / int(given.get("minibatches", 1))
    # 44 tokens on average, prompt included; padding only adds to them
    assert responses * 44 > 2 * int(given["micro_batch_tokens"])


def line(setting, objective, seed, *accuracy):
    metrics = {"step": [0, 10, 20], "heldout_pass@1": accuracy, "ess": [None, 1.0, 0.5]}
    metrics |= {"ess_min": [None, 0.9, 0.4], "grad_norm": [None, 3.0, 2.0]}
    cell = dict(setting=setting, objective=objective, learning_rate=2e-4, seed=seed)
    return cell | {"metrics": metrics, "stopped": None}


def test_an_interval_is_students():
    # One value or two have none. 1, 2, 3: mean 2, standard deviation 1; t of two degrees of freedom
    # 4.303; 4.303 / sqrt(3)
    mean, half = plot.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(2.484, abs=1e-3)
    assert math.isnan(plot.interval([1.0, 2.0])[1])


@pytest.fixture
def some_runs(tmp_path):
    rows = [
        line("T = 1.4", "p3o", 0, 0.5, 0.8, 0.8),
        line("T = 1.4", "p3o", 1, 0.5, 0.6, 0.6),
        line("T = 1.4", "p3o", 2, 0.5, 0.7, 0.7),
        line("T = 1.4", "grpo 0.2", 1, 0.5, 0.4, 0.2),  # below half of its best, 0.5
        line("T = 1.4", "grpo 0.2", 2, 0.5, 0.4, 0.3),
        line("T = 1.4", "grpo 0.2", 0, 0.5, 0.4, 0.4),
        line("T = 1.4", "reinforce", 0, 0.5, 0.6, 0.1),  # run anew: the next line counts
        line("T = 1.4", "reinforce", 0, 0.5, 0.6, 0.6) | {"stopped": "a number is not finite"},
        line("T = 1.4", "gspo", 0, 0.5, 0.2, 0.6),
        line("T = 1.4", "p3o", 4, 0.5, 0.7, 0.1),  # a seed that the others do not have
    ]
    (tmp_path / "mismatch.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_tables_mark_collapse_and_take_differences_by_seed(some_runs):
    text = plot.tables(plot.load(some_runs / "mismatch.jsonl"))
    # Of 0.8, 0.6, 0.7 the mean is 0.7, the standard deviation 0.1: 4.303 * 0.1 / sqrt(3) = 0.248
    assert "| p3o | 0.700 ± 0.248 (3) |" in text  # beside gspo: seeds 0 to 2
    # With 0.1 the mean is 0.55; 0.1 is below half of that run's best.
    assert "| p3o | 0.550 ± 0.495 (4) **collapsed 1/4** |" in text
    assert "| grpo 0.2 | 0.300 ± 0.248 (3) **collapsed 1/3** |" in text
    # 0.8 - 0.4, 0.6 - 0.2, 0.7 - 0.3: 0.4 each time, whatever the order of the lines
    assert "| grpo 0.2 | +0.400 ± 0.000 (3) |" in text
    # A run that stopped itself has collapsed, whatever its last evaluation said.
    assert "| reinforce | 0.600 (1) **collapsed 1/1** |" in text
    assert "| p3o | 0.80, 0.60, 0.70, 0.10 |" in text
    # gspo fell below half of 0.5 at step 10, and came back; of grpo seed 1 did, at step 20
    assert "| gspo | 10 |" in text and "| grpo 0.2 | 20, -, - |" in text


def test_the_figures_are_drawn_of_whatever_is_there(some_runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plot.py", str(some_runs)])
    plot.main()
    figures = {path.stem for path in some_runs.glob("*.png")}
    assert figures == {"curves", "ess", "strength", "others", "ablations"}
    monkeypatch.setattr(sys, "argv", ["plot.py", str(some_runs / "nothing")])
    with pytest.raises(SystemExit, match="has no runs"):
        plot.main()


def test_what_is_committed_and_the_table_of_the_readme_are_of_the_committed_runs():
    runs = plot.load(plot.RESULTS / "mismatch.jsonl")
    assert (plot.RESULTS / "mismatch.md").read_text() == plot.tables(runs)
    readme = (mismatch.ROOT / "README.md").read_text()
    shown = plot.table(runs, plot.compared(runs), mismatch.SHOWN_OBJECTIVES, plot.final)
    assert "\n".join(shown) in readme
