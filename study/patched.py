"""train.py but for one thing that no objective can reach.

    python study/patched.py raw_logprobs --temperature 1.2 --out_dir runs/raw

The first word is a name of PATCHES; the flags are train.py's. One rank only.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it at its import
import torch
import vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import policy
import train
from study import ablations
from support.command import parse_flags, run_script


def raw_logprobs() -> None:
    """log pi_b as vLLM records it by default: before temperature, top-p and top-k.

    The samples are the same, but no objective can see that they are off-policy. The
    authors' public code leaves vLLM at this default; that their published runs did so
    is an inference.
    """

    class RawLLM(vllm.LLM):
        def __init__(self, model: str, **options: Any) -> None:
            super().__init__(model, **options | {"logprobs_mode": "raw_logprobs"})

    vllm.LLM = RawLLM  # rollout.py imports it when it builds its engine


def kl_at_rollout_temperature() -> None:
    """The KL of (12) between pi_b and pi_theta at the rollouts' temperature.

    It then measures how stale the rollouts are, and not how hot. The ratio stays that
    of the policy at its own temperature.
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
    """No optimizer step on a batch in which all advantages are 0.

    The KL alone would move the policy there.
    """
    update = train.update

    def update_where_signal(*arguments: Any) -> dict[str, float]:
        _, optimizer, _, rollouts, rows, *_ = arguments
        if rollouts.advantage[rows].any():
            return update(*arguments)
        with patch.object(optimizer, "step"):
            return update(*arguments)

    train.update = update_where_signal


def ess_used() -> None:
    """The metrics also have `ess_used`, which an ablation had in place of e_B.

    It is the last one of an update. `ess` stays e_B over tokens.
    """
    p3o, update = ablations.p3o, train.update
    used = []

    def p3o_and_tell(*arguments: Any) -> torch.Tensor:
        used.append(arguments[-1])
        return p3o(*arguments)

    def update_and_tell(*arguments: Any) -> dict[str, float]:
        return update(*arguments) | {"ess_used": used[-1]}

    ablations.p3o = p3o_and_tell
    train.update = update_and_tell


CHANGES = (raw_logprobs, kl_at_rollout_temperature, step_where_signal, ess_used)
PATCHES = {change.__name__: change for change in CHANGES}

if __name__ == "__main__":
    PATCHES[sys.argv.pop(1)]()
    run_script(train.main)
