"""train.py with a part of P3O taken out: what are the cap and the KL each good for?

    python experiments/ablations.py cap_without_kl --lag 16 --out_dir runs/cap
    python experiments/ablations.py fixed_ess --objective_args level=0.9 --lag 16
    python experiments/ablations.py raw_logprobs --temperature 0.6

The first argument is the name of a function below: raw_logprobs, which all objectives can do with,
or a loss that takes the place of --objective. The other ones are those of train.py.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import loss
from loss import KL_ESTIMATORS, Count, Loss, p3o_loss, tis


def cap_without_kl(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    ess: Count, token_count: Count = None,
) -> Loss:  # fmt: skip
    """Equation (3) alone: the ratio is capped at e_B, nothing pulls back to pi_b."""
    return tis(logp, logp_behavior, advantage, mask, C=float(ess), token_count=token_count)


def kl_without_cap(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    ess: Count = None, token_count: Count = None,
) -> Loss:  # fmt: skip
    """Equation (5) with rho in place of min(rho, e_B)."""
    free, _ = tis(logp, logp_behavior, advantage, mask, C=float("inf"), token_count=token_count)
    batch = {"ess": ess, "token_count": token_count}
    pull, stats = p3o_loss(logp, logp_behavior, 0 * advantage, mask, **batch)  # (1 - e_B) L_kl
    return free + pull, stats | {"loss": (free + pull).detach(), "capped": torch.zeros_like(pull)}


def ess_of_micro_batch(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    ess: Count = None, token_count: Count = None,
) -> Loss:  # fmt: skip
    """e_B of each micro-batch, as in the authors' code: micro_batch_tokens makes several."""
    return p3o_loss(logp, logp_behavior, advantage, mask, token_count=token_count)


def fixed_ess(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    ess: Count = None, token_count: Count = None, level: float = 1.0,
) -> Loss:  # fmt: skip
    """P3O with a constant in place of e_B, such as its mean over the steps of a P3O run."""
    return p3o_loss(logp, logp_behavior, advantage, mask, ess=level, token_count=token_count)


def clamped_kl(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    ess: Count = None, token_count: Count = None,
) -> Loss:  # fmt: skip
    """1/rho in k3 clamped to e^-10 .. e^10, as in the authors' code: a token that pi_theta has made
    rarer than that is pushed away from pi_b, with weight 1 - e_B, no longer pulled."""
    batch = {"ess": ess, "token_count": token_count, "kl_estimator": "clamped"}
    return p3o_loss(logp, logp_behavior, advantage, mask, **batch)


KL_ESTIMATORS["clamped"] = lambda log_ratio: log_ratio + torch.expm1((-log_ratio).clamp(-10, 10))


def raw_logprobs() -> None:
    """log pi_b as vLLM records it by default, and with it the authors' code: before temperature,
    top-p and top-k. What is sampled is the same, but no objective sees that it is off-policy."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    class RawLLM(vllm.LLM):
        def __init__(self, model: str, **options) -> None:
            super().__init__(model, **options | {"logprobs_mode": "raw_logprobs"})

    vllm.LLM = RawLLM  # rollout.py imports it when it builds its engine


LOSSES = cap_without_kl, kl_without_cap, ess_of_micro_batch, fixed_ess, clamped_kl
NAMED = {f.__name__: f for f in (*LOSSES, raw_logprobs)}

if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in NAMED:
        sys.exit(f"ablations.py: {name!r} is none of {', '.join(NAMED)}")
    if name == "raw_logprobs":
        raw_logprobs()
    else:
        # Under its own name, so that config.json tells, and with what P3O needs of the batch.
        of_batch = loss.batch_quantities
        loss.batch_quantities = lambda _, *batch, **hyper: of_batch("p3o", *batch, **hyper)
        loss.OBJECTIVES[name] = NAMED[name]
        sys.argv.append(f"--objective={name}")
    runpy.run_path(str(Path(loss.__file__).with_name("train.py")), run_name="__main__")
