r"""P3O with a part taken out or replaced: what are the cap, the KL and e_B good for?

    python train.py --objective study.ablations:cap_without_kl --lag 16
    python train.py --objective study.ablations:fixed_ess \
        --objective_args level=0.9

Each is a function of the five arguments of `loss.p3o`, and returns the loss of each
token, [N, T]. (12) and the other numbers are equations of arXiv 2605.12380.
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
    """(12) without its second term: the ratio is capped at e_B, nothing pulls back."""
    return p3o(logp, logp_behavior, advantage, torch.zeros_like(kl), e_b)


def kl_without_cap(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """(12) with rho in place of min(rho, e_B)."""
    rho = (logp - logp_behavior).exp().detach()
    return -rho * advantage * logp + (1 - e_b) * kl


def kl_where_signal(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """(12) with the KL only at tokens whose advantage is not 0.

    Where all responses to a prompt are right, or all are wrong, nothing pulls them back
    to pi_b. So a batch without any reward does not move the policy.
    """
    kl = torch.where(advantage != 0, kl, 0.0)
    return p3o(logp, logp_behavior, advantage, kl, e_b)


# Estimates of the KL from the sampled token. They do not look at `kl`.


def importance_sampled(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """(12) with rho log rho - rho + 1 for the KL.

    Over tokens that pi_b sampled its mean is KL(pi_theta || pi_b), and the mean of its
    gradient is the KL's.
    """
    log_rho = logp - logp_behavior
    rho = log_rho.exp()
    estimate = rho * log_rho - rho + 1
    return p3o(logp, logp_behavior, advantage, estimate, e_b)


def k3(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """(12) with log rho + 1/rho - 1 for the KL: the authors' code, but for its clamp.

    It is meant for tokens that pi_theta sampled. Over those of pi_b its mean is
    chi^2(pi_b || pi_theta) - KL(pi_b || pi_theta). Its pull on a token that has become
    rare, 1 - 1/rho, has no bound.
    """
    log_rho = logp - logp_behavior
    estimate = log_rho + (-log_rho).exp() - 1
    return p3o(logp, logp_behavior, advantage, estimate, e_b)


def clamped_k3(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """(12) with the KL exactly as the authors' code estimates it: k3 with a clamp.

    1/rho is clamped to e^-10 .. e^10. A token that pi_theta has made rarer than that is
    no longer pulled back to pi_b but pushed away from it, with weight 1 - e_B.
    """
    log_rho = logp - logp_behavior
    estimate = log_rho + (-log_rho).clamp(-10, 10).exp() - 1
    return p3o(logp, logp_behavior, advantage, estimate, e_b)


# Another number in place of e_B


def fixed_ess(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    e_b: float,
    *,
    level: float,
) -> Tensor:
    """(12) with the constant `level`, between 0 and 1, in place of e_B."""
    return p3o(logp, logp_behavior, advantage, kl, level)


def ess_where_signal(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """(12) with e_B over the tokens whose advantage is not 0; 1 if there is none.

    So without any reward the KL has no weight. It sees one micro-batch on one rank: the
    batch B has to be no more than that.
    """
    judged = advantage != 0
    e_b = ess_of((logp - logp_behavior)[judged]) if judged.any() else 1.0
    return p3o(logp, logp_behavior, advantage, kl, e_b)


def ess_of_responses(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """(12) with e_B over responses: rho of one is the product of its tokens'.

    A row is a response, and its padding has log rho = 0. B has to be one micro-batch on
    one rank, as in `ess_where_signal`.
    """
    log_rho = (logp - logp_behavior).sum(dim=1)  # [N]
    return p3o(logp, logp_behavior, advantage, kl, ess_of(log_rho))


def ess_of_mean_ratios(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """(12) with e_B over responses: rho of one is the geometric mean of its tokens'.

    What counts as padding is a place where both log pi_b and the advantage are 0. So a
    token of which pi_b is sure shortens its response, if that has no advantage. B has
    to be one micro-batch on one rank.
    """
    length = ((logp_behavior != 0) | (advantage != 0)).sum(dim=1)  # [N]
    log_rho = (logp - logp_behavior).sum(dim=1) / length.clamp(min=1)
    return p3o(logp, logp_behavior, advantage, kl, ess_of(log_rho))


def ess_of(log_rho: Tensor) -> float:
    """e_B (11) of these log-ratios, whatever they are of."""
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
    """(12) with e_B^power: above 1 it trusts the batch less, and below 1 more."""
    return p3o(logp, logp_behavior, advantage, kl, e_b**power)


class RecentEss:
    """(12) with the mean e_B of the last `updates` updates, this one included.

    A new update is known by its e_B, as in `YokedEss`. A run that is resumed begins
    anew.
    """

    def __init__(self) -> None:
        self.of_updates: list[float] = []

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
        if [e_b] != self.of_updates[-1:]:
            self.of_updates.append(e_b)
        level = mean(self.of_updates[-int(updates) :])
        return p3o(logp, logp_behavior, advantage, kl, level)


recent_ess = RecentEss()


class YokedEss:
    """(12) with another run's e_B, step by step, in place of the batch's own.

    `path` is a JSON list with one e_B an update, as many as this run has updates. Their
    level and their trend are those of a real run. Only whether this batch deserves its
    e_B is not.

    A new update is known by its e_B, so it may have any number of micro-batches. Two
    updates in a row with the very same e_B would count as one. A run that is resumed
    would start the list again.
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
