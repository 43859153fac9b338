"""What the losses and the divergence should be, in plain Python: floats, loops, `math`.

Values are worked out one token at a time, and gradients are derived by hand. Nothing
here is taken from loss.py or experiments/objectives.py, and torch is not imported, so a
mistake would have to be made twice to go unnoticed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple


class Token(NamedTuple):
    """A token of a response, and all that an objective may look at."""

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
    """The loss of a token, and the derivatives of the sum of all losses."""

    value: float
    to_logp: float
    to_kl: float = 0.0


# e_B and the divergence


def effective_sample_size(log_ratios: list[float]) -> float:
    """mean(rho)^2 / mean(rho^2). Divided by the largest, no ratio overflows."""
    largest = max(log_ratios)
    ratios = [math.exp(log_ratio - largest) for log_ratio in log_ratios]
    mean = math.fsum(ratios) / len(ratios)
    mean_square = math.fsum(ratio**2 for ratio in ratios) / len(ratios)
    return mean**2 / mean_square


def in_bucket(p: list[float], listed: int) -> list[float]:
    """The probabilities of the first `listed` tokens, and of all others together."""
    return [*p[:listed], math.fsum(p[listed:])] if listed < len(p) else p


def divergence(p: list[float], b: list[float], listed: int) -> float:
    """KL(p || b) over the first `listed` tokens and one bucket for all others."""
    pairs = zip(in_bucket(p, listed), in_bucket(b, listed), strict=True)
    return math.fsum(p * math.log(p / b) for p, b in pairs)


def divergence_gradient(p: list[float], b: list[float], listed: int) -> list[float]:
    """The gradient of `divergence` with respect to the logits of p = softmax(logits).

    d p_u / d logit_v = p_u (1[u = v] - p_v), and the derivative of p log(p / b) with
    respect to p is log(p / b) + 1. The sum over u is p_v (log(p_v / b_v) - KL) for a
    listed v. A token of the bucket has the bucket's ratio in place of its own.
    """
    kl = divergence(p, b, listed)
    p_outcomes, b_outcomes = in_bucket(p, listed), in_bucket(b, listed)
    gradient = []
    for v in range(len(p)):
        outcome = min(v, listed)
        log_ratio = math.log(p_outcomes[outcome] / b_outcomes[outcome])
        gradient.append(p[v] * (log_ratio - kl))
    return gradient


# The objectives: a term for each token of a batch


def p3o(tokens: list[Token], e_b: float) -> list[Term]:
    """Equation (12) of arXiv 2605.12380."""
    terms = []
    for token in tokens:
        weight = min(token.ratio, e_b) * token.advantage
        value = -weight * token.logp + (1 - e_b) * token.kl
        terms.append(Term(value, to_logp=-weight, to_kl=1 - e_b))
    return terms


def reinforce(tokens: list[Token], e_b: float) -> list[Term]:
    """-A log pi_theta (Williams 1992)."""
    return [Term(-token.advantage * token.logp, -token.advantage) for token in tokens]


def pessimistic(ratio: float, advantage: float, low: float, high: float) -> Term:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A).

    The derivative is with respect to the logarithm of the ratio.
    """
    if advantage > 0 and ratio > 1 + high:
        return Term(-(1 + high) * advantage, 0.0)
    if advantage < 0 and ratio < 1 - low:
        return Term(-(1 - low) * advantage, 0.0)
    return Term(-ratio * advantage, -ratio * advantage)


def dapo(
    tokens: list[Token], e_b: float, *, eps_low: float = 0.2, eps_high: float = 0.28
) -> list[Term]:
    """arXiv 2503.14476, equation 8."""
    return [
        pessimistic(token.ratio, token.advantage, eps_low, eps_high) for token in tokens
    ]


def grpo(tokens: list[Token], e_b: float, *, eps: float = 0.2) -> list[Term]:
    """arXiv 1707.06347, equation 7, as a mean over tokens."""
    return dapo(tokens, e_b, eps_low=eps, eps_high=eps)


def gspo(
    tokens: list[Token], e_b: float, *, eps_low: float = 3e-4, eps_high: float = 4e-4
) -> list[Term]:
    """arXiv 2507.18071, equations 5 and 7, as a mean over tokens.

    A log rho moves the ratio of its response by 1 / length, and that ratio is in the
    losses of `length` tokens: the derivative is that of a single loss.
    """
    responses: dict[int, list[float]] = {}
    for token in tokens:
        responses.setdefault(token.response, []).append(token.log_ratio)
    terms = []
    for token in tokens:
        log_ratios = responses[token.response]
        ratio = math.exp(math.fsum(log_ratios) / len(log_ratios))
        terms.append(pessimistic(ratio, token.advantage, eps_low, eps_high))
    return terms


def tis(tokens: list[Token], e_b: float, *, C: float = 2.0) -> list[Term]:
    """arXiv 1802.01561: a score function with a truncated ratio as its weight."""
    terms = []
    for token in tokens:
        weight = min(token.ratio, C) * token.advantage
        terms.append(Term(-weight * token.logp, -weight))
    return terms


def cispo(tokens: list[Token], e_b: float, *, eps_high: float = 4.0) -> list[Term]:
    """arXiv 2506.13585, equations 4 and 5, without a lower bound."""
    return tis(tokens, e_b, C=1 + eps_high)


LOSSES: dict[str, Callable[..., list[Term]]] = {
    "p3o": p3o,
    "reinforce": reinforce,
    "grpo": grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "tis": tis,
}
