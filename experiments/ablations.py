"""P3O with a part taken out or replaced: what are the cap, the KL and e_B good for?

    torchrun train.py --objective experiments.ablations:cap_without_kl --lag 16
    torchrun train.py --objective experiments.ablations:k3 --temperature 1.4

They take the tensors of loss.p3o_loss, and the keywords that the trainer hands to it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loss import (
    KL_ESTIMATORS,
    Batch,
    Loss,
    Objective,
    batch_mean,
    check_tokens,
    p3o_loss,
    token_count_and_ess_of,
    token_count_of,
)


def cap_without_kl_loss(
    *tensors: Tensor, kl: Tensor | None = None, **batch: Any
) -> Loss:
    """(12) without its second term: the ratio is capped at e_B, nothing pulls back."""
    logp = tensors[0]
    return p3o_loss(*tensors, kl=torch.zeros_like(logp), **batch)


def kl_without_cap_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    ess: Tensor,
    token_count: int,
) -> Loss:
    """(12) with rho in place of min(rho, e_B). As in p3o_loss, a KL may be left out."""
    logp, log_ratio, advantage = check_tokens(logp, logp_behavior, advantage, mask)
    ratio = log_ratio.exp().detach()
    if kl is None:
        kl = KL_ESTIMATORS["is"](log_ratio)
    loss = -ratio * advantage * logp + (1 - ess) * kl
    return batch_mean(loss, {"capped": torch.zeros_like(mask)}, mask, token_count)


def clamped_k3_loss(*tensors: Tensor, kl: Tensor | None = None, **batch: Any) -> Loss:
    """(12) with the KL exactly as the authors' code estimates it: k3 with a clamp.

    1/rho is clamped to e^-10 .. e^10. A token that pi_theta has made rarer than that is
    no longer pulled back to pi_b but pushed away from it, with weight 1 - e_B.
    """
    _, log_ratio, _ = check_tokens(*tensors)
    clamped = log_ratio + torch.expm1((-log_ratio).clamp(-10, 10))
    return p3o_loss(*tensors, kl=clamped, **batch)


def k3_loss(*tensors: Tensor, kl: Tensor | None = None, **batch: Any) -> Loss:
    """(12) with the KL estimated from the sampled token by k3, without the authors'
    clamp.
    """
    _, log_ratio, _ = check_tokens(*tensors)
    return p3o_loss(*tensors, kl=KL_ESTIMATORS["k3"](log_ratio), **batch)


def is_loss(*tensors: Tensor, kl: Tensor | None = None, **batch: Any) -> Loss:
    """(12) with the KL estimated from the sampled token, without bias."""
    _, log_ratio, _ = check_tokens(*tensors)
    return p3o_loss(*tensors, kl=KL_ESTIMATORS["is"](log_ratio), **batch)


def given_level(batch: Batch, level: float) -> dict[str, Any]:
    """A constant in place of e_B."""
    return {"token_count": batch.token_count, "ess": level}


class Replayed:
    """Another run's e_B, update by update, in place of the batch's own.

    The level and the trend are those of a real run; only whether this batch deserves it
    is not. `path` is a JSON list with one e_B an update. Not for a resumed run.
    """

    def __init__(self) -> None:
        self.updates = 0

    def __call__(self, batch: Batch, path: str) -> dict[str, Any]:
        recorded = json.loads(Path(path).read_text())
        self.updates += 1
        return {"token_count": batch.token_count, "ess": recorded[self.updates - 1]}


def p3o_with_given_ess(*tensors: Tensor, **keywords: Any) -> Loss:
    """(12), without the keywords that say where its e_B comes from."""
    keywords = {k: v for k, v in keywords.items() if k not in ("level", "path")}
    return p3o_loss(*tensors, **keywords)


cap_without_kl = Objective(cap_without_kl_loss, token_count_and_ess_of, takes_kl=True)
kl_without_cap = Objective(kl_without_cap_loss, token_count_and_ess_of, takes_kl=True)
clamped_k3 = Objective(clamped_k3_loss, token_count_and_ess_of)
k3 = Objective(k3_loss, token_count_and_ess_of)
importance_sampled = Objective(is_loss, token_count_and_ess_of)
# Nearly as in the authors' code, which sums over the ranks of a micro-batch; here it is
# of each rank alone. --micro_batch_tokens has to make several of a batch.
ess_of_micro_batch = Objective(p3o_loss, token_count_of, takes_kl=True)
fixed_ess = Objective(p3o_with_given_ess, given_level, {"level": 1.0}, takes_kl=True)
yoked_ess = Objective(p3o_with_given_ess, Replayed(), {"path": ""}, takes_kl=True)
