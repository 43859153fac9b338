"""Parts 1 and 2: formulas to derive on paper, and to write down here.

Each is a line or two of arithmetic, without a batch and without autograd. The grader
compares them with what the definitions give. `python derivations.py` holds the last one
against autograd.
"""

import torch
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


def token_weight(ratio: float, advantage: float, e_b: float) -> float:
    """The weight w of a token in minus the gradient of (12), with an estimated KL.

    The KL is estimated from the sampled token by rho log rho - rho + 1. Minus the
    gradient of the loss is then the mean over the tokens of w grad log pi_theta(y_t).
    """
    raise NotImplementedError("part 2: the weight of a token")


def kl_gradient(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """The gradient of KL(pi_theta || pi_b) to the logits of pi_theta: [V].

    logp and logp_behavior, [V], are log-probabilities of the whole vocabulary, and
    pi_theta is the softmax of its logits.
    """
    raise NotImplementedError("part 2: the gradient of the KL")


def entropy_bonus(temperature: float, e_b: float) -> float:
    """How strongly the KL of (12) pushes the entropy, where pi_b is pi_theta's copy.

    pi_b is the softmax of pi_theta's logits divided by the temperature, and a constant.
    Minus the gradient of (1 - e_B) KL(pi_theta || pi_b) is then a number times the
    gradient of H, the entropy of pi_theta. Return the number.
    """
    raise NotImplementedError("part 2: the KL as an entropy bonus")


def main() -> None:
    """Print both sides of the last identity, for a random policy and temperatures."""
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(dim=-1)
    entropy = -(logp.exp() * logp).sum()
    (of_entropy,) = torch.autograd.grad(entropy, logits, retain_graph=True)
    for temperature in (0.7, 1.0, 1.5, 3.0):
        behavior = (logits / temperature).log_softmax(dim=-1).detach()
        kl = (logp.exp() * (logp - behavior)).sum()
        (of_kl,) = torch.autograd.grad(kl, logits, retain_graph=True)
        e_b = ess_of_policies(logp.detach().exp(), behavior.exp())
        print(f"T = {temperature}, e_B = {e_b:.4f}")
        print("    minus the gradient of the KL's term ", -(1 - e_b) * of_kl)
        print("    entropy_bonus times the entropy's   ", end=" ")
        print(entropy_bonus(temperature, e_b) * of_entropy)


if __name__ == "__main__":
    main()
