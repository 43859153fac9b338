"""What can go wrong in the numbers of a run: it stops, or goes on and counts it.

The fault is put into one place of a run that is real in
all others.
"""

import json
import math

import pytest
import torch
from conftest import NONE_COMPLETE

import train
from support.command import Stopped
from support.tasks import load_task

SHORT = ["--prompts_per_step=4", "--group_size=2"]


@pytest.mark.parametrize(
    "steps, error, sentence",
    [
        (4, FloatingPointError, "step 3: e_B is not finite"),
        (2, Stopped, "after the sync of weights 2, engine and policy differ by inf"),
    ],
)
def test_a_weight_that_is_not_a_number_stops_the_run_in_the_next_step_or_the_last_sync(
    steps, error, sentence, train_here, monkeypatch
):
    apply_gradient = train.apply_gradient

    def poison(policy, optimizer, cfg, step):
        grad_norm = apply_gradient(policy, optimizer, cfg, step)
        if step == 2:
            with torch.no_grad():
                policy.model.base_model.norm.weight.to_local()[0] = math.nan
        return grad_norm

    monkeypatch.setattr(train, "apply_gradient", poison)
    with pytest.raises(error, match=sentence):
        train_here(*SHORT, NONE_COMPLETE, f"--steps={steps}", "--minibatches=1")


@pytest.fixture
def impossible(tmp_path) -> str:
    """The embedded task, with answers that are all wrong."""
    for split in "train", "heldout":
        problems = load_task("tiny", split)[:16]
        lines = [json.dumps(problem | {"answer": "999999"}) for problem in problems]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    settings = {"verifier": "exact", "instruction": None}
    (tmp_path / "task.json").write_text(json.dumps(settings))
    return str(tmp_path)


def test_groups_without_signal_are_counted_and_teach_nothing(
    impossible, train_here, capsys
):
    # It has 16 problems: three steps of four prompts are in the first epoch.
    flags = ["--steps=3", "--minibatches=1", "--rollout_dtype=float32"]
    rows = train_here(*SHORT, *flags, f"--task={impossible}")
    assert "no group ever had a signal" in capsys.readouterr().out
    for row in rows[1:]:
        assert row["reward"] == row["groups_with_signal"] == 0
        # Without an advantage (12) has no first term. Its second one is what rounding
        # leaves of a fresh batch: (1 - e_B) KL, with 1 - e_B and KL of about 1e-6.
        assert row["loss"] < 1e-9
        # AdamW divides by |gradient| + 1e-8, and would blow up what is not below that.
        assert row["grad_norm"] < 1e-6


def test_truncated_responses_are_counted_and_the_run_goes_on(train_here):
    rows = train_here(*SHORT, "--steps=2", "--max_response_tokens=3")
    for row in rows[1:]:
        assert row["truncated"] == 1
        assert row["response_tokens"] == 3
        assert row["reward"] == 0
        assert math.isfinite(row["loss"])
