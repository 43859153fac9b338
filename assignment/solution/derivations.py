"""The reference of starter/derivations.py."""

import math

from torch import Tensor


def ess_of_variation(variation: float) -> float:
    # mean[rho^2] = mean[rho]^2 + var[rho] = mean[rho]^2 (1 + CV^2)
    return 1 / (1 + variation**2)


def ess_with_one_outlier(token_count: int, ratio: float) -> float:
    mean = (token_count - 1 + ratio) / token_count
    mean_square = (token_count - 1 + ratio**2) / token_count
    return mean**2 / mean_square


def ess_of_policies(policy: Tensor, behavior: Tensor) -> float:
    # E_b[rho] = sum b (pi / b) = 1, and E_b[rho^2] = sum b (pi / b)^2 = 1 + chi^2
    return 1 / float((policy**2 / behavior).sum())


def token_weight(ratio: float, advantage: float, ess: float) -> float:
    # The derivative of rho log rho - rho + 1 with respect to log rho is rho log rho.
    return min(ratio, ess) * advantage - (1 - ess) * ratio * math.log(ratio)


def kl_gradient(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    log_ratio = logp - logp_behavior
    kl = (logp.exp() * log_ratio).sum()
    return logp.exp() * (log_ratio - kl)
