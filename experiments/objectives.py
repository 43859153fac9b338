"""Six more objectives that P3O is compared with. Each names its source.

    torchrun train.py --objective experiments.objectives:dapo

They take the tensors that loss.p3o_loss takes: log pi_theta with its gradient, log
pi_b, the advantage and the mask, [N, T] each, and return a loss and its statistics. rho
is the ratio pi_theta / pi_b, and means are over the tokens of the batch B, unless it is
said. At the bottom stands what the trainer hands to each (loss.Objective).
"""

from typing import Any

import torch
from torch import Tensor

from loss import Batch, Loss, Objective, batch_mean, check_tokens, token_count_of


def clipped_loss(
    ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic choice, and where it has no gradient: [N, T] each."""
    free = ratio * advantage
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) * advantage
    return -torch.minimum(free, clipped), clipped < free


def dapo_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    token_count: int | None = None,
) -> Loss:
    """grpo with a range that is wider above: -min(rho A, clip(rho, 1 - eps_low, 1 +
    eps_high) A).

    DAPO, arXiv 2503.14476, equation 8, without its constraint: groups whose responses
    are all right or all wrong are not sampled again. A token with rho > 1 + eps_high
    has no gradient if A > 0, and the unbounded weight rho A if A < 0.
    """
    _, log_ratio, advantage = check_tokens(logp, logp_behavior, advantage, mask)
    loss, cut = clipped_loss(log_ratio.exp(), advantage, eps_low, eps_high)
    return batch_mean(loss, {"capped": cut}, mask, token_count)


def gspo_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    token_count: int | None = None,
    sequence_count: int | None = None,
) -> Loss:
    """dapo with one ratio a response, exp(mean_t log rho_t), and one verdict on it.

    GSPO, arXiv 2507.18071, equations 5 and 7. The mean is over responses, of the mean
    over each one's tokens; capped is a share of responses. sequence_count is how many
    the whole batch has.
    """
    _, log_ratio, advantage = check_tokens(logp, logp_behavior, advantage, mask)
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)  # [N, 1]
    ratio = (log_ratio.sum(dim=1, keepdim=True) / length).exp()  # [N, 1]
    loss, cut = clipped_loss(ratio.expand_as(mask), advantage, eps_low, eps_high)
    if sequence_count is None and (token_count is not None or mask.any()):
        sequence_count = max(1, int(mask.any(dim=1).sum()))
    # The losses of a response's tokens, divided by its length, add up to its mean.
    return batch_mean(loss / length, {"capped": cut / length}, mask, sequence_count)


def cispo_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    eps_high: float = 4.0,
    token_count: int | None = None,
) -> Loss:
    """-sg(min(rho, 1 + eps_high)) A log pi_theta.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5, which have no lower bound and give
    no value. 4 makes the cap 5, ScaleRL's; TRL's epsilon_high is the cap itself.
    """
    cap = 1 + eps_high
    return tis_loss(
        logp, logp_behavior, advantage, mask, C=cap, token_count=token_count
    )


def tis_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    C: float = 2.0,
    token_count: int | None = None,
) -> Loss:
    """-sg(min(rho, C)) A log pi_theta, truncated importance sampling.

    IMPALA, arXiv 1802.01561, with C = 1. RLHF stacks truncate pi_old / pi_b at 2 and
    keep PPO's clip beside it, which is the same at the first update of a batch.
    """
    logp, log_ratio, advantage = check_tokens(logp, logp_behavior, advantage, mask)
    ratio = log_ratio.exp()
    loss = -ratio.clamp(max=C).detach() * advantage * logp
    return batch_mean(loss, {"capped": ratio > C}, mask, token_count)


def decoupled_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    eps: float = 0.2,
    c_w: float = 5.0,
    logp_prox: Tensor | None = None,
    token_count: int | None = None,
) -> Loss:
    """min(pi_prox / pi_b, c_w) times grpo's loss in pi_theta / pi_prox.

    pi_prox is the policy before the first update on this rollout batch; left out, it is
    pi_theta. Decoupled PPO, arXiv 2110.00641, has no c_w, and a moving average for
    pi_prox. c_w is AReaL's, which drops tokens above it; here they weigh c_w.
    """
    if logp_prox is None:
        logp_prox = logp.detach()
    _, log_behavior_ratio, _ = check_tokens(logp_prox, logp_behavior, advantage, mask)
    _, log_ratio, advantage = check_tokens(logp, logp_prox, advantage, mask)
    weight = log_behavior_ratio.detach().exp()  # pi_prox / pi_b
    loss, cut = clipped_loss(log_ratio.exp(), advantage, eps, eps)
    loss = weight.clamp(max=c_w) * loss
    return batch_mean(loss, {"capped": cut | (weight > c_w)}, mask, token_count)


def m2po_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    tau: float = 0.04,
    cutoff: float | None = None,
    token_count: int | None = None,
) -> Loss:
    """-rho A, without the tokens that have moved furthest away from pi_b.

    Of the tokens that move away, A log rho > 0, those with the largest (log rho)^2 are
    dropped until its mean over the rest of them is at most tau. M2PO, arXiv 2510.01161.
    cutoff is the (log rho)^2 above which the whole batch's are dropped: `m2po_cutoff`.
    """
    _, log_ratio, advantage = check_tokens(logp, logp_behavior, advantage, mask)
    if cutoff is None:
        cutoff = m2po_cutoff(log_ratio.detach(), advantage, mask, tau)
    dropped = (advantage * log_ratio > 0) & (log_ratio**2 > cutoff)
    loss = torch.where(dropped, 0.0, -log_ratio.exp() * advantage)
    return batch_mean(loss, {"capped": dropped}, mask, token_count)


def m2po_cutoff(
    log_ratio: Tensor, advantage: Tensor, mask: Tensor, tau: float
) -> float:
    """The (log rho)^2 above which `m2po_loss` drops a token that moves away from pi_b.

    The mean is over tokens that can be dropped: others could hold that over all tokens
    above tau for ever. Dropped ones do not count in it; in the authors' code, against
    their paper, they count at the cutoff.
    """
    moves_away = mask & (advantage * log_ratio > 0)
    square = log_ratio[moves_away].double().square().sort().values  # [M], rising
    # With 0 in front nothing need be kept, and with inf behind nothing need be dropped.
    square = torch.cat([square.new_zeros(1), square, square.new_tensor([torch.inf])])
    tokens_kept = torch.arange(len(square), device=square.device).clamp(min=1)
    mean = square.cumsum(0) / tokens_kept
    smallest_dropped = square[mean > tau][0]  # equal tokens share its fate
    largest_kept = square[square < smallest_dropped][-1]
    return float((largest_kept + smallest_dropped) / 2)  # halfway: safe from rounding


def token_and_sequence_count_of(
    batch: Batch, **hyper_parameters: Any
) -> dict[str, Any]:
    """What GSPO has to know of the whole batch."""
    sequences = int(batch.mask.any(dim=1).sum())
    return {"token_count": batch.token_count, "sequence_count": sequences}


def token_count_and_cutoff_of(batch: Batch, tau: float) -> dict[str, Any]:
    """What M2PO has to know of the whole batch."""
    cutoff = m2po_cutoff(batch.log_ratio, batch.advantage, batch.mask, tau)
    return {"token_count": batch.token_count, "cutoff": cutoff}


dapo = Objective(dapo_loss, hyper_parameters={"eps_low": 0.2, "eps_high": 0.28})
gspo = Objective(
    gspo_loss, token_and_sequence_count_of, {"eps_low": 3e-4, "eps_high": 4e-4}
)
cispo = Objective(cispo_loss, hyper_parameters={"eps_high": 4.0})
tis = Objective(tis_loss, hyper_parameters={"C": 2.0})
decoupled = Objective(
    decoupled_loss,
    token_count_of,
    {"eps": 0.2, "c_w": 5.0},
    takes_logp_prox=True,
)
m2po = Objective(m2po_loss, token_count_and_cutoff_of, {"tau": 0.04})
