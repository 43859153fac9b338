r"""P3O with one element removed or replaced, to see what the cap, the KL and e_B do.

    python train.py --objective study.ablations:cap_without_kl --lag 16
    python train.py --objective study.ablations:fixed_ess \
        --objective_args level=0.9

Each function takes the five arguments of `loss.p3o` and returns the loss of each token,
[N, T]. (11) and (12) are equations of arXiv 2605.12380.
"""

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
    to pi_b. If this is so for all prompts of a batch, the gradient is 0.
    """
    kl = torch.where(advantage != 0, kl, 0.0)
    return p3o(logp, logp_behavior, advantage, kl, e_b)


# Estimates of the KL from only the sampled token. They ignore the argument `kl`.


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

    The authors' code has this estimate, but with a clamp. It is meant for tokens
    sampled by pi_theta. Over tokens sampled by pi_b its mean is
    chi^2(pi_b || pi_theta) - KL(pi_b || pi_theta). The weight that it gives a token,
    1 - 1/rho, is unbounded if the token has become rare.
    """
    log_rho = logp - logp_behavior
    estimate = log_rho + (-log_rho).exp() - 1
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


def ess_of_responses(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return (12) with an e_B that is measured over responses instead of tokens.

    The ratio of a response is the product of its tokens' ratios. Padding has a log rho
    of 0. The function sees only one micro-batch of one rank, so B must be a single
    micro-batch on one rank.
    """
    log_rho = (logp - logp_behavior).sum(dim=1)  # [N]
    sums = ratio_sums(log_rho, torch.ones_like(log_rho).bool())
    e_b = effective_sample_size(sums).item()
    return p3o(logp, logp_behavior, advantage, kl, e_b)
