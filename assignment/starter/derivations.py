"""Parts 1 and 2: formulas to derive on paper, and to write down here.

Each is a line or two of arithmetic, without a batch and without autograd. The grader
compares them with what the definitions give.
"""

from torch import Tensor


def ess_of_variation(variation: float) -> float:
    """e_B of a batch whose ratios have this coefficient of variation.

    The coefficient of variation is the (population's) standard deviation divided by the
    mean.
    """
    raise NotImplementedError("part 1: e_B as a function of the variation")


def ess_with_one_outlier(token_count: int, ratio: float) -> float:
    """e_B of token_count tokens, of which one has this ratio, and all others have 1."""
    raise NotImplementedError("part 1: e_B with one outlier")


def ess_of_policies(policy: Tensor, behavior: Tensor) -> float:
    """What e_B tends to for many tokens y drawn from pi_b: from pi_theta and pi_b, [V].

    Express the mean of rho, and of rho^2, over samples of pi_b as sums over y.
    """
    raise NotImplementedError("part 1: e_B as a function of the two policies")


def token_weight(ratio: float, advantage: float, ess: float) -> float:
    """The weight w of a token in the gradient of (12), with the KL estimated by "is".

    Minus the gradient of the loss is the mean over tokens of w grad log pi_theta(y_t).
    """
    raise NotImplementedError("part 2: the weight of a token")


def kl_gradient(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """The gradient of KL(pi_theta || pi_b) to the logits of pi_theta: [V].

    logp and logp_behavior, [V], are log-probabilities of the whole vocabulary, and
    pi_theta is the softmax of its logits.
    """
    raise NotImplementedError("part 2: the gradient of the KL")
