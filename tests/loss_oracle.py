"""Compute the losses and the divergence in plain Python: floats, loops and `math`.

Values are computed one token at a time, and gradients are derived by hand. Nothing here
is imported from loss.py or tools/objectives.py, and torch is not used, so a mistake
would have to be made twice to go unnoticed.
"""

import math
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple


class Token(NamedTuple):
    """A token of a response, with everything that an objective may use."""

    response: int
    logp: float
    logp_behavior: float
    advantage: float
    kl: float

    @property
    def log_ratio(self) -> float:
        return self.logp - self.logp_behavior

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)


class Term(NamedTuple):
    """The loss of a token, and the derivatives of the sum of all losses with respect
    to its log pi_theta and to its KL.
    """

    value: float
    to_logp: float
    to_kl: float = 0.0


# e_B and the divergence


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


# Objectives that need the whole batch. They return a term for each of its tokens.


def p3o(tokens: list[Token], e_b: float) -> list[Term]:
    """Return the terms of P3O: arXiv 2605.12380, equation 12."""
    terms = []
    for token in tokens:
        weight = min(token.ratio, e_b) * token.advantage
        value = -weight * token.logp + (1 - e_b) * token.kl
        terms.append(Term(value, to_logp=-weight, to_kl=1 - e_b))
    return terms


def pessimistic(ratio: float, advantage: float, low: float, high: float) -> Term:
    """Return -min(ratio A, clip(ratio, 1 - low, 1 + high) A).

    The derivative is with respect to the logarithm of the ratio.
    """
    if advantage > 0 and ratio > 1 + high:
        return Term(-(1 + high) * advantage, 0.0)
    if advantage < 0 and ratio < 1 - low:
        return Term(-(1 - low) * advantage, 0.0)
    return Term(-ratio * advantage, -ratio * advantage)


def gspo(
    tokens: list[Token], e_b: float, *, eps_low: float = 3e-4, eps_high: float = 4e-4
) -> list[Term]:
    """Return the terms of GSPO: arXiv 2507.18071, equations 5 and 7, over all tokens.

    A log rho changes the log ratio of its response by 1 / length, and that ratio occurs
    in the losses of `length` tokens, so the derivative is that of a single loss.
    """
    responses: dict[int, list[float]] = {}
    for token in tokens:
        responses.setdefault(token.response, []).append(token.log_ratio)
    terms = []
    for token in tokens:
        ratio = math.exp(fmean(responses[token.response]))
        terms.append(pessimistic(ratio, token.advantage, eps_low, eps_high))
    return terms


def m2po(tokens: list[Token], e_b: float, *, tau: float = 0.04) -> list[Term]:
    """Return the terms of M2PO: arXiv 2510.01161, Algorithm 1.

    The token that has moved farthest is dropped, one at a time.
    """
    left = [token for token in tokens if token.advantage * token.log_ratio > 0]
    left.sort(key=lambda token: abs(token.log_ratio))
    dropped = []
    while left and math.fsum(t.log_ratio**2 for t in left) > tau * len(left):
        dropped.append(left.pop())
    weights = [
        token.ratio * token.advantage * (token not in dropped) for token in tokens
    ]
    return [Term(-weight, -weight) for weight in weights]


def bapo(
    tokens: list[Token], e_b: float, *, target: float = 0.5, high_max: float = 3.0
) -> list[Term]:
    """Return the terms of BAPO (arXiv 2510.18927).

    The bounds are the first pair that meets the target, or else the last pair.
    """
    pairs = [(60 + 5 * i, 120) for i in range(7)]
    pairs += [(90, high) for high in range(130, round(100 * high_max) + 1, 10)]
    for low, high in pairs:
        positive, negative = 0.0, 0.0
        for token in tokens:
            positive += max(token.advantage, 0) * min(token.ratio, high / 100)
            negative += max(-token.advantage, 0) * max(token.ratio, low / 100)
        if positive >= target * (positive + negative):
            break
    return [dapo(token, 1 - low / 100, high / 100 - 1) for token in tokens]


# Objectives that treat each token by itself


def reinforce(token: Token) -> Term:
    """Return -A log pi_theta (Williams 1992)."""
    return Term(-token.advantage * token.logp, -token.advantage)


def dapo(token: Token, eps_low: float = 0.2, eps_high: float = 0.28) -> Term:
    """Return the term of arXiv 2503.14476, equation 8."""
    return pessimistic(token.ratio, token.advantage, eps_low, eps_high)


def grpo(token: Token, eps: float = 0.2) -> Term:
    """Return the term of arXiv 1707.06347, equation 7."""
    return dapo(token, eps, eps)


def tis(token: Token, C: float = 2.0) -> Term:
    """Return a score function weighted by a truncated ratio (arXiv 1802.01561)."""
    weight = min(token.ratio, C) * token.advantage
    return Term(-weight * token.logp, -weight)


def cispo(token: Token, eps_high: float = 4.0) -> Term:
    """Return the term of arXiv 2506.13585, equations 4 and 5, without a lower bound."""
    return tis(token, 1 + eps_high)


def a3po(token: Token, alpha: float = 0.5, eps: float = 0.4, cap: float = 5.0) -> Term:
    """Return PPO's clipped loss in rho^(1 - alpha) times rho^alpha, which is detached.

    A token whose rho^alpha exceeds the cap is dropped.
    """
    weight = token.ratio**alpha
    value, slope, _ = pessimistic(token.ratio / weight, token.advantage, eps, eps)
    return Term(weight * value, weight * slope) if weight <= cap else Term(0.0, 0.0)


def asymre(token: Token, delta: float = -0.1) -> Term:
    """Return REINFORCE with a baseline lowered by -delta (arXiv 2506.20520)."""
    return Term((delta - token.advantage) * token.logp, delta - token.advantage)


def rec(token: Token, eps: float = 0.2) -> Term:
    """Return REINFORCE on tokens for which GRPO has a gradient (arXiv 2509.24203)."""
    inside = token.advantage * token.log_ratio <= 0 or abs(token.ratio - 1) <= eps
    return Term(-token.advantage * token.logp * inside, -token.advantage * inside)


def opmd(token: Token, tau: float = 0.2) -> Term:
    """Return REINFORCE plus a squared distance to pi_b (arXiv 2501.12599)."""
    value = -token.advantage * token.logp + tau / 2 * token.log_ratio**2
    return Term(value, tau * token.log_ratio - token.advantage)


def sapo(token: Token, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Term:
    """Return the term of arXiv 2511.20347. A sigmoid s has the derivative s (1 - s)."""
    tau = tau_pos if token.advantage > 0 else tau_neg
    gate = 1 / (1 + math.exp(-tau * (token.ratio - 1)))
    slope = 4 * gate * (1 - gate) * token.ratio
    return Term(-4 / tau * gate * token.advantage, -slope * token.advantage)


def for_each_token(function: Callable[..., Term]) -> Callable[..., list[Term]]:
    """Return an objective of a batch that applies `function` to each token."""
    return lambda tokens, e_b, **options: [function(each, **options) for each in tokens]


LOSSES = {each.__name__: each for each in (p3o, gspo, m2po, bapo)}
for each in (reinforce, grpo, dapo, cispo, tis, a3po, asymre, rec, opmd, sapo):
    LOSSES[each.__name__] = for_each_token(each)
