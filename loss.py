"""P3O's loss: the advantage, the effective sample size, the divergence, the objective.

Fakoor, Aubry, Stranges, Smola: "Trust the Batch, On- or Off-Policy: Adaptive Policy
Optimization for RL Post-Training", arXiv 2605.12380. Equation numbers are the paper's.
We have the equations second-hand (README.md).

Token y_t of a response to prompt x was sampled from the behavior policy pi_b: what the
rollout engine really drew from, after temperature, top-p and rounding. pi_theta is the
policy being updated, A_t the advantage, and B the batch of one optimizer step: its
response tokens, of all micro-batches, on all ranks. sg stops the gradient.

    (3)   A_t   = (reward - mean of its group) / standard deviation of its group
    (7)   rho_t = pi_theta(y_t | x, y_<t) / pi_b(y_t | x, y_<t)
    (11)  e_B   = mean_B[rho]^2 / mean_B[rho^2], between 1/|B| and 1
    (12)  L     = mean_B[ -sg(min(rho_t, e_B)) A_t log pi_theta(y_t | x, y_<t)
                          + (1 - e_B) KL(pi_theta(. | x, y_<t) || pi_b(. | x, y_<t)) ]

On a fresh batch e_B is near 1: the cap changes each weight by next to nothing, the KL
hardly counts, and (12) is REINFORCE with a baseline. On a stale batch e_B falls: the
cap tightens, and the KL pulls pi_theta back to pi_b. e_B is measured, so there
is no clip range to tune.

An objective is a function of five arguments: log pi_theta, log pi_b, the advantage and
the KL, each [N, T] for N responses of at most T tokens, and the number e_B. It returns
the loss of each token, [N, T]. `update` in train.py leaves out the padding and averages
over B. Logarithms are in nats.
"""

import torch
from torch import Tensor

# kl_divergence puts all tokens that are not listed into one bucket, and raises the
# probability of the bucket to at least this.
REST_FLOOR = 1e-5


def group_advantage(reward: Tensor, scale: bool = True) -> Tensor:
    """The advantage (3) of each response among the G responses to the same prompt.

    reward is [P, G], for P prompts; so is the result. `scale` divides by the standard
    deviation of the group, plus 1e-6. The variance divides by G - 1, as the authors'
    code does. The paper, as quoted, divides by G. That makes its advantages 1.07 times
    as large at G = 8. Equal rewards have advantage 0.
    """
    # If all rewards are equal, this makes all of them exactly 0.
    reward = reward - reward[..., :1]
    advantage = reward - reward.mean(dim=-1, keepdim=True)
    if scale:
        advantage = advantage / (reward.std(dim=-1, keepdim=True) + 1e-6)
    return advantage


def ratio_sums(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The number of tokens, the sum of rho, and the sum of rho^2: float64, [3].

    The sums of all micro-batches on all ranks add up to those of B. log_ratio is log
    rho, [N, T], and the mask (bool, [N, T]) tells which entries are tokens.
    """
    ratio = log_ratio.detach()[mask].double().exp()  # (7)
    count = torch.tensor(float(ratio.numel()), dtype=torch.float64, device=ratio.device)
    return torch.stack([count, ratio.sum(), ratio.square().sum()])


def effective_sample_size(sums: Tensor) -> Tensor:
    """e_B (11), the normalized effective sample size of a batch: float64, 0-d.

    `sums` is the `ratio_sums` of the whole batch. Equal ratios give 1, one dominant
    ratio 1/|B|. With CV the coefficient of variation of rho, e_B = 1 / (1 + CV^2).
    Where pi_b can sample all that pi_theta can, this estimates
    1 / (1 + chi^2(pi_theta || pi_b)). In the metrics e_B is called ess.

    e_B is NaN if there are no tokens or if a ratio is not finite. It means nothing if a
    log rho is above about 350 nats, or all are below -350, as then the squares leave
    the range of float64.
    """
    count, total, total_of_squares = sums
    ess = total.square() / (count * total_of_squares)
    return ess.clamp(max=1.0)  # Rounding must not lift it above 1.


def kl_divergence(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """KL(pi_theta || pi_b) over K tokens and one bucket for all others: [...], in nats.

    logp and logp_behavior, both [..., K], are log-probabilities of the same K different
    tokens of a position. The KL of (12) sums over the whole vocabulary. Putting
    tokens into one bucket can only lower it (log-sum inequality), so this is a lower
    bound. It grows with K, and is the KL itself when K is the vocabulary. Its gradient
    goes to logp, through the bucket as well.

    The bucket holds 1 - sum(p). Where the listed tokens hold nearly everything, that is
    float32 rounding, about 1e-6. So both policies' buckets are raised to REST_FLOOR,
    which can only lower the KL and weaken its pull.

    It is +inf if pi_theta may sample a listed token that pi_b never samples.
    """
    logp = logp.double()
    logp_behavior = logp_behavior.detach().double()
    p = logp.exp()
    b = logp_behavior.exp()
    p_rest = (1 - p.sum(dim=-1)).clamp(min=REST_FLOOR)
    b_rest = (1 - b.sum(dim=-1)).clamp(min=REST_FLOOR)
    # A token that pi_theta cannot sample adds nothing: 0 log 0 is 0.
    log_ratio = torch.where(p > 0, logp - logp_behavior, 0.0)
    # -p + b sums to 0 over all tokens. It makes each summand 0 or more, also where
    # probabilities do not quite sum to 1.
    listed = (p * log_ratio - p + b).sum(dim=-1)
    rest = p_rest * (p_rest / b_rest).log() - p_rest + b_rest
    return listed + rest


def restrict_to_support(logp: Tensor, logp_behavior: Tensor) -> tuple[Tensor, Tensor]:
    """What `kl_divergence` compares when rollouts were sampled with top-p or top-k.

    These set pi_b to 0 on most tokens, so KL(pi_theta || pi_b) is infinite. Instead
    both policies are renormalized to the listed tokens that pi_b can sample, and
    compared on these. The KL gives other tokens no gradient. Both are [..., K], and so
    are the results, with -inf for a token that pi_b cannot sample.
    """
    logp = logp.masked_fill(logp_behavior == -torch.inf, -torch.inf)
    return logp.log_softmax(dim=-1), logp_behavior.log_softmax(dim=-1)


def p3o(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """P3O (12), the loss of each token: [N, T]. It has no hyper-parameters.

    logp is log pi_theta of the sampled tokens, and logp_behavior log pi_b of the same.
    kl is the KL of (12) at each position, by `kl_divergence`. All four tensors are
    [N, T], and logp and kl carry the gradient. e_b is e_B of the whole batch.
    """
    rho = (logp - logp_behavior).exp()  # (7)
    weight = rho.clamp(max=e_b).detach()  # sg(min(rho, e_B))
    return -weight * advantage * logp + (1 - e_b) * kl  # (12)


def reinforce(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """-A log pi_theta (Williams 1992), which ignores rho. The arguments are p3o's."""
    return -advantage * logp


def grpo(
    logp: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    kl: Tensor,
    e_b: float,
    *,
    eps: float = 0.2,
) -> Tensor:
    """PPO's clipped loss, (4) in the P3O paper, on group advantages.

    The arguments are p3o's, and eps is the clip range. (4) is equation 7 of arXiv
    1707.06347. A token whose ratio has left the range in the direction of its advantage
    has no gradient. Where A < 0 and rho is above the range nothing is clipped: the
    weight is rho, however large. GRPO (arXiv 2402.03300, equation 3) averages over
    responses first, and adds a KL to a fixed reference model. Here every token counts
    the same, and there is no reference model. Raises ValueError if eps is negative.
    """
    if eps < 0:
        raise ValueError(f"eps is {eps}: the clip range has to be at least 0")
    rho = (logp - logp_behavior).exp()
    clipped = rho.clamp(1 - eps, 1 + eps)
    return -torch.minimum(rho * advantage, clipped * advantage)  # (4)


LOSSES = {"p3o": p3o, "reinforce": reinforce, "grpo": grpo}
