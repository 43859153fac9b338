"""P3O's loss (Fakoor, Aubry, Stranges, Smola, arXiv 2605.12380), and those it is compared with.

B is the batch of one optimizer step: its response tokens, of all micro-batches, on all ranks. A_t
is the advantage, pi_b what really sampled (temperature, top-p, rounding), sg stops the gradient.

    (1)  rho_t = pi_theta(y_t | x, y_<t) / pi_b(y_t | x, y_<t)         policy ratio
    (2)  e_B   = mean_B[rho]^2 / mean_B[rho^2], in [1/|B|, 1]          effective sample size
    (3)  L_pg  = -mean_B[sg(min(rho_t, e_B)) A_t log pi_theta(y_t)]    capped score function
    (4)  L_kl  =  mean_B[KL(pi_theta || pi_b)]                         off-policy regularizer
    (5)  L     =  L_pg + (1 - e_B) L_kl                                e_B is a constant here

Fresh batch: e_B near 1, loose cap, no KL: REINFORCE with a baseline. Stale batch: e_B falls, the
cap tightens, the KL pulls back to pi_b. e_B is measured; nothing is left to set.

Every tensor is response-aligned, [B, T]; mask (bool) says which tokens count, the rest may hold
anything; advantage is [B] or [B, T]. A loss is the SUM over the tokens given, over the batch's
token_count: added over micro-batches and ranks it is the batch's; so are the stats. What only the
whole batch knows is a keyword; left out, the tensors given are the batch. Demo: python loss.py.
"""

import torch
from torch import Tensor

Count = float | Tensor | None  # of the whole batch; None: the tensors given are the batch
Loss = tuple[Tensor, dict[str, Tensor]]  # [] and its statistics, each []
MAX_LOG_RATIO = 82.0  # nats: e^82 * 82, the largest weight here, still fits float32 gradients


def group_advantage(reward: Tensor, scale: bool = True) -> Tensor:
    """A = reward - mean of its group, over the group's standard deviation if scale. [P, G]."""
    if reward.shape[-1] < 2:
        raise ValueError(f"a group needs 2 or more responses to be compared: {tuple(reward.shape)}")
    reward = reward - reward[..., :1]  # [P, G]; so that equal rewards give exactly 0 below
    advantage = reward - reward.mean(dim=-1, keepdim=True)  # [P, G]
    if scale:  # sample std, n - 1
        advantage = advantage / (reward.std(dim=-1, keepdim=True) + 1e-6)  # [P, G]
    return advantage


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """e_B (2), float64 []: 1 for equal ratios, 1/|B| for one dominant token, ~ 1/(1 + chi^2)."""
    check_rows(torch.isfinite(log_ratio) | ~mask, "a log-ratio is not finite")
    if not mask.any():
        raise ValueError("no response tokens: the effective sample size of nothing is undefined")
    log_ratio = log_ratio.detach()[mask].double()  # [|B|]; detached: e_B is a constant in (5)
    ratio = (log_ratio - log_ratio.max()).exp()  # [|B|]; (2) cannot see a common factor, exp can
    return (ratio.mean() ** 2 / (ratio**2).mean()).clamp(max=1.0)  # (2) e_B, []; rounding: <= 1


def p3o_loss(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    ess: Count = None, token_count: Count = None, kl_estimator: str = "k3",
) -> Loss:  # fmt: skip
    """P3O (5). Hyper-parameters: none. By (3) a high-ratio token weighs e_B: bounded, never zero.
    With k3, grad L = -mean_B[(min(rho, e_B) A - (1 - e_B)(1 - 1/rho)) grad log pi_theta]."""
    logp, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    ratio = log_ratio.exp()  # (1) rho_t, [B, T]
    if ess is None:  # without tokens (a part of a batch) every sum below is empty, whatever e_B
        ess = effective_sample_size(log_ratio, mask) if mask.any() else 0.0  # (2) e_B, []
    ess = torch.as_tensor(ess, dtype=ratio.dtype, device=ratio.device).detach()  # []
    weight = torch.minimum(ratio, ess).detach()  # (3) sg(min(rho_t, e_B)), [B, T]
    policy = -weight * advantage * logp  # (3) [B, T]
    kl = KL_ESTIMATORS[kl_estimator](log_ratio)  # (4) [B, T]
    loss = policy + (1 - ess) * kl  # (5) [B, T]
    return finish(loss, ratio > ess, log_ratio, mask, n, kl)


# (4) from the tokens at hand, which pi_b drew. k3, as published, has mean chi^2(pi_b || pi_theta) -
# KL(pi_b || pi_theta): the KL of (4) only near rho = 1. "is" (importance-weighted) and its gradient
# are unbiased for (4). No clamp: it would end the pull, or (1/rho alone) reverse it, far from pi_b.
KL_ESTIMATORS = {
    "k3": lambda log_ratio: log_ratio + torch.expm1(-log_ratio),  # gradient weight 1 - 1/rho
    "is": lambda log_ratio: log_ratio.exp() * log_ratio - torch.expm1(log_ratio),  # rho log rho
}


def prepare(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, token_count: Count = None
) -> tuple[Tensor, Tensor, Tensor, Count]:
    """-> log pi_theta, log rho, A, each float64 [B, T] and 0 where masked; and token_count."""
    if token_count is None and not mask.any():
        raise ValueError("no response tokens and no token_count: a mean over nothing is undefined")
    advantage = advantage if advantage.dim() == 2 else advantage[:, None].expand_as(mask)  # [B, T]
    # where() comes before any arithmetic, as 0 * NaN = NaN; float64 costs nothing beside logits.
    logp = torch.where(mask, logp, 0.0).double()  # [B, T]
    logp_behavior = torch.where(mask, logp_behavior.detach(), 0.0).double()  # [B, T]
    advantage = torch.where(mask, advantage.detach(), 0.0).double()  # [B, T]
    log_ratio = logp - logp_behavior  # log rho_t, [B, T]
    check_rows(log_ratio.abs() <= MAX_LOG_RATIO, f"a log-ratio is not within {MAX_LOG_RATIO} nats")
    return logp, log_ratio, advantage, int(mask.sum()) if token_count is None else token_count


def finish(
    loss: Tensor, cut: Tensor, log_ratio: Tensor, mask: Tensor, n: Count,
    kl: Tensor | None = None, count: Count = None,
) -> Loss:  # fmt: skip
    """-> sum of loss [B, T] / (count or n), stats. cut: where ratio or gradient is cut, [B, T]."""
    check_rows(torch.isfinite(loss) | ~mask, "a loss is not finite (is the advantage?)")
    total = torch.where(mask, loss, 0.0).sum() / (n if count is None else count)  # []
    kl = KL_ESTIMATORS["k3"](log_ratio) if kl is None else kl  # [B, T], as are the stats' means
    stats = {"kl": kl, "capped": cut.double(), "ratio": log_ratio.exp()}
    stats = {k: (torch.where(mask, v, 0.0).sum() / n).detach() for k, v in stats.items()}  # []
    return total, {"loss": total.detach()} | stats


def check_rows(good: Tensor, what: str) -> None:
    """Stop at the first sequence with a token that is not good: [B, T]. No NaN goes on."""
    if not good.all():
        row = int((~good).any(dim=-1).nonzero()[0])
        raise FloatingPointError(f"{what} in sequence {row}: are tokens aligned, weights in sync?")


def reinforce(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    token_count: Count = None,
) -> Loss:  # fmt: skip
    """-A log pi (Williams 1992). Hyper-parameters: none. The ratio is not looked at. (From here on
    what P3O is compared with: rho is to pi_b, means are over the tokens of B, unless said.)"""
    logp, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    return finish(-advantage * logp, torch.zeros_like(mask), log_ratio, mask, n)


def grpo(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    eps: float = 0.2, token_count: Count = None,
) -> Loss:  # fmt: skip
    """dapo with eps_low = eps_high = eps (PPO, 1707.06347 eq. 7; GRPO, 2402.03300 eq. 3, takes the
    mean over responses of the mean over each one's tokens, and adds a KL to a fixed reference)."""
    eps = {"eps_low": eps, "eps_high": eps}
    return dapo(logp, logp_behavior, advantage, mask, **eps, token_count=token_count)


def dapo(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    eps_low: float = 0.2, eps_high: float = 0.28, token_count: Count = None,
) -> Loss:  # fmt: skip
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) (2503.14476 eq. 8, token mean). A token
    with rho > 1 + eps_high has gradient zero if A > 0, and the unbounded weight rho if A < 0."""
    _, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    loss, cut = surrogate(log_ratio.exp(), advantage, eps_low, eps_high)  # [B, T]
    return finish(loss, cut, log_ratio, mask, n)


def surrogate(
    ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic choice, and where it fell on the clipped side: gradient zero. [B, T]."""
    free, clipped = ratio * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage  # [B, T]
    return -torch.minimum(free, clipped), clipped < free


def gspo(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    eps_low: float = 3e-4, eps_high: float = 4e-4, token_count: Count = None,
    sequence_count: Count = None,
) -> Loss:  # fmt: skip
    """dapo with one ratio a sequence, exp(mean_t log rho_t) (2507.18071 eq. 5, 7). The mean is over
    sequences of the mean over each one's tokens. The whole sequence is cut, or none of it."""
    _, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]
    ratio = (log_ratio.sum(dim=1, keepdim=True) / length).exp().expand_as(mask)  # [B, T]
    loss, cut = surrogate(ratio, advantage, eps_low, eps_high)  # [B, T]
    count = max(int(mask.any(dim=1).sum()), 1) if sequence_count is None else sequence_count
    return finish(loss / length, cut, log_ratio, mask, n, count=count)


def cispo(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    eps_high: float = 4.0, token_count: Count = None,
) -> Loss:  # fmt: skip
    """tis with C = 1 + eps_high (MiniMax-M1, 2506.13585 eq. 4, 5; no lower bound, no value given:
    4 makes C 5, ScaleRL's and TRL's; TRL's epsilon_high is C itself)."""
    return tis(logp, logp_behavior, advantage, mask, C=1 + eps_high, token_count=token_count)


def tis(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    C: float = 2.0, token_count: Count = None,
) -> Loss:  # fmt: skip
    """-sg(min(rho, C)) A log pi (IMPALA, 1802.01561, with C = 1; RLHF stacks truncate pi_old/pi_b
    at 2 and keep PPO's clip: the same at the first update). A high-ratio token weighs C."""
    logp, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    ratio = log_ratio.exp()  # [B, T]
    loss = -ratio.clamp(max=C).detach() * advantage * logp  # [B, T]
    return finish(loss, ratio > C, log_ratio, mask, n)


def decoupled(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    eps: float = 0.2, c_w: float = 5.0, logp_prox: Tensor | None = None,
    token_count: Count = None,
) -> Loss:  # fmt: skip
    """min(pi_prox / pi_b, c_w) times grpo's loss in pi_theta / pi_prox, pi_prox the policy before
    the first update on this rollout batch (None: this is it). 2110.00641 has no c_w, and a moving
    average for pi_prox; c_w is AReaL's, which drops tokens above it: here they weigh c_w."""
    _, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    logp_prox = (logp if logp_prox is None else logp_prox).detach()  # [B, T]
    behavior = prepare(logp_prox, logp_behavior, advantage, mask, n)[1].exp()  # [B, T]
    ratio = prepare(logp, logp_prox, advantage, mask, n)[1].exp()  # [B, T]
    loss, cut = surrogate(ratio, advantage, eps, eps)  # [B, T]
    return finish(behavior.clamp(max=c_w) * loss, cut | (behavior > c_w), log_ratio, mask, n)


def m2po(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor, *,
    tau: float = 0.04, cutoff: float | None = None, token_count: Count = None,
) -> Loss:  # fmt: skip
    """-rho A, but of the tokens that move away from pi_b (A log rho > 0) those with the largest
    (log rho)^2 are dropped, until its mean over the rest of them is at most tau (2510.01161)."""
    _, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    cutoff = m2po_cutoff(log_ratio, advantage, mask, tau) if cutoff is None else cutoff
    cut = (advantage * log_ratio > 0) & (log_ratio**2 > cutoff)  # [B, T]
    return finish(torch.where(cut, 0.0, -log_ratio.exp() * advantage), cut, log_ratio, mask, n)


def m2po_cutoff(log_ratio: Tensor, advantage: Tensor, mask: Tensor, tau: float) -> float:
    """Not the mean over all of B, as tokens that cannot be dropped could hold that above tau; nor
    with dropped tokens counted at the cutoff, as in the authors' code, against their paper."""
    away = mask & (advantage * log_ratio > 0)  # [B, T]
    square = log_ratio.detach()[away].double().square().sort().values  # [M]
    square = torch.cat([square.new_zeros(1), square, square.new_tensor([torch.inf])])  # [M + 2]
    mean = square.cumsum(0) / torch.arange(len(square), device=square.device).clamp(min=1)  # grows
    dropped = square[mean > tau][0]  # []; the smallest of them, inf if none; equals share its fate
    return float((square[square < dropped][-1] + dropped) / 2)  # halfway: safe from rounding


OBJECTIVES = dict(p3o=p3o_loss, reinforce=reinforce, grpo=grpo, dapo=dapo, gspo=gspo, cispo=cispo)
OBJECTIVES |= dict(decoupled=decoupled, tis=tis, m2po=m2po)


def batch_quantities(
    name: str, log_ratio: Tensor, advantage: Tensor, mask: Tensor, **hyper: float | str
) -> dict[str, Count]:
    """The keywords that OBJECTIVES[name] needs from the whole batch: all of its tokens, [B, T]."""
    quantities = {"token_count": int(mask.sum())}
    if name == "p3o":
        quantities["ess"] = effective_sample_size(log_ratio, mask)
    if name == "gspo":
        quantities["sequence_count"] = int(mask.any(dim=1).sum())
    if name == "m2po":
        tau, advantage = hyper.get("tau", 0.04), advantage.reshape(len(mask), -1)  # [B, 1 or T]
        quantities["cutoff"] = m2po_cutoff(log_ratio, advantage, mask, tau)
    return quantities


if __name__ == "__main__":
    from experiments.objectives import main

    main()
