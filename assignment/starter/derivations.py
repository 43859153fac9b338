"""Parts 1 and 2: formulas that you derive on paper and write down here.

Each is a line or two of arithmetic, without a batch and without autograd. The grader
compares their values with those of the reference.
"""

from torch import Tensor


def ess_of_variation(variation: float) -> float:
    """Return e_B of a batch whose ratios have this coefficient of variation.

    The coefficient of variation is the population standard deviation divided by the
    mean.
    """
    raise NotImplementedError("part 1, e_B of the variation, is not written yet")


def ess_with_one_outlier(token_count: int, ratio: float) -> float:
    """Return e_B of token_count tokens: one has this ratio, and all others have 1."""
    raise NotImplementedError("part 1, e_B with one outlier, is not written yet")


def ess_of_policies(policy: Tensor, behavior: Tensor) -> float:
    """Return the limit of e_B for many tokens y drawn from pi_b.

    policy and behavior, [V], are the probabilities of pi_theta and pi_b. Express the
    means of rho and of rho^2 over samples from pi_b as sums over y.
    """
    raise NotImplementedError("part 1, e_B of the two policies, is not written yet")


def token_weight(ratio: float, advantage: float, e_b: float) -> float:
    """Return the weight w of a token in the negative gradient of (12).

    The KL is estimated from the sampled token by rho log rho - rho + 1. Minus the
    gradient of the loss is then the mean over the tokens of w grad log pi_theta(y_t).
    """
    raise NotImplementedError("part 2, the weight of a token, is not written yet")


def kl_gradient(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """Return the gradient of KL(pi_theta || pi_b) with respect to the logits, [V].

    logp and logp_behavior, [V], are log-probabilities of the whole vocabulary, and
    pi_theta is the softmax of the logits.
    """
    raise NotImplementedError("part 2, the gradient of the KL, is not written yet")


def entropy_bonus(temperature: float, e_b: float) -> float:
    """Return the strength of the KL of (12) as an entropy bonus.

    pi_b is the softmax of pi_theta's logits divided by the temperature, and pi_b is
    constant in the gradient. Minus the gradient of (1 - e_B) KL(pi_theta || pi_b) is
    then a number times the gradient of H, the entropy of pi_theta. Return that number.
    """
    raise NotImplementedError("part 2, the entropy bonus, is not written yet")
