"""Four more objectives that P3O is compared with. Each names its source.

    torchrun train.py --objective experiments.objectives:dapo
    torchrun train.py --objective experiments.objectives:tis --objective_args C=1

Each is a function of the five arguments of `loss.p3o`, and returns the loss of each
token, [N, T]. None of them looks at the KL or at e_B. rho is pi_theta / pi_b.
"""

import torch
from torch import Tensor


def clipped_loss(
    ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A), PPO's clipped loss.

    ratio is [N, T], or [N, 1] where a response has one; advantage is [N, T].
    """
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def dapo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    e_b: float,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Tensor:
    """GRPO's loss with a range that is wider above: [N, T].

    DAPO, arXiv 2503.14476, equation 8, without its constraint: groups whose responses
    are all right or all wrong are not sampled again. A token with rho > 1 + eps_high
    has no gradient if A > 0, and the weight rho A, without a bound, if A < 0.
    """
    rho = (logp - logp_behavior).exp()
    return clipped_loss(rho, advantage, eps_low, eps_high)


def gspo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    e_b: float,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Tensor:
    """DAPO's loss with one ratio for a whole response, exp(mean_t log rho_t): [N, T].

    GSPO, arXiv 2507.18071, equations 5 and 7, with one deviation:

    1. The paper averages over responses. Here, as everywhere in this repository, the
       mean is over tokens, so a long response counts more than a short one.

    Every token of a response has the response's advantage, and padding has 0. So the
    tokens of a response are those whose advantage is not 0. A response whose advantage
    is 0 has no gradient, and its ratio does not matter; it comes out as 1.
    """
    counts = advantage != 0  # [N, T]
    length = counts.sum(dim=1, keepdim=True).clamp(min=1)  # [N, 1]
    log_rho = torch.where(counts, logp - logp_behavior, 0.0)
    ratio = (log_rho.sum(dim=1, keepdim=True) / length).exp()  # [N, 1]
    return clipped_loss(ratio, advantage, eps_low, eps_high)


def tis(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    e_b: float,
    *,
    C: float = 2.0,
) -> Tensor:
    """-sg(min(rho, C)) A log pi_theta, truncated importance sampling: [N, T].

    IMPALA, arXiv 1802.01561, with C = 1 there. Other RLHF code truncates pi_old / pi_b
    at 2 and keeps PPO's clip beside it, which is the same at the first update of a
    rollout batch.
    """
    rho = (logp - logp_behavior).exp()
    return -rho.clamp(max=C).detach() * advantage * logp


def cispo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    e_b: float,
    *,
    eps_high: float = 4.0,
) -> Tensor:
    """-sg(min(rho, 1 + eps_high)) A log pi_theta: [N, T].

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5, which have no lower bound and give
    no value. With 4 the cap is 5, as ScaleRL has it. TRL's epsilon_high is the cap
    itself.
    """
    return tis(logp, logp_behavior, advantage, kl, e_b, C=1 + eps_high)
