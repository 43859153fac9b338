"""Run train.py with one change that no objective can make.

    python study/patched.py raw_logprobs --temperature 1.2 --out_dir runs/raw

The first argument names a function of this file; the flags are those of train.py. Works
on one rank only.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # Importing vLLM reads it.
import torch
import vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import policy
import train
from study import ablations
from support.command import parse_flags, run_script


def raw_logprobs() -> None:
    """Record log pi_b as vLLM does by default: before temperature, top-p and top-k.

    The samples are the same, but no objective can see that they are off-policy. The
    authors' public code does not change vLLM's default; that their published runs used
    it is our inference.
    """

    class RawLLM(vllm.LLM):
        def __init__(self, model: str, **options: Any) -> None:
            super().__init__(model, **options | {"logprobs_mode": "raw_logprobs"})

    vllm.LLM = RawLLM  # rollout.py imports it when it builds its engine.


def kl_at_rollout_temperature() -> None:
    """Take the KL of (12) between pi_b and pi_theta at the temperature of the rollouts.

    The KL then measures how stale the rollouts are, and not how hot. The ratio is still
    that of the policy at its own temperature.
    """
    rollout_temperature = parse_flags(train.Config).temperature
    at_temperature = policy.token_log_probabilities

    def heated(
        hidden: torch.Tensor,
        head: torch.Tensor,
        temperature: float,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        sampled = at_temperature(hidden, head, temperature, tokens[:, :1])
        top = at_temperature(hidden, head, rollout_temperature, tokens[:, 1:])
        return torch.cat([sampled, top], dim=1)

    policy.token_log_probabilities = heated


def step_where_signal() -> None:
    """Skip the optimizer step if all advantages of the batch are 0.

    Otherwise the KL, the only term that is left, would move the policy.
    """
    update = train.update

    def update_with_signal(*arguments: Any) -> dict[str, float]:
        _, optimizer, _, rollouts, rows, *_ = arguments
        if rollouts.advantage[rows].any():
            return update(*arguments)
        with patch.object(optimizer, "step"):
            return update(*arguments)

    train.update = update_with_signal


def ess_used() -> None:
    """Log `ess_used`, the number that an ablation used in place of e_B.

    The metric `ess` is still e_B over tokens.
    """
    p3o, update = ablations.p3o, train.update
    used = []

    def recording_p3o(*arguments: Any) -> torch.Tensor:
        used.append(arguments[-1])
        return p3o(*arguments)

    def recording_update(*arguments: Any) -> dict[str, float]:
        return update(*arguments) | {"ess_used": used[-1]}

    ablations.p3o = recording_p3o
    train.update = recording_update


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
    run_script(train.main)
