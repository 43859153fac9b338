"""P3O, the loss (Fakoor, Aubry, Stranges, Smola, arXiv 2605.12380), and what it is compared with.

B is the batch of one optimizer step: all its response tokens, of all micro-batches on all ranks.
A_t is the advantage, pi_b the policy that sampled (temperature, top-p and rounding included), and
sg stops the gradient:

    (1)  rho_t = pi_theta(y_t | x, y_<t) / pi_b(y_t | x, y_<t)            policy ratio
    (2)  e_B   = mean_B[rho]^2 / mean_B[rho^2]                            effective sample size
    (3)  L_pg  = -mean_B[sg(min(rho_t, e_B)) A_t log pi_theta(y_t)]       capped score function
    (4)  L_kl  =  mean_B[KL(pi_theta || pi_b)]                            off-policy regularizer
    (5)  L     =  L_pg + (1 - e_B) L_kl                                   e_B is a constant here

Fresh batch: e_B is near 1, the cap is loose, the KL has no weight: REINFORCE with a baseline.
Stale batch: e_B falls towards 1/|B|, the cap tightens, the KL pulls back. Nothing else to set.

Conventions. Every tensor is response-aligned, [B, T]; mask is bool and says what counts; masked
positions may hold anything. advantage is [B] or [B, T]. An objective returns (loss, stats): the SUM
over the tokens it was given, divided by the token_count of the batch, so that adding over
micro-batches and ranks gives the batch's value; stats add up in the same way. What only the whole
batch knows (token_count, e_B, ...) comes in as a keyword, from batch_quantities(); left out, it is
computed from the tensors given, which then are the whole batch. `python loss.py` shows it at work.
"""

import sys

import torch
from torch import Tensor

MAX_LOG_RATIO = 82.0  # nats; beyond it rho log rho, a gradient here, nears the end of float32


def group_advantage(reward: Tensor, scale: bool = True) -> Tensor:
    """A = reward - group mean, over the group's standard deviation (n - 1) if scale. [P, G]."""
    if reward.shape[-1] < 2:
        raise ValueError(f"group_advantage needs 2 or more responses a prompt, got {reward.shape}")
    advantage = reward - reward.mean(dim=-1, keepdim=True)  # [P, G]
    if scale:  # equal rewards: 0 / 1e-6 = 0, so such a group has no say in (3)
        advantage = advantage / (reward.std(dim=-1, keepdim=True) + 1e-6)  # [P, G]
    return advantage


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """e_B, equation (2), in (0, 1]: 1 for equal ratios, 1/|B| for one token with it all."""
    check_rows(torch.isfinite(log_ratio) | ~mask, "the log-ratio is not finite")
    if not mask.any():
        raise ValueError("no response tokens: e_B of an empty batch is not defined")
    log_ratio = log_ratio.detach()[mask].double()  # [N], N = |B|; e_B is a constant of (5)
    ratio = (log_ratio - log_ratio.max()).exp()  # [N]; e_B does not see a common factor, exp does
    ess = ratio.mean() ** 2 / (ratio**2).mean()  # (2) []
    return ess.clamp(max=1.0)  # above 1 only by rounding


def p3o_loss(
    logp, logp_behavior, advantage, mask, *, ess=None, token_count=None, kl_estimator="k3"
):
    """P3O, equations (1) to (5). Hyper-parameters: none.

    A high-ratio token keeps the weight e_B: less the staler the batch, never zero, never more.
    """
    logp, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    ratio = log_ratio.exp()  # (1) rho_t, [B, T]
    if ess is None:  # an empty part of a batch has nothing for e_B to weigh
        ess = effective_sample_size(log_ratio, mask) if mask.any() else 0.0  # (2) e_B, []
    ess = torch.as_tensor(ess, dtype=ratio.dtype, device=ratio.device).detach()  # []
    weight = torch.minimum(ratio, ess).detach()  # (3) sg(min(rho_t, e_B)), [B, T]
    policy = -weight * advantage * logp  # (3) [B, T]
    kl = KL_ESTIMATORS[kl_estimator](log_ratio)  # (4) [B, T]
    loss = policy + (1 - ess) * kl  # (5) [B, T]
    return finish(loss, log_ratio, ratio > ess, mask, n, kl=kl)


def k3(log_ratio: Tensor) -> Tensor:
    """(4) log rho + 1/rho - 1, as the authors' code has it; gradient weight 1 - 1/rho.

    It estimates KL(pi_theta || pi_b) only near rho = 1: the tokens are drawn from pi_b, where its
    mean is chi^2(pi_b || pi_theta) - KL(pi_b || pi_theta).
    """
    return log_ratio + torch.expm1(-log_ratio)  # [B, T]; no clamp: it would flip the gradient


def importance_sampled(log_ratio: Tensor) -> Tensor:
    """(4) rho log rho - rho + 1 >= 0: unbiased for KL(pi_theta || pi_b), and so is its gradient."""
    return log_ratio.exp() * log_ratio - torch.expm1(log_ratio)  # [B, T]; weight rho log rho


KL_ESTIMATORS = {"k3": k3, "is": importance_sampled}


# What the objectives share: inputs made safe, and the sum over the tokens given / token_count.


def prepare(logp, logp_behavior, advantage, mask, token_count):
    """-> logp [B, T], log rho [B, T] (both 0 where masked), A [B, 1] or [B, T], token_count."""
    if token_count is None:
        token_count = int(mask.sum())
        if token_count == 0:
            raise ValueError("no response tokens and no token_count: the mean is not defined")
    single = torch.promote_types(logp.dtype, torch.float32)  # bf16 has 3 digits: no ratios from it
    logp = torch.where(mask, logp.to(single), 0.0)  # [B, T]; before arithmetic, so NaN cannot leak
    logp_behavior = torch.where(mask, logp_behavior.detach().to(single), 0.0)  # [B, T]
    log_ratio = logp - logp_behavior  # [B, T]
    check_rows(torch.isfinite(log_ratio), "the log-ratio is not finite")
    check_rows(log_ratio.abs() <= MAX_LOG_RATIO, f"a log-ratio is beyond {MAX_LOG_RATIO} nats")
    advantage = advantage.detach().double()  # [B] or [B, T]
    advantage = advantage[:, None] if advantage.dim() == 1 else torch.where(mask, advantage, 0.0)
    # float64 from here on: [B, T] numbers are nothing beside the logits, and rounding is settled.
    return logp.double(), log_ratio.double(), advantage, token_count


def finish(loss, log_ratio, capped, mask, n, kl=None, loss_count=None):
    """[B, T] losses -> (their sum over the tokens given / n, stats that add up over micro-batches).

    capped marks the tokens whose ratio the objective cuts or whose gradient it zeroes.
    """
    check_rows(torch.isfinite(loss) | ~mask, "the loss is not finite (is the advantage?)")
    kl = k3(log_ratio) if kl is None else kl  # [B, T]
    total = torch.where(mask, loss, 0.0).sum() / (n if loss_count is None else loss_count)  # []
    means = {"kl": kl, "capped": capped, "ratio": log_ratio.exp()}
    stats = {k: (torch.where(mask, v, 0).sum() / n).detach() for k, v in means.items()}
    return total, {"loss": total.detach(), **stats}


def check_rows(good: Tensor, what: str) -> None:
    """Stop at the first sequence with a bad token: a NaN that goes on ruins the weights."""
    if not good.all():
        row = int((~good).any(dim=-1).nonzero()[0])
        raise FloatingPointError(
            f"{what} in sequence {row} of these {len(good)}: look for misaligned tokens, stale "
            "weights in the engine, or behaviour log-probabilities of another distribution"
        )


# The objectives P3O is compared with. All average over the tokens of the batch, gspo excepted.


def reinforce(logp, logp_behavior, advantage, mask, *, token_count=None):
    """-A log pi (Williams 1992). Hyper-parameters: none. A high ratio is not even looked at."""
    logp, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    return finish(-advantage * logp, log_ratio, torch.zeros_like(mask), mask, n)


def grpo(logp, logp_behavior, advantage, mask, *, eps=0.2, token_count=None):
    """-min(rho A, clip(rho, 1-eps, 1+eps) A) (PPO, arXiv 1707.06347 (7); GRPO, 2402.03300 (3))."""
    return dapo(
        logp, logp_behavior, advantage, mask, eps_low=eps, eps_high=eps, token_count=token_count
    )


def dapo(logp, logp_behavior, advantage, mask, *, eps_low=0.2, eps_high=0.28, token_count=None):
    """-min(rho A, clip(rho, 1-eps_low, 1+eps_high) A) (arXiv 2503.14476 (8))."""
    _, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    loss, capped = clipped_surrogate(log_ratio.exp(), advantage, eps_low, eps_high)
    return finish(loss, log_ratio, capped, mask, n)


def clipped_surrogate(ratio, advantage, eps_low, eps_high):
    """PPO's pessimistic bound, [B, T], and where it cuts: the gradient is zero there."""
    free, clipped = ratio * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage
    return -torch.minimum(free, clipped), clipped < free


def gspo(
    logp,
    logp_behavior,
    advantage,
    mask,
    *,
    eps_low=3e-4,
    eps_high=4e-4,
    token_count=None,
    sequence_count=None,
):
    """-min(s A, clip(s) A), s = exp(mean_t log rho_t) (arXiv 2507.18071 (5), (7))."""
    _, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    if sequence_count is None:
        sequence_count = max(int(mask.any(dim=1).sum()), 1)
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]
    ratio = (log_ratio.sum(dim=1, keepdim=True) / length).exp()  # s, [B, 1]
    loss, capped = clipped_surrogate(ratio.expand_as(mask), advantage, eps_low, eps_high)
    return finish(loss / length, log_ratio, capped, mask, n, loss_count=sequence_count)


def cispo(logp, logp_behavior, advantage, mask, *, eps_high=4.0, token_count=None):
    """-sg(min(rho, 1 + eps_high)) A log pi (MiniMax-M1, arXiv 2506.13585 (4), (5))."""
    return tis(logp, logp_behavior, advantage, mask, cap=1 + eps_high, token_count=token_count)


def tis(logp, logp_behavior, advantage, mask, *, cap=2.0, token_count=None):
    """-sg(min(rho, cap)) A log pi (IMPALA, arXiv 1802.01561)."""
    logp, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    ratio = log_ratio.exp()  # [B, T]
    weight = ratio.clamp(max=cap).detach()  # [B, T]
    return finish(-weight * advantage * logp, log_ratio, ratio > cap, mask, n)


def decoupled(
    logp,
    logp_behavior,
    advantage,
    mask,
    *,
    eps=0.2,
    cap=5.0,
    logp_prox=None,
    token_count=None,
):
    """min(pi_prox / pi_b, cap) times PPO's loss in pi_theta / pi_prox (arXiv 2110.00641)."""
    logp_prox = (logp if logp_prox is None else logp_prox).detach()  # [B, T]
    _, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    behavior = prepare(logp_prox, logp_behavior, advantage, mask, n)[1].exp()  # [B, T]
    ratio = prepare(logp, logp_prox, advantage, mask, n)[1].exp()  # [B, T]
    loss, capped = clipped_surrogate(ratio, advantage, eps, eps)
    weight = behavior.clamp(max=cap)  # [B, T]
    return finish(weight * loss, log_ratio, capped | (behavior > cap), mask, n)


def m2po(logp, logp_behavior, advantage, mask, *, tau=0.04, cutoff=None, token_count=None):
    """-rho A on the tokens kept (arXiv 2510.01161)."""
    _, log_ratio, advantage, n = prepare(logp, logp_behavior, advantage, mask, token_count)
    if cutoff is None:
        cutoff = second_moment_cutoff(log_ratio, advantage, mask, tau)
    dropped = (advantage * log_ratio > 0) & (log_ratio.detach() ** 2 > cutoff)  # [B, T]
    loss = torch.where(dropped, 0.0, -log_ratio.exp() * advantage)  # [B, T]
    return finish(loss, log_ratio, dropped, mask, n)


def second_moment_cutoff(log_ratio, advantage, mask, tau):
    """The (log rho)^2 above which M2PO drops the tokens that move away from pi_b."""
    away = mask & (advantage * torch.where(mask, log_ratio, 0.0) > 0)  # [B, T]
    square = (log_ratio.detach().double()[away] ** 2).sort().values  # [M]
    count = torch.arange(1, len(square) + 1, device=square.device)  # [M]
    fits = square.cumsum(0) / count <= tau  # [M]; running means of a sorted list only grow
    if fits.all():
        return float("inf")
    first_dropped = square[int(fits.sum())]  # []
    kept = square[square < first_dropped]  # [K]; equal tokens share one fate
    last_kept = kept[-1] if len(kept) else torch.zeros_like(first_dropped)  # []
    return float(last_kept + (first_dropped - last_kept) / 4)  # between them: safe from rounding


OBJECTIVES = {
    "p3o": p3o_loss,
    "reinforce": reinforce,
    "grpo": grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "decoupled": decoupled,
    "tis": tis,
    "m2po": m2po,
}


def batch_quantities(name, log_ratio, advantage, mask, **hyper) -> dict:
    """The keywords that objective `name` needs from the WHOLE batch, given all of it, [B, T]."""
    quantities = {"token_count": int(mask.sum())}
    if name == "p3o":
        quantities["ess"] = effective_sample_size(log_ratio, mask)
    if name == "gspo":
        quantities["sequence_count"] = int(mask.any(dim=1).sum())
    if name == "m2po":
        advantage = advantage[:, None] if advantage.dim() == 1 else advantage
        tau = hyper.get("tau", m2po.__kwdefaults__["tau"])
        quantities["cutoff"] = second_moment_cutoff(log_ratio, advantage, mask, tau)
    return quantities


if __name__ == "__main__":
    sys.exit("the demonstration is not written yet")
