r"""P3O with one element removed or replaced, to see what the cap, the KL and e_B do.

    python train.py --objective study.ablations:cap_without_kl --lag 16
    python train.py --objective study.ablations:fixed_ess \
        --objective_args level=0.9

Each function takes the five arguments of `loss.p3o` and returns the loss of each token,
[N, T]. (11) and (12) are equations of arXiv 2605.12380.
"""

import json
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from loss import effective_sample_size, p3o, ratio_sums

# The cap and the KL


def cap_without_kl(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) without the KL: only the cap on the ratio is left."""
    return p3o(logp, logp_behavior, advantage, torch.zeros_like(kl), e_b)


def kl_without_cap(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with rho in place of min(rho, e_B)."""
    rho = (logp - logp_behavior).exp().detach()
    return -rho * advantage * logp + (1 - e_b) * kl


def kl_where_signal(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with the KL only at tokens whose advantage is not 0.

    If all responses to a prompt are right, or all are wrong, they are not pulled back
    to pi_b. A batch without any reward therefore does not move the policy.
    """
    kl = torch.where(advantage != 0, kl, 0.0)
    return p3o(logp, logp_behavior, advantage, kl, e_b)


# Estimates of the KL from the sampled token alone. They ignore the argument `kl`.


def importance_sampled(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with the estimate rho log rho - rho + 1 in place of the KL.

    Over tokens sampled by pi_b, the mean of this estimate is KL(pi_theta || pi_b), and
    the mean of its gradient is the gradient of the KL.
    """
    log_rho = logp - logp_behavior
    rho = log_rho.exp()
    estimate = rho * log_rho - rho + 1
    return p3o(logp, logp_behavior, advantage, estimate, e_b)


def k3(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with the estimate log rho + 1/rho - 1 in place of the KL.

    This is the authors' code without its clamp. The estimate is meant for tokens
    sampled by pi_theta. Over tokens sampled by pi_b its mean is
    chi^2(pi_b || pi_theta) - KL(pi_b || pi_theta). Its pull on a token that has become
    rare, 1 - 1/rho, is unbounded.
    """
    log_rho = logp - logp_behavior
    estimate = log_rho + (-log_rho).exp() - 1
    return p3o(logp, logp_behavior, advantage, estimate, e_b)


def clamped_k3(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with the KL as the authors' code estimates it: `k3` with a clamp.

    1/rho is clamped to [e^-10, e^10]. A token that pi_theta has made rarer than that is
    no longer pulled back to pi_b but pushed further away, with weight 1 - e_B.
    """
    log_rho = logp - logp_behavior
    estimate = log_rho + (-log_rho).clamp(-10, 10).exp() - 1
    return p3o(logp, logp_behavior, advantage, estimate, e_b)


# Other numbers in place of e_B


def fixed_ess(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    e_b: float,
    *,
    level: float,
) -> Tensor:
    """Return (12) with the constant `level`, between 0 and 1, in place of e_B."""
    return p3o(logp, logp_behavior, advantage, kl, level)


def ess_where_signal(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with e_B over the tokens with an advantage; 1 if there are none.

    If all advantages are 0, the KL therefore has no weight. The function sees only one
    micro-batch of one rank, so B must be a single micro-batch on a single rank.
    """
    has_signal = advantage != 0
    e_b = ess_of((logp - logp_behavior)[has_signal]) if has_signal.any() else 1.0
    return p3o(logp, logp_behavior, advantage, kl, e_b)


def ess_of_responses(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with e_B over responses, the ratio of a response being a product.

    The product is over the tokens of a row; padding has log rho = 0. B must be a single
    micro-batch on a single rank, as in `ess_where_signal`.
    """
    log_rho = (logp - logp_behavior).sum(dim=1)  # [N]
    return p3o(logp, logp_behavior, advantage, kl, ess_of(log_rho))


def ess_of_mean_ratios(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with e_B over responses, the ratio of a response being a mean.

    The geometric mean is over the tokens of a row. A position counts as padding if both
    log pi_b and the advantage are 0 there. In a response without an advantage, a token
    of which pi_b is certain is therefore mistaken for padding. B must be a single
    micro-batch on a single rank.
    """
    length = ((logp_behavior != 0) | (advantage != 0)).sum(dim=1)  # [N]
    log_rho = (logp - logp_behavior).sum(dim=1) / length.clamp(min=1)
    return p3o(logp, logp_behavior, advantage, kl, ess_of(log_rho))


def ess_of(log_rho: Tensor) -> float:
    """Return e_B (11) of these log-ratios, which may be of tokens or of responses."""
    return effective_sample_size(
        ratio_sums(log_rho, torch.ones_like(log_rho).bool())
    ).item()


def ess_to_a_power(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    e_b: float,
    *,
    power: float,
) -> Tensor:
    """Return (12) with e_B^power, which trusts the batch less than e_B if power > 1."""
    return p3o(logp, logp_behavior, advantage, kl, e_b**power)


class RecentEss:
    """Return (12) with the mean e_B of the last `updates` updates, including this one.

    A new update is recognized by its e_B, as in `YokedEss`. A resumed run starts with
    an empty list.
    """

    def __init__(self) -> None:
        self.history: list[float] = []

    def __call__(
        self,
        logp: Tensor,
        logp_behavior: Tensor,
        advantage: Tensor,
        kl: Tensor,
        e_b: float,
        *,
        updates: float = 16,
    ) -> Tensor:
        if [e_b] != self.history[-1:]:
            self.history.append(e_b)
        level = mean(self.history[-int(updates) :])
        return p3o(logp, logp_behavior, advantage, kl, level)


recent_ess = RecentEss()


class YokedEss:
    """Return (12) with another run's e_B, update by update, in place of e_B.

    `path` is a JSON list with one e_B for each update of this run. Level and trend of
    these values are those of a real run, but they are unrelated to the batch at hand.

    A new update is recognized by its e_B, so an update may have any number of
    micro-batches. Two consecutive updates with exactly the same e_B would count as one.
    A resumed run would start the list again.
    """

    def __init__(self) -> None:
        self.last_e_b: float | None = None
        self.updates = 0

    def __call__(
        self,
        logp: Tensor,
        logp_behavior: Tensor,
        advantage: Tensor,
        kl: Tensor,
        e_b: float,
        *,
        path: str,
    ) -> Tensor:
        if e_b != self.last_e_b:
            self.last_e_b = e_b
            self.updates += 1
        recorded = json.loads(Path(path).read_text())
        return p3o(logp, logp_behavior, advantage, kl, recorded[self.updates - 1])


yoked_ess = YokedEss()
