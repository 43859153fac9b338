"""Parts 1 and 2: P3O's loss.

The equations are those of arXiv 2605.12380, and the handout, assignment/README.md,
explains them. Tensors are aligned with the responses, [N, T] for N responses of at most
T tokens, in nats.

Replace every `raise NotImplementedError` by your code. Keep the names and signatures:
the grader calls them, and so does `pytest tests/test_loss.py --loss your/loss.py`,
which is longer and shows its arithmetic.
"""

from torch import Tensor


def group_advantage(reward: Tensor, scale: bool = True) -> Tensor:
    """The advantage (3) of each response among the G responses to the same prompt.

    reward is [P, G], for P prompts; so is the result. Without `scale` it is the reward
    less its group's mean; with it, that is divided by the group's standard deviation,
    the sample's (over G - 1), plus 1e-6. Equal rewards have advantage 0, exactly. G is
    2 or more, as a single reward has no deviation.
    """
    raise NotImplementedError("part 1, the advantage, is not written yet")


def ratio_sums(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """What (11) needs of some of the tokens: a float64 tensor [3] without a gradient.

    The number of tokens, the sum of rho, and the sum of rho^2. log_ratio is log rho,
    [N, T], and the mask (bool, [N, T]) tells which entries are tokens; the others may
    hold anything, NaN too. Right for |log rho| of 80 nats in float32 too.
    """
    raise NotImplementedError("part 1, the sums of the ratios, is not written yet")


def effective_sample_size(sums: Tensor) -> Tensor:
    """e_B (11), the normalized effective sample size of a batch: 0-d.

    sums is the `ratio_sums` of the whole batch. Where they are not finite, or there are
    no tokens, e_B is NaN, so that the trainer can stop.
    """
    raise NotImplementedError("part 1, e_B, is not written yet")


def kl_divergence(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """KL(pi_theta || pi_b) over K tokens and one bucket for all others: [...], in nats.

    logp and logp_behavior, both [..., K], are log-probabilities of the same K tokens.
    The bucket's probability is one less the sum of theirs. The gradient goes to logp,
    through the bucket as well, and not to logp_behavior. Where the K tokens hold all
    probability, what is left for the bucket is rounding, of either sign. It must give
    no NaN, in the gradient either, and change the KL by less than 1e-4. A rest of 1e-4
    counts. A listed token with log pi_theta = -inf adds nothing, and one with log pi_b
    = -inf alone makes the KL infinite: tests/test_loss.py checks it, the grader not.
    """
    raise NotImplementedError("part 2, the KL, is not written yet")


def p3o(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """P3O (12), the loss of each token: [N, T].

    logp, log pi_theta of the sampled tokens, and kl, the KL at each position, carry the
    gradient; logp_behavior is log pi_b of the same tokens. All are [N, T], as the
    advantage is. e_b is e_B of the whole batch. Which entries are tokens, and what the
    mean is over, is the business of part 3.
    """
    raise NotImplementedError("part 2, the objective, is not written yet")
