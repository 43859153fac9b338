"""P3O's loss: the advantage, the effective sample size, the divergence, the objective.

Fakoor, Aubry, Stranges, Smola: "Trust the Batch, On- or Off-Policy: Adaptive Policy
Optimization for RL Post-Training", arXiv 2605.12380. Equation numbers are the paper's.

Token y_t of a response to prompt x was sampled from the behavior policy pi_b: what the
rollout engine really drew from, after temperature, top-p and rounding. pi_theta is the
policy being updated, A_t the advantage, and B the batch of one optimizer step: its
response tokens, of all micro-batches, on all ranks. sg stops the gradient.

    (3)   A_t   = (reward - mean of its group) / standard deviation of its group
    (7)   rho_t = pi_theta(y_t | x, y_<t) / pi_b(y_t | x, y_<t)
    (11)  e_B   = mean_B[rho]^2 / mean_B[rho^2], between 1/|B| and 1
    (12)  L     = mean_B[ -sg(min(rho_t, e_B)) A_t log pi_theta(y_t | x, y_<t)
                          + (1 - e_B) KL(pi_theta(. | x, y_<t) || pi_b(. | x, y_<t)) ]

On a fresh batch e_B is near 1: hardly any weight is cut, the KL hardly counts, and (12)
is REINFORCE with a baseline. On a stale batch e_B falls: the cap tightens, and the KL
pulls pi_theta back to pi_b. e_B is measured, so nothing is left to tune.

Tensors are aligned with the responses: [N, T] for N responses of at most T tokens, in
nats. mask (bool) says which entries are tokens; the others may hold anything. A loss is
the SUM over the tokens it is given, divided by the token_count of the whole batch: the
losses of all micro-batches and ranks add up to (12). What only the whole batch can tell
(ess, token_count) is a keyword; left out, the tensors given are the whole batch.

`python loss.py` prints what e_B does to a few small batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A larger |log rho| is an error. From 85 nats on the largest weight here, rho log rho,
# would not fit a gradient in float32.
MAX_LOG_RATIO = 82.0  # nats
# kl_divergence puts all tokens that are not listed into one bucket. The probability of
# the bucket counts as at least this much.
REST_FLOOR = 1e-5

Loss = tuple[Tensor, dict[str, Tensor]]


def group_advantage(reward: Tensor, scale: bool = True) -> Tensor:
    """The advantage (3) of each response among the G responses to the same prompt.

    reward is [P, G], for P prompts; so is the result. `scale` divides by the standard
    deviation of the group. The deviation is the sample's (n - 1), plus 1e-6. The paper
    has the population's, by which advantages are larger: 1.07 times at G = 8. Equal
    rewards have advantage 0. ValueError for a group of one, which has nothing to be
    compared with.
    """
    if reward.shape[-1] < 2:
        raise ValueError(
            "an advantage within a group takes two or more responses to a prompt: "
            f"the rewards are {tuple(reward.shape)}"
        )
    # Where all rewards are equal this makes them 0, and their advantages exactly 0.
    reward = reward - reward[..., :1]
    advantage = reward - reward.mean(dim=-1, keepdim=True)
    if scale:
        advantage = advantage / (reward.std(dim=-1, keepdim=True) + 1e-6)
    return advantage


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """e_B (11), the normalized effective sample size of the ratios: float64, 0-d.

    log_ratio is log rho, [N, T]. Equal ratios give exactly 1, one dominant ratio 1/|B|.
    With CV the coefficient of variation of rho, e_B = 1 / (1 + CV^2), which over
    samples of pi_b estimates 1 / (1 + chi^2(pi_theta || pi_b)). |B| times it is the
    usual effective sample size. It carries no gradient. Metrics call it ess.
    ValueError without tokens; FloatingPointError where log rho is not finite.
    """
    if not mask.any():
        raise ValueError("no response tokens: the effective sample size of nothing")
    check_rows(torch.isfinite(log_ratio) | ~mask, "a log-ratio is not finite")
    log_ratio = log_ratio.detach()[mask].double()  # [|B|]
    # All ratios may be divided by the largest without changing (11). None overflows.
    ratio = (log_ratio - log_ratio.max()).exp()
    ess = ratio.mean() ** 2 / (ratio**2).mean()
    return ess.clamp(max=1.0)  # Rounding must not lift it above 1.


def kl_divergence(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """KL(pi_theta || pi_b) over K tokens and one bucket for all others: [...], in nats.

    logp and logp_behavior, both [..., K], are log-probabilities of the same K different
    tokens of a position. The KL of (12) sums over the whole vocabulary. To put tokens
    into one bucket can only lower it (log-sum inequality), so this is a lower bound. It
    grows with K, and is the KL itself when K is the vocabulary. Its gradient goes to
    logp, through the bucket as well. It has no mask, so the padding has to be finite:
    NaN there would come back as a gradient of NaN.

    The bucket's probability is one less the sum of the others. Where they hold nearly
    all, that is nothing but the rounding of float32 logarithms, about 1e-6. So it
    counts as at least REST_FLOOR, for both policies. This can only lower the value: for
    true probabilities p and b of the bucket, by p log(p/b) - p + b at most. And it can
    only weaken the pull: there is none through the bucket where pi_theta's is below the
    floor, and p log(p/REST_FLOOR) in place of p log(p/b) where only pi_b's is.

    +inf where pi_theta has probability on a listed token that pi_b never samples.
    """
    logp = logp.double()
    logp_behavior = logp_behavior.detach().double()
    p = logp.exp()
    b = logp_behavior.exp()
    p_rest = (1 - p.sum(dim=-1)).clamp(min=REST_FLOOR)
    b_rest = (1 - b.sum(dim=-1)).clamp(min=REST_FLOOR)
    # A token that pi_theta cannot sample adds nothing, whatever its log-ratio.
    log_ratio = torch.where(p > 0, logp - logp_behavior, 0.0)
    # Over all tokens -p + b adds up to nothing. Term by term it makes each one 0 or
    # more, and takes out that rounded probabilities do not quite sum to one.
    listed = (p * log_ratio - p + b).sum(dim=-1)
    rest = p_rest * (p_rest / b_rest).log() - p_rest + b_rest
    return listed + rest


def restrict_to_support(logp: Tensor, logp_behavior: Tensor) -> tuple[Tensor, Tensor]:
    """What `kl_divergence` compares when rollouts were sampled with top-p or top-k.

    pi_b is then zero on most of the vocabulary, and KL(pi_theta || pi_b) infinite. What
    is meant is that pi_theta, where pi_b samples at all, should not move away from it:
    both policies are renormalized to those of the K listed tokens that pi_b can sample
    (its log-probability is finite). With at most K tokens in its support that is
    pi_theta renormalized to the support. Tokens outside are neither learned about nor
    held back. Both are [..., K], and so are the results, with -inf for a token outside.
    """
    outside = logp_behavior == -torch.inf
    logp = logp.masked_fill(outside, -torch.inf)
    return logp.log_softmax(dim=-1), logp_behavior.log_softmax(dim=-1)


def p3o_loss(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    ess: float | Tensor | None = None,
    token_count: int | None = None,
    kl_estimator: str = "is",
) -> Loss:
    """P3O (12), without hyper-parameters. kl_estimator matters only where kl is None.

    logp [N, T], log pi_theta of the sampled tokens, carries the gradient; logp_behavior
    is [N, T]; advantage [N] or [N, T]; mask [N, T]. kl [N, T] is the KL at each
    position, with its gradient (`kl_divergence`); left out, it is estimated from the
    sampled tokens alone by one of KL_ESTIMATORS. ess and token_count are the whole
    batch's. Returns the loss and statistics, each 0-d: loss = policy_loss + (1 - e_B)
    kl_loss; capped is the share of tokens with rho > e_B. ValueError if neither tokens
    nor a token_count are given; FloatingPointError with the number of the response
    where something is not finite, or |log rho| over MAX_LOG_RATIO.
    """
    logp, log_ratio, advantage = check_tokens(logp, logp_behavior, advantage, mask)
    if ess is None:
        # A micro-batch without tokens adds nothing to the sums below, whatever its e_B.
        ess = effective_sample_size(log_ratio, mask) if mask.any() else 1.0
    ess = torch.as_tensor(ess, dtype=logp.dtype, device=logp.device).detach()

    ratio = log_ratio.exp()  # (7) rho_t, [N, T]
    weight = torch.minimum(ratio, ess).detach()  # (12) sg(min(rho_t, e_B)), [N, T]
    policy_loss = -weight * advantage * logp  # (12), first term, [N, T]
    if kl is None:
        kl = KL_ESTIMATORS[kl_estimator](log_ratio)  # [N, T]
    loss = policy_loss + (1 - ess) * kl  # (12), [N, T]

    others = {"policy_loss": policy_loss, "kl_loss": kl, "capped": ratio > ess}
    return batch_mean(loss, others, mask, token_count)


# The KL of (12) from the sampled token alone, as a function of log rho. Over tokens
# that pi_b sampled, the mean of "is" (importance sampling) is KL(pi_theta || pi_b), and
# the mean of its gradient is the gradient of the KL. "k3" is what the authors' code
# has, but for a clamp. It is meant for tokens that pi_theta sampled. Over those of pi_b
# its mean is chi^2(pi_b || pi_theta) - KL(pi_b || pi_theta), and its pull on a token
# that has become rare, 1 - 1/rho, has no bound.
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "is": lambda log_ratio: log_ratio.exp() * log_ratio - torch.expm1(log_ratio),
    "k3": lambda log_ratio: log_ratio + torch.expm1(-log_ratio),
}


def reinforce(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    token_count: int | None = None,
) -> Loss:
    """-A_t log pi_theta (Williams 1992): the ratio is not looked at.

    Arguments, errors and loss are as in p3o_loss. capped is 0.
    """
    logp, _, advantage = check_tokens(logp, logp_behavior, advantage, mask)
    loss = -advantage * logp  # [N, T]
    return batch_mean(loss, {"capped": torch.zeros_like(mask)}, mask, token_count)


def grpo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    eps: float = 0.2,
    token_count: int | None = None,
) -> Loss:
    """PPO's clipped loss, (4) in the P3O paper, on group advantages.

    Arguments, errors and loss are as in p3o_loss; capped is the share of tokens whose
    gradient the clip removes. (4) is equation 7 of arXiv 1707.06347, -min(rho A,
    clip(rho, 1 - eps, 1 + eps) A). A token whose ratio has left the range in the
    direction of its advantage has no gradient. On the other side the weight rho A has
    no bound. GRPO (arXiv 2402.03300, equation 3) averages over responses first, and
    adds a KL to a fixed reference model. Here every token counts the same, and there is
    no reference model.
    """
    _, log_ratio, advantage = check_tokens(logp, logp_behavior, advantage, mask)
    ratio = log_ratio.exp()  # [N, T]
    free = ratio * advantage
    clipped = ratio.clamp(1 - eps, 1 + eps) * advantage
    loss = -torch.minimum(free, clipped)  # (4), [N, T]
    return batch_mean(loss, {"capped": clipped < free}, mask, token_count)


def check_tokens(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log pi_theta, log rho and A as float64 [N, T], checked, and 0 in the padding.

    FloatingPointError with the number of the first response that cannot be used.
    """
    if advantage.dim() == 1:
        # Every token has the advantage of its response.
        advantage = advantage[:, None].expand_as(mask)
    # where() comes before any arithmetic: NaN in the padding times 0 would be NaN.
    logp = torch.where(mask, logp, 0.0).double()
    logp_behavior = torch.where(mask, logp_behavior.detach(), 0.0).double()
    advantage = torch.where(mask, advantage.detach(), 0.0).double()
    log_ratio = logp - logp_behavior
    check_rows(
        log_ratio.abs() <= MAX_LOG_RATIO,
        f"|log rho| is over {MAX_LOG_RATIO} nats or NaN",
    )
    check_rows(torch.isfinite(advantage), "an advantage is not finite")
    return logp, log_ratio, advantage


def batch_mean(
    loss: Tensor, others: dict[str, Tensor], mask: Tensor, token_count: int | None
) -> Loss:
    """The sum of `loss` [N, T] over its tokens, divided by token_count.

    `others`, by name, are [N, T] as well. Their sums go the same way, without gradient.
    """
    if token_count is None:
        token_count = int(mask.sum())
        if token_count == 0:
            raise ValueError(
                "no response tokens and no token_count: a mean over nothing"
            )
    check_rows(torch.isfinite(loss) | ~mask, "the loss is not finite")
    total = torch.where(mask, loss, 0.0).sum() / token_count
    stats = {"loss": total.detach()}
    for name, other in others.items():
        other = torch.where(mask, other.detach().double(), 0.0)
        stats[name] = other.sum() / token_count
    return total, stats


def check_rows(good: Tensor, what: str) -> None:
    """FloatingPointError with the first response that is not all good, [N, T]."""
    if not good.all():
        row = int((~good).any(dim=-1).nonzero()[0])
        raise FloatingPointError(
            f"{what} in response {row}: look at the alignment of tokens and the sync"
        )


class Batch(NamedTuple):
    """The whole batch B of an optimizer step, of all micro-batches and all ranks."""

    log_ratio: Tensor  # [N, T] log rho, without gradient
    advantage: Tensor  # [N, T]
    mask: Tensor  # [N, T] bool
    ess: Tensor  # [] e_B
    token_count: int  # |B|


def token_count_of(batch: Batch, **hyper_parameters: Any) -> dict[str, Any]:
    """What a loss has to know of the whole batch if it is a mean over its tokens."""
    return {"token_count": batch.token_count}


def token_count_and_ess_of(batch: Batch, **hyper_parameters: Any) -> dict[str, Any]:
    """What P3O has to know of the whole batch."""
    return {"token_count": batch.token_count, "ess": batch.ess}


@dataclass(frozen=True)
class Objective:
    """A loss, and what the trainer gives it beside the tensors of a micro-batch.

    The trainer finds it in OBJECTIVES, or anywhere else by `--objective module:name`.
    """

    loss: Callable[..., Loss]
    # The keywords that only the whole batch can tell, as a function of the batch and of
    # the hyper-parameters.
    batch_quantities: Callable[..., dict[str, Any]] = token_count_of
    # The keywords that the user may set with --objective_args, and their defaults.
    hyper_parameters: dict[str, float | str] = field(default_factory=dict)
    # Whether it takes kl, the KL at each position.
    takes_kl: bool = False
    # Whether it takes logp_prox, log pi_theta before the step's first update.
    takes_logp_prox: bool = False


OBJECTIVES: dict[str, Objective] = {
    # kl_estimator is for rollouts without the K likeliest tokens.
    "p3o": Objective(
        p3o_loss, token_count_and_ess_of, {"kl_estimator": "is"}, takes_kl=True
    ),
    "reinforce": Objective(reinforce),
    "grpo": Objective(grpo, hyper_parameters={"eps": 0.2}),
}


def main() -> None:
    """Print e_B, and the weight of the last token, for a few batches of four tokens."""
    batches = {
        "fresh": [1.0, 1.0, 1.0, 1.0],
        "a little stale": [0.8, 0.9, 1.1, 1.2],
        "stale": [0.2, 0.5, 1.0, 2.3],
        "one outlier": [1.0, 1.0, 1.0, 500.0],
    }
    advantage = torch.ones(1)
    mask = torch.ones(1, 4, dtype=torch.bool)
    logp_behavior = torch.full((1, 4), 0.5).log()
    title = "rho of four tokens, A = 1"
    print(f"{title:34}    e_B   KL weight   weight of the last token")
    for name, ratios in batches.items():
        log_ratio = torch.tensor([ratios]).log()
        logp = (logp_behavior + log_ratio).requires_grad_()
        ess = effective_sample_size(log_ratio, mask).item()
        loss, _ = p3o_loss(logp, logp_behavior, advantage, mask, kl=torch.zeros(1, 4))
        loss.backward()
        weight = -4 * logp.grad[0, -1].item()
        batch = f"{name}: {', '.join(str(ratio) for ratio in ratios)}"
        print(f"{batch:34} {ess:6.3f}      {1 - ess:6.3f}  {weight:25.3f}")


if __name__ == "__main__":
    main()
