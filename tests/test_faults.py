"""Test that a run stops if a weight is not a number, and that it counts groups whose
rewards teach nothing.

Each test puts one fault into a run that is otherwise real.
"""

import math

import pytest
import torch
from conftest import NONE_COMPLETE

import train
from support.command import Stopped

SHORT_RUN = ["--prompts_per_step=4", "--group_size=2", "--minibatches=1", NONE_COMPLETE]


@pytest.mark.parametrize(
    "steps, error, sentence",
    [
        (
            4,
            FloatingPointError,
            "step 3: e_B is nan and the norm of the gradient is",
        ),
        (2, Stopped, "after the sync of weights 2, engine and policy differ by inf"),
    ],
)
def test_a_weight_that_is_not_a_number_stops_the_run_in_the_next_step_or_the_last_sync(
    steps, error, sentence, train_here, monkeypatch
):
    apply_gradient = train.apply_gradient

    def poison(policy, optimizer, cfg, step, e_b):
        grad_norm = apply_gradient(policy, optimizer, cfg, step, e_b)
        if step == 2:
            with torch.no_grad():
                policy.model.base_model.norm.weight.to_local()[0] = math.nan
        return grad_norm

    monkeypatch.setattr(train, "apply_gradient", poison)
    with pytest.raises(error, match=sentence):
        train_here(*SHORT_RUN, f"--steps={steps}")


def test_groups_without_a_signal_are_counted_and_teach_nothing(train_here, capsys):
    _, *rows = train_here(*SHORT_RUN, "--steps=2", "--rollout_dtype=float32")
    assert "In step 1 nothing was learned from rewards" in capsys.readouterr().out
    for row in rows:
        assert row["reward"] == row["groups_with_signal"] == 0
        # If all advantages are 0, only the second term of (12) is left: (1 - e_B) KL.
        # On a fresh batch both factors are only rounding, about 1e-6.
        assert row["loss"] < 1e-9
        # A larger gradient would matter, because AdamW divides by |gradient| + 1e-8.
        assert row["grad_norm"] < 1e-6
