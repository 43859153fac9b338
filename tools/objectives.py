"""Objectives that P3O is compared with. Each docstring names the source.

    python train.py --objective tools.objectives:dapo
    python train.py --objective tools.objectives:tis --objective_args C=1

An objective takes the five arguments of `loss.p3o` and returns the loss of each token,
[N, T]. None here uses the last two, the KL and e_B. rho is pi_theta / pi_b, and sg
is the stop-gradient. Padding is 0 in all arguments, and train.py leaves its loss out of
the sum.

m2po and bapo need all tokens of the batch B at once. But a call sees only one
micro-batch of one rank, so for them B must be a single micro-batch on a single rank.
The gradient of all the other objectives is the same however B is divided.

Numbered points in a docstring are deviations from the source, or differences between
sources. pi_before is the policy before the first update on a rollout batch.
"""

import math
from typing import Any

import torch
from torch import Tensor


def clipped_loss(
    ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """Return PPO's -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A): [N, T].

    advantage is [N, T]. ratio is [N, T], or [N, 1] if each response has a single ratio.
    Raises ValueError if eps_low or eps_high is negative.
    """
    if min(eps_low, eps_high) < 0:
        raise ValueError(f"{eps_low=}, {eps_high=}: both must be at least 0")
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def response_log_ratio(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum of log rho over each response and its length, [N, 1] each.

    Every token of a response has the response's advantage, and padding has 0, so the
    tokens of a response are those whose advantage is not 0. A response whose advantage
    is 0 has no gradient, and its ratio does not matter: the sum is 0 and the length 1.
    """
    is_token = advantage != 0  # [N, T]
    log_rho = torch.where(is_token, logp - logp_behavior, 0.0)
    length = is_token.sum(dim=1, keepdim=True).clamp(min=1)
    return log_rho.sum(dim=1, keepdim=True), length


def dapo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Tensor:
    """Return GRPO's loss with a clip range that is wider above 1: [N, T].

    DAPO, arXiv 2503.14476, equation 8. A token with rho > 1 + eps_high has no gradient
    if A > 0. If A < 0 its weight is rho A, which has no bound.

    1. The paper's constraint, which replaces groups whose responses are all right or
       all wrong, is left out.
    """
    rho = (logp - logp_behavior).exp()
    return clipped_loss(rho, advantage, eps_low, eps_high)


def gspo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Tensor:
    """Return DAPO's loss with one ratio per response, exp(mean_t log rho_t): [N, T].

    GSPO, arXiv 2507.18071, equations 5 and 7.

    1. The paper averages over responses. Here, as everywhere in this repository, the
       mean is over tokens, so a long response counts more than a short one.
    """
    log_rho, length = response_log_ratio(logp, logp_behavior, advantage)
    ratio = (log_rho / length).exp()  # [N, 1]
    return clipped_loss(ratio, advantage, eps_low, eps_high)


def tis(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    C: float = 2.0,
) -> Tensor:
    """Return -sg(min(rho, C)) A log pi_theta, truncated importance sampling: [N, T].

    IMPALA, arXiv 1802.01561, where C is 1.

    1. Other RLHF code truncates pi_before / pi_b at 2 and multiplies it by PPO's
       clipped loss in pi_theta / pi_before. The two agree at the first update on a
       rollout batch.
    """
    rho = (logp - logp_behavior).exp()
    return -rho.clamp(max=C).detach() * advantage * logp


def cispo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    eps_high: float = 4.0,
) -> Tensor:
    """Return -sg(min(rho, 1 + eps_high)) A log pi_theta: [N, T].

    CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5, without their lower bound.
    The paper gives no value for eps_high. The default of 4 makes the cap 5, as in
    ScaleRL. TRL's epsilon_high is the cap itself.
    """
    return tis(logp, logp_behavior, advantage, C=1 + eps_high)


def m2po(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    tau: float = 0.04,
) -> Tensor:
    """Return -rho A, and 0 for the tokens that have moved most: [N, T].

    M2PO, arXiv 2510.01161, Algorithm 1, as shown on its authors' page. The candidates
    are the tokens that have moved in the direction of their advantage: A > 0 and
    rho > 1, or A < 0 and rho < 1. Candidates are dropped, the one with the largest
    (log rho)^2 first, until the mean of (log rho)^2 over the candidates that are left
    is at most tau. B must be a single micro-batch.

    1. The authors' code does not drop tokens one by one. It clips rho at exp(-b) and
       exp(b), with b such that the mean of min((log rho)^2, b^2) is at most tau, for
       each micro-batch and rank.
    2. AReaL's code takes pi_before / pi_b, drops tokens whatever the sign of A, and
       always keeps one.
    """
    log_rho = logp - logp_behavior
    moved = (advantage * log_rho).detach() > 0  # [N, T]
    squares, order = log_rho.detach()[moved].square().sort()  # [M] each
    count = torch.arange(1, len(squares) + 1, device=squares.device)
    # The mean of the smallest squares can only grow as more of them are added.
    is_below = squares.cumsum(dim=0) / count <= tau
    stays = torch.ones_like(moved)
    stays[moved] = torch.empty_like(is_below).scatter(0, order, is_below)
    return -log_rho.where(stays, 0.0).exp() * advantage * stays


def a3po(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    alpha: float = 0.5,
    eps: float = 0.4,
    cap: float = 5.0,
) -> Tensor:
    """Return PPO's clipped loss around a policy between pi_b and pi_theta: [N, T].

    A-3PO, arXiv 2512.06547, as in AReaL's code and documentation. It is decoupled PPO,
    arXiv 2110.00641, but the policy in between, pi_prox, needs no pass over the batch:

        log pi_prox = log pi_b + alpha (sg(log pi_theta) - log pi_b)
        loss = pi_prox / pi_b times the clipped loss in r = pi_theta / pi_prox

    alpha is (d - 1) / d for data that are d updates old. For d = 1 it is 0, and the
    loss is GRPO's. The loss clips rho^(1 - alpha), so the older the data, the wider
    the range of rho. As in AReaL, a token with pi_prox / pi_b above cap has no loss.
    eps and cap are those of AReaL's example, whose d is at most 2.

    1. Here alpha is one number for all data of a run, even for the first, which are
       fresher. In AReaL each token has its own alpha.
    2. For fresh data the paper's pi_prox is pi_theta, and nothing is clipped.
    3. AReaL's example also normalizes advantages over the batch.
    """
    log_rho = logp - logp_behavior
    log_weight = alpha * log_rho.detach()  # log(pi_prox / pi_b)
    weight = log_weight.exp()
    loss = clipped_loss((log_rho - log_weight).exp(), advantage, eps, eps)
    return torch.where(weight <= cap, weight * loss, 0.0)


def bapo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    target: float = 0.5,
    low: float = 0.6,
    low_max: float = 0.9,
    low_step: float = 0.05,
    high: float = 1.2,
    high_max: float = 3.0,
    high_step: float = 0.1,
) -> Tensor:
    """Return the clipped loss, with bounds that balance A > 0 and A < 0: [N, T].

    BAPO, arXiv 2510.18927, equation 8, as in its authors' code and README. low and high
    are bounds on rho itself. A token contributes min(rho, high) A if A > 0, and
    max(rho, low) |A| if A < 0. First low rises, then high, until the tokens with A > 0
    contribute at least the share `target` of the sum. Raising low drops more tokens
    with A < 0, but it also raises their contribution to this sum, so low rises either
    to its maximum or not at all. B must be a single micro-batch.

    1. `target` is a share of the sum, as in the authors' README. The target in their
       code is a quotient: the contribution of A > 0 divided by that of A < 0. Their
       YAML file sets this quotient to 1, which is a share of 0.5, and their script sets
       it to 0.5. On fresh data whose responses are equally long, the share is 0.5 up to
       rounding, because the advantages of a group add up to 0. Rounding then decides
       whether the bounds move.
    2. In the paper the target is 0.4, high rises before low, in steps of 0.05 and 0.02,
       and each contribution is multiplied by pi_b. Without that factor 0.4 is nearly
       always reached, and the bounds stay where they start.
    3. The ranges of low and high are the paper's, and their steps are those of the
       authors' script. In that script low goes from 0.8 to 0.95, and high ends at 2.0.
       In the YAML file low ends at 0.8, and high ends at 2.0 and rises in steps of
       0.05. The authors' code sets the bounds for each micro-batch, over all ranks.
    4. The authors' code is built on verl, whose bound of 3 |A| on the loss of a token
       with A < 0 is left out here.
    """
    rho = (logp - logp_behavior).exp()

    def share() -> Tensor:
        bounded = torch.where(advantage > 0, rho.clamp(max=high), rho.clamp(min=low))
        counted = bounded.detach() * advantage
        return counted.clamp(min=0).sum() / counted.abs().sum()

    # If all advantages are 0, the share is NaN, and neither bound moves.
    while share() < target and low < low_max:
        low = min(low + low_step, low_max)
    while share() < target and high < high_max:
        high = min(high + high_step, high_max)
    return clipped_loss(rho, advantage, 1 - low, high - 1)


def asymre(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    delta: float = -0.1,
) -> Tensor:
    """Return -(A - delta) log pi_theta, REINFORCE with a lower baseline: [N, T].

    AsymRE, arXiv 2506.20520, has A = r - (V + delta), where V is the mean of the group.
    A group whose rewards are all equal therefore has a signal too: to imitate pi_b. The
    default delta is that of Trinity-RFT and, according to a secondary account, of the
    paper, whose rewards are -1 and 1.

    1. A is divided by the group's standard deviation, unless scale_advantage is
       false. delta is subtracted afterwards.

    Padding has the gradient delta here, which train.py leaves out of its sum.
    """
    return -(advantage - delta) * logp


def rec(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    eps: float = 0.2,
) -> Tensor:
    """Return -A log pi_theta, and 0 for tokens without a gradient in GRPO: [N, T].

    REC-OneSide-NoIS, arXiv 2509.24203, as in its authors' code in Trinity-RFT. It is
    clipping without importance weights.

    1. A is divided by the group's standard deviation, unless scale_advantage is
       false.
    """
    rho = (logp - logp_behavior).exp()
    outside = (advantage > 0) & (rho > 1 + eps) | (advantage < 0) & (rho < 1 - eps)
    return -advantage * logp * ~outside


def opmd(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    tau: float = 0.2,
) -> Tensor:
    """Return -A log pi_theta + tau / 2 (log rho)^2: [N, T].

    Kimi k1.5's online policy mirror descent, arXiv 2501.12599, as Trinity-RFT has it
    for arXiv 2509.24203. Trinity-RFT's coefficient of 0.1 is tau / 2.

    1. Kimi squares the sum of log rho over a response. Trinity-RFT's k2 loss squares
       the log rho of each token, as here. The loss that Trinity-RFT calls opmd is a
       different one, -A log pi / (1 + tau).
    2. A is divided by the group's standard deviation, as in `rec`.
    """
    return -advantage * logp + tau / 2 * (logp - logp_behavior).square()


def sapo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    """Return -4 / tau sigmoid(tau (rho - 1)) A, a smooth form of clipping: [N, T].

    SAPO, arXiv 2511.20347, as in AReaL's code. tau is tau_pos if A > 0, else tau_neg.
    The weight of a token is A at rho = 1 and almost 0 above rho = 10.

    1. The paper averages over responses. Here the mean is over tokens.
    2. Trinity-RFT multiplies grad log pi_theta by the sigmoid itself, which grows with
       rho.
    """
    rho = (logp - logp_behavior).exp()

    def gate(tau: float) -> Tensor:
        return 4 / tau * (tau * (rho - 1)).sigmoid()

    return -torch.where(advantage > 0, gate(tau_pos), gate(tau_neg)) * advantage


def ipo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    eps: float = 0.3,
    kl_tau: float = 0.0,
) -> Tensor:
    """Return -rho A, and 0 for a token that moved by more than eps: [N, T].

    IPO is the default of prime-rl v0.9.0, whose pull requests 3418 and 3586 give its
    form and its defaults. A token is dropped if |pi_theta - pi_b| > eps, whatever the
    sign of A. kl_tau adds kl_tau (log rho)^2 for every token, dropped or not.

    1. A is divided by the group's standard deviation, unless scale_advantage is
       false.
    2. A dropped token's -rho A is exactly 0, even if its rho overflows.
    """
    log_rho = logp - logp_behavior
    is_near = (logp.exp() - logp_behavior.exp()).abs() <= eps  # [N, T]
    loss = -log_rho.where(is_near, 0.0).exp() * advantage * is_near
    return loss + kl_tau * log_rho.square()


def sequence_mask(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    cap: float = 3.0,
) -> Tensor:
    """Return -sg(w) A log pi_theta, and 0 for a response with w > cap: [N, T].

    w is the product of rho over the tokens of a response. This is TRL's default
    correction (1.16.0, vllm_importance_sampling_mode "sequence_mask"), which has no
    lower bound: a response that has become unlikely fades out.

    1. In TRL, w is the product of pi_before / pi_b, and it multiplies DAPO's loss in
       pi_theta / pi_before. Here w is the product of pi_theta / pi_b. The two agree at
       the first update.
    2. TRL divides the sum by the mean token count of all updates on a rollout batch.
       Here, as everywhere in this repository, it is divided by the token count of B.
    """
    log_w, _ = response_log_ratio(logp.detach(), logp_behavior, advantage)
    w = log_w.exp()  # [N, 1]
    return -torch.where(w <= cap, w, 0.0) * advantage * logp


def dppo_tv(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    eps: float = 0.2,
    cap: float = 20.0,
) -> Tensor:
    """Return -sg(min(rho, cap)) A log pi_theta, and 0 for dropped tokens: [N, T].

    DPPO-Binary-TV, arXiv 2602.04879, as in verl 0.9.1 (compute_policy_loss_dppo_tv). A
    token with A > 0 is dropped if pi_theta - pi_b > eps, and one with A < 0 if
    pi_b - pi_theta > eps. So |pi_theta - pi_b| is bounded in A's direction.

    1. verl's function falls back to a cap of 20, the default here. Its configuration
       sets clip_ratio_c to 3, which replaces that 20, and its example script sets
       10,000. A comment in this script says that the paper recommends a large cap.
    2. eps is verl's default clip_ratio. verl's example script has 0.15.
    3. verl clamps log rho to [-20, 20] first, which only raises weights below 2e-9.
    """
    rho = (logp.detach() - logp_behavior).exp()
    moved = (logp.exp() - logp_behavior.exp()) * advantage.sign()
    return -rho.clamp(max=cap) * (moved <= eps) * advantage * logp


def icepop(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """Return -sg(rho) A log pi_theta, and 0 if rho is outside [low, high]: [N, T].

    IcePop, arXiv 2510.18855, with the paper's bounds, as in slime (icepop_function) and
    verl 0.9.1 (rollout_is_threshold "0.5_5.0"). Both keep a rho that equals a bound.

    1. The paper's rho is that of trainer and engine with the same weights, and
       multiplies PPO's clipped loss in pi_theta / pi_before. Here rho is
       pi_theta / pi_b, as in rLLM. The two agree at the first update on a rollout
       batch.
    2. Bounds differ: prime-rl has 0.2 and 5, and slime has 0 and 2 by default.
    """
    rho = (logp.detach() - logp_behavior).exp()
    weight = torch.where((rho >= low) & (rho <= high), rho, 0.0)
    return -weight * advantage * logp


def vespo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """Return -sg(w^k exp(lambda (1 - w))) A log pi_theta: [N, T].

    w is the product of rho over the tokens of a response. VESPO, arXiv 2602.10693,
    Appendix I, as in its authors' verl recipe and TRL 1.16.0. k_pos and lambda_pos are
    for A > 0, the other two for A < 0. The weight is 1 at w = 1. It is greatest at
    w = k / lambda, which is 2/3 for A > 0 and 3/2 for A < 0.

    1. The paper does not clamp log w. Both codes clamp it to [log 1e-8, 20], and so
       does this function. They also clamp each token's log rho to [-20, 20].
    2. The docstring of the authors' recipe names other defaults (1.5, 4 and 2.5 for
       lambda_pos, k_neg and lambda_neg) than its code, whose defaults are used here.
    """
    log_w, _ = response_log_ratio(logp.detach(), logp_behavior, advantage)
    log_w = log_w.clamp(math.log(1e-8), 20.0)  # [N, 1]

    def phi(k: float, lambda_: float) -> Tensor:
        return (k * log_w + lambda_ * (1 - log_w.exp())).exp()

    weight = torch.where(advantage > 0, phi(k_pos, lambda_pos), phi(k_neg, lambda_neg))
    return -weight * advantage * logp


def opsm(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    *_: Any,
    eps: float = 0.2,
    delta: float = 0.5,
) -> Tensor:
    """Return GRPO's loss, and 0 for a response with A < 0 that became unlikely: [N, T].

    Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, equation 9, as in TRL
    1.16.0 (get_off_policy_mask) and slime (compute_opsm_mask). A response with A < 0 is
    dropped if the mean of log(pi_b / pi_theta) over its tokens exceeds delta.

    1. In both TRL and slime the mask is off by default. TRL's documentation gives 0.5
       as an example of delta, which is the default here. slime's default is 1e-4.
    2. As in TRL, pi_b is what the engine sampled from. slime's pi_b is pi_before, as
       the trainer computes it, unless slime is told otherwise.
    3. A dropped response adds exactly 0, even if one of its ratios overflows.
    """
    log_rho = logp - logp_behavior
    total, length = response_log_ratio(logp.detach(), logp_behavior, advantage)
    is_near = (advantage >= 0) | (-total / length <= delta)  # [N, T]
    rho = log_rho.where(is_near, 0.0).exp()
    return clipped_loss(rho, advantage, eps, eps) * is_near
