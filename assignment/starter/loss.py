"""Parts 1 and 2: P3O's loss.

The equations are those of arXiv 2605.12380, and the handout, assignment/README.md,
explains them. Tensors are [N, T] for N responses of at most T tokens, in nats. mask
(bool) says which entries are tokens. The others are padding, and may hold anything, NaN
included: neither a value nor a gradient may be NaN because of it. 0 * NaN is NaN in the
backward pass too, so replace padding before you compute.

Replace every `raise NotImplementedError` by your code. Keep the names and signatures:
the grader calls them, and so does `pytest tests/test_loss.py --loss your/loss.py`,
which is longer and shows its arithmetic.
"""

from torch import Tensor


def group_advantage(reward: Tensor, scale: bool = True) -> Tensor:
    """The advantage (3) of each response among the G responses to the same prompt.

    reward is [P, G], for P prompts; so is the result. Without `scale` it is the reward
    less its group's mean; with it, that is divided by the group's standard deviation,
    the sample's (over G - 1), plus 1e-6. A group of equal rewards has advantage 0,
    exactly. ValueError for a group of one.
    """
    raise NotImplementedError("part 1, the advantage, is not written yet")


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """e_B (11), the normalized effective sample size: a float64 tensor [], at most 1.

    log_ratio is log rho, [N, T]. It is right for |log rho| up to 80 nats in float32
    too, is exactly 1 for equal ratios, and carries no gradient. ValueError without
    tokens; FloatingPointError, with the number of the response (the row, counted from
    0) in the message, where log rho of a token is not finite.
    """
    raise NotImplementedError("part 1, e_B, is not written yet")


def kl_divergence(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """KL(pi_theta || pi_b) over K tokens and one bucket for all others: [...], in nats.

    logp and logp_behavior, both [..., K], are log-probabilities of the same K tokens.
    There is no mask here: what comes out in the padding is p3o_loss's to leave out.
    The bucket's probability is one less the sum of theirs. Its gradient goes to logp,
    through the bucket as well, and not to logp_behavior. Where the K tokens hold all
    probability, what is left for the bucket is rounding, of either sign, and must give
    neither NaN nor a value worth mentioning.
    """
    raise NotImplementedError("part 2, the KL, is not written yet")


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective (12), and statistics: a dictionary of numbers without gradient.

    logp [N, T], log pi_theta of the sampled tokens, carries the gradient; logp_behavior
    is [N, T]; advantage is [N] or [N, T], and a constant. kl [N, T] is the KL at each
    position, with its gradient. Left out, it is estimated from the sampled token:
    kl_estimator "is" is rho log rho - rho + 1, and "k3" is log rho + 1/rho - 1.

    ess and token_count are those of the whole batch; left out, the tensors given are
    the whole batch. The loss is the sum over the tokens given, divided by token_count.
    The dictionary has loss, policy_loss and kl_loss, with loss = policy_loss +
    (1 - e_B) kl_loss, and capped, the tokens with rho > e_B, each a sum over the tokens
    given, divided by token_count, as well.

    ValueError if there are no tokens and token_count is not given; with ess and
    token_count, no tokens give a loss of 0. FloatingPointError, with the number of the
    response (from 0) in the message, where an input or the loss of a token is not
    finite.
    """
    raise NotImplementedError("part 2, the objective, is not written yet")
