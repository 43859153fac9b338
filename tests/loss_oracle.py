"""Compute P3O and the divergence in plain Python: floats, loops and `math`.

Values are computed one token at a time, and gradients are derived by hand. Nothing here
is imported from loss.py, and torch is not used, so a mistake would have to be made
twice to go unnoticed.
"""

import math
from statistics import fmean


def effective_sample_size(log_ratios: list[float]) -> float:
    """Return mean(rho)^2 / mean(rho^2).

    All ratios are divided by the largest, so that none overflows.
    """
    largest = max(log_ratios)
    ratios = [math.exp(log_ratio - largest) for log_ratio in log_ratios]
    return fmean(ratios) ** 2 / fmean(ratio**2 for ratio in ratios)


def in_bucket(p: list[float], listed: int) -> list[float]:
    """Return the probabilities of the first `listed` tokens and that of the bucket."""
    return [*p[:listed], math.fsum(p[listed:])] if listed < len(p) else p


def divergence(p: list[float], b: list[float], listed: int) -> float:
    """Return KL(p || b) over the first `listed` tokens and a bucket for all others."""
    pairs = zip(in_bucket(p, listed), in_bucket(b, listed), strict=True)
    return math.fsum(p * math.log(p / b) for p, b in pairs)


def divergence_gradient(p: list[float], b: list[float], listed: int) -> list[float]:
    """Return the gradient of `divergence` to the logits of p = softmax(logits).

    d p_u / d logit_v = p_u (1[u = v] - p_v), and the derivative of p log(p / b) with
    respect to p is log(p / b) + 1. The sum over u is p_v (log(p_v / b_v) - KL) for a
    listed v. A token in the bucket has the ratio of the bucket instead of its own.
    """
    kl = divergence(p, b, listed)
    p_outcomes, b_outcomes = in_bucket(p, listed), in_bucket(b, listed)
    gradient = []
    for v in range(len(p)):
        outcome = min(v, listed)
        log_ratio = math.log(p_outcomes[outcome] / b_outcomes[outcome])
        gradient.append(p[v] * (log_ratio - kl))
    return gradient


def p3o(
    logp: float, logp_behavior: float, advantage: float, kl: float, e_b: float
) -> tuple[float, float, float]:
    """Return the loss (12) of a token, and its derivatives in log pi_theta and the KL.

    The weight min(rho, e_B) is a constant in these derivatives.
    """
    weight = min(math.exp(logp - logp_behavior), e_b) * advantage
    return -weight * logp + (1 - e_b) * kl, -weight, 1 - e_b
