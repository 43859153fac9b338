"""What the losses and the divergence should be, in plain Python: floats, loops, `math`.

Values are added up one token at a time, and gradients are derived by hand. Nothing here
is taken from loss.py or experiments/objectives.py, and torch is not imported, so a
mistake would have to be made twice to go unnoticed.

`oracle` gives the loss of a whole batch by the name of its objective, and the gradient
with respect to log pi_theta of the sampled tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

Matrix = list[list[float]]  # [N][T]
# What one token adds to the loss, and the derivative of that with respect to its logp.
Term = tuple[float, float]


class Token(NamedTuple):
    """A token of a response, and all that an objective may look at."""

    row: int
    column: int
    logp: float
    logp_behavior: float
    advantage: float
    logp_prox: float
    kl: float

    @property
    def log_ratio(self) -> float:
        return self.logp - self.logp_behavior

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)


def oracle(
    name: str,
    logp: Matrix,
    logp_behavior: Matrix,
    advantage: Matrix,
    mask: list[list[bool]],
    *,
    logp_prox: Matrix | None = None,
    kl: Matrix | None = None,
    **hyper_parameters: float | str,
) -> tuple[float, Matrix]:
    """The loss of the whole batch, and its gradient with respect to logp, [N][T].

    logp_prox is logp where it is left out. With kl, P3O takes that for its divergence.
    """
    tokens = []
    for row, row_mask in enumerate(mask):
        for column, is_token in enumerate(row_mask):
            if is_token:
                token = Token(
                    row=row,
                    column=column,
                    logp=logp[row][column],
                    logp_behavior=logp_behavior[row][column],
                    advantage=advantage[row][column],
                    logp_prox=(logp_prox or logp)[row][column],
                    kl=kl[row][column] if kl else math.nan,
                )
                tokens.append(token)
    if kl:
        hyper_parameters["kl_estimator"] = "given"
    terms = LOSSES[name](tokens, **hyper_parameters)
    loss = math.fsum(value for value, _ in terms)
    gradient = [[0.0] * len(row_mask) for row_mask in mask]
    for token, (_, derivative) in zip(tokens, terms, strict=True):
        gradient[token.row][token.column] = derivative
    return loss, gradient


def mean_over_tokens(terms: list[Term]) -> list[Term]:
    return [
        (value / len(terms), derivative / len(terms)) for value, derivative in terms
    ]


# The quantities of P3O


def effective_sample_size(log_ratios: list[float]) -> float:
    """mean(rho)^2 / mean(rho^2). Divided by the largest, no ratio overflows."""
    largest = max(log_ratios)
    ratios = [math.exp(log_ratio - largest) for log_ratio in log_ratios]
    mean = math.fsum(ratios) / len(ratios)
    mean_square = math.fsum(ratio**2 for ratio in ratios) / len(ratios)
    return mean**2 / mean_square


def divergence_term(p: float, b: float) -> float:
    """What a token of probabilities p and b adds to KL(p || b)."""
    if p == 0:
        return 0.0
    return p * math.log(p / b)


def divergence(p: list[float], b: list[float], listed: int) -> float:
    """KL(p || b) over the first `listed` tokens and one bucket for all others."""
    terms = [divergence_term(p[token], b[token]) for token in range(listed)]
    if listed < len(p):
        terms.append(divergence_term(math.fsum(p[listed:]), math.fsum(b[listed:])))
    return math.fsum(terms)


def divergence_gradient(p: list[float], b: list[float], listed: int) -> list[float]:
    """The gradient of `divergence` with respect to the logits of p = softmax(logits).

    d p_u / d logit_v = p_u (1[u = v] - p_v), and the derivative of p log(p / b) with
    respect to p is log(p / b) + 1. The sum over u is p_v (log(p_v / b_v) - KL) for a
    listed v. A token of the bucket has the bucket's ratio in place of its own.
    """
    kl = divergence(p, b, listed)
    gradient = []
    for v in range(len(p)):
        if v < listed:
            log_ratio = math.log(p[v] / b[v])
        else:
            log_ratio = math.log(math.fsum(p[listed:]) / math.fsum(b[listed:]))
        gradient.append(p[v] * (log_ratio - kl))
    return gradient


# The objectives


def p3o(
    tokens: list[Token], *, ess: float | None = None, kl_estimator: str = "is"
) -> list[Term]:
    """Equation (12) of arXiv 2605.12380."""
    if ess is None:
        ess = effective_sample_size([token.log_ratio for token in tokens])
    terms = []
    for token in tokens:
        x = token.log_ratio
        if kl_estimator == "is":
            kl = token.ratio * x - token.ratio + 1
            kl_derivative = token.ratio * x
        elif kl_estimator == "k3":
            kl = x + 1 / token.ratio - 1
            kl_derivative = 1 - 1 / token.ratio
        else:
            # A given KL is a function of other log-probabilities than the sampled one.
            kl = token.kl
            kl_derivative = 0.0
        weight = min(token.ratio, ess) * token.advantage
        value = -weight * token.logp + (1 - ess) * kl
        derivative = -weight + (1 - ess) * kl_derivative
        terms.append((value, derivative))
    return mean_over_tokens(terms)


def reinforce(tokens: list[Token]) -> list[Term]:
    """-A log pi_theta (Williams 1992)."""
    return mean_over_tokens(
        [(-token.advantage * token.logp, -token.advantage) for token in tokens]
    )


def pessimistic(ratio: float, advantage: float, low: float, high: float) -> Term:
    """min(ratio A, clip(ratio, 1 - low, 1 + high) A), and its derivative.

    The derivative is with respect to the logarithm of the ratio.
    """
    if advantage > 0 and ratio > 1 + high:
        return (1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage, 0.0
    return ratio * advantage, ratio * advantage


def dapo(
    tokens: list[Token], *, eps_low: float = 0.2, eps_high: float = 0.28
) -> list[Term]:
    """arXiv 2503.14476, equation 8."""
    terms = []
    for token in tokens:
        gain, slope = pessimistic(token.ratio, token.advantage, eps_low, eps_high)
        terms.append((-gain, -slope))
    return mean_over_tokens(terms)


def grpo(tokens: list[Token], *, eps: float = 0.2) -> list[Term]:
    """arXiv 1707.06347, equation 7, as a mean over tokens."""
    return dapo(tokens, eps_low=eps, eps_high=eps)


def gspo(
    tokens: list[Token], *, eps_low: float = 3e-4, eps_high: float = 4e-4
) -> list[Term]:
    """arXiv 2507.18071, equations 5 and 7: one ratio for a whole response."""
    responses: dict[int, list[Token]] = {}
    for token in tokens:
        responses.setdefault(token.row, []).append(token)
    terms = []
    for response in responses.values():
        length = len(response)
        ratio = math.exp(math.fsum(token.log_ratio for token in response) / length)
        parts = [
            pessimistic(ratio, token.advantage, eps_low, eps_high) for token in response
        ]
        gain = math.fsum(value for value, _ in parts) / length / len(responses)
        slope = math.fsum(slope for _, slope in parts) / length / len(responses)
        # The response's ratio is a geometric mean, which each logp moves by 1 / length.
        terms += [(-gain / length, -slope / length)] * length
    return terms


def tis(tokens: list[Token], *, C: float = 2.0) -> list[Term]:
    """arXiv 1802.01561: a score function with a truncated ratio as its weight."""
    terms = []
    for token in tokens:
        weight = min(token.ratio, C) * token.advantage
        terms.append((-weight * token.logp, -weight))
    return mean_over_tokens(terms)


def cispo(tokens: list[Token], *, eps_high: float = 4.0) -> list[Term]:
    """arXiv 2506.13585, equations 4 and 5, without a lower bound."""
    return tis(tokens, C=1 + eps_high)


def decoupled(tokens: list[Token], *, eps: float = 0.2, c_w: float = 5.0) -> list[Term]:
    """arXiv 2110.00641, with a capped weight."""
    terms = []
    for token in tokens:
        weight = min(math.exp(token.logp_prox - token.logp_behavior), c_w)
        ratio = math.exp(token.logp - token.logp_prox)
        gain, slope = pessimistic(ratio, token.advantage, eps, eps)
        terms.append((-weight * gain, -weight * slope))
    return mean_over_tokens(terms)


def m2po(tokens: list[Token], *, tau: float = 0.04) -> list[Term]:
    """arXiv 2510.01161: the tokens that moved furthest away from pi_b are dropped."""
    squares = sorted(
        token.log_ratio**2 for token in tokens if token.advantage * token.log_ratio > 0
    )
    # Equal squares go together: the largest one goes with all that are equal to it.
    while squares and math.fsum(squares) / len(squares) > tau:
        squares = [square for square in squares if square < squares[-1]]
    largest_kept = squares[-1] if squares else 0.0
    terms = []
    for token in tokens:
        moves_away = token.advantage * token.log_ratio > 0
        weight = token.ratio * token.advantage
        if moves_away and token.log_ratio**2 > largest_kept:
            weight = 0.0
        terms.append((-weight, -weight))
    return mean_over_tokens(terms)


LOSSES: dict[str, Callable[..., list[Term]]] = {
    "p3o": p3o,
    "reinforce": reinforce,
    "grpo": grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "tis": tis,
    "decoupled": decoupled,
    "m2po": m2po,
}
