"""Parts 1 and 2: P3O's loss.

The equations are those of arXiv 2605.12380. The handout, assignment/README.md, explains
them. Tensors are aligned with the responses, [N, T] for N responses of at most T
tokens. Log-probabilities and the KL are in nats.

Replace each `raise NotImplementedError` with your code. Keep the names and signatures,
because the grader calls them. So does `pytest tests/test_loss.py --loss your/loss.py`,
which tests more and needs the repository's .venv.
"""

from torch import Tensor


def group_advantage(reward: Tensor, scale: bool = True) -> Tensor:
    """Return the advantage (3) of each of the G responses to the same prompt.

    reward is [P, G] for P prompts, and so is the result. Without `scale` the result is
    the reward minus its group's mean. With `scale` this difference is divided by the
    group's sample standard deviation (over G - 1) plus 1e-6. Equal rewards have an
    advantage of exactly 0. G is at least 2, because a single reward has no deviation.
    """
    raise NotImplementedError("part 1, the advantage, is not written yet")


def ratio_sums(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the number of tokens, the sum of rho, and the sum of rho^2.

    The result is a float64 tensor [3] without a gradient. log_ratio is log rho, [N, T].
    The mask (bool, [N, T]) is True for tokens. All other entries of log_ratio may hold
    anything, even NaN. The result has to be right even if log_ratio is float32 and
    |log rho| is 80 nats.
    """
    raise NotImplementedError("part 1, the sums of the ratios, is not written yet")


def effective_sample_size(sums: Tensor) -> Tensor:
    """Return e_B (11), the normalized effective sample size of a batch, 0-d.

    sums is the `ratio_sums` of the whole batch. If they are not finite, or if there are
    no tokens, e_B is NaN, so that the trainer can stop.
    """
    raise NotImplementedError("part 1, e_B, is not written yet")


def kl_divergence(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """Return KL(pi_theta || pi_b) over K tokens and one bucket for all others, [...].

    logp and logp_behavior, both [..., K], are log-probabilities of the same K tokens,
    in nats. The bucket's probability is 1 minus the sum of theirs. The gradient goes to
    logp, including through the bucket, but not to logp_behavior. If the K tokens hold
    all of the probability, the bucket holds a rounding error of either sign. This error
    must not cause NaN, even in the gradient, and must change the KL by less than 1e-4.
    But a bucket of 1e-4 is not a rounding error, and counts. A listed token with
    log pi_theta = -inf adds nothing. If only log pi_b is -inf, the KL is infinite.
    tests/test_loss.py checks these two cases, but the grader does not.
    """
    raise NotImplementedError("part 2, the KL, is not written yet")


def p3o(
    logp: Tensor, logp_behavior: Tensor, advantage: Tensor, kl: Tensor, e_b: float
) -> Tensor:
    """Return the loss of each token under P3O (12), [N, T].

    logp is log pi_theta of the sampled tokens, and kl is the KL at each position; both
    carry a gradient. logp_behavior is log pi_b of the same tokens. These three and the
    advantage are [N, T]. e_b is e_B of the whole batch. Part 3 decides which entries
    are tokens and takes the mean.
    """
    raise NotImplementedError("part 2, the objective, is not written yet")
