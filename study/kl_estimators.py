"""Bias and noise of four ways to get the gradient of KL(pi_theta || pi_b) in (12).

    python study/kl_estimators.py    # results/kl_estimators.md

A position is one softmax over a small vocabulary: pi_b draws the token, and a mean over
its draws is a sum over the vocabulary. So nothing is sampled here, and a bias is exact.
`is` and `k3` of study/ablations.py look at the drawn token alone. The divergence
over the K likeliest tokens of pi_b and one bucket (loss.kl_divergence) does not look at
it: it has a bias, as a lower bound, and no noise. How tight it is for a real model is
measured by tools/meter.py.

pi_b differs from pi_theta in one of three ways, from a little to a lot:
    hotter     rollouts at a temperature over 1
    colder     rollouts at a temperature under 1
    rounded    normal noise on every logit, as of a quantized engine
How much is set by e_B = 1 / (1 + chi^2(pi_theta || pi_b)), which is (11) over many
tokens of this position. Gradients are those to the logits of pi_theta. Bias is the norm
of the mean gradient's difference from the exact one, noise the standard deviation of
one token's gradient, and both are shares of the norm of the exact one.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loss import kl_divergence
from study import ablations
from study.runs import RESULTS, table

VOCABULARY = 64
LOGIT_STD = 2.0  # of the logits of pi_theta, which are normal
POLICIES = 100  # S, pairs of pi_theta and pi_b at each point
LEVELS = (0.99, 0.9, 0.7, 0.5)  # of e_B
KINDS = ("hotter", "colder", "rounded")
TOP = (1, 5, 20)  # K
SAMPLED = {"is": ablations.importance_sampled, "k3": ablations.k3}


def behavior(kind: str, logits: Tensor, noise: Tensor, strength: Tensor) -> Tensor:
    """log pi_b [S, V] of this kind, for pi_theta's logits [S, V] and a strength [S]."""
    strength = strength[:, None]
    moved = {
        "hotter": logits / (1 + strength),
        "colder": logits * (1 + strength),
        "rounded": logits + strength * noise,
    }
    return moved[kind].log_softmax(dim=-1)


def behavior_at(kind: str, logits: Tensor, noise: Tensor, ess: float) -> Tensor:
    """log pi_b [S, V] of the strength at which e_B is `ess`, found by bisection."""
    logp = logits.log_softmax(dim=-1)
    low, high = torch.zeros(len(logits)), torch.full((len(logits),), 100.0)
    for _ in range(60):
        middle = (low + high) / 2
        logp_behavior = behavior(kind, logits, noise, middle)
        # 1 / E_b[rho^2], which falls as the strength grows; E_b[rho] is 1.
        too_weak = 1 / (2 * logp - logp_behavior).exp().sum(dim=-1) > ess
        low = torch.where(too_weak, middle, low)
        high = torch.where(too_weak, high, middle)
    return logp_behavior


def top_gradient(logits: Tensor, logp_behavior: Tensor, k: int) -> Tensor:
    """The gradient of the bound over the k likeliest tokens of pi_b: [S, V].

    Over all V tokens it is the KL itself.
    """
    logits = logits.clone().requires_grad_()
    listed = logp_behavior.topk(k, dim=-1).indices  # [S, K]
    logp = logits.log_softmax(dim=-1).gather(1, listed)
    kl = kl_divergence(logp, logp_behavior.gather(1, listed))
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    return gradient


def sampled_gradient(
    estimator: Callable[..., Tensor], logits: Tensor, logp_behavior: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean [S, V] of an estimator's gradient over draws, and its noise [S]."""
    logp = logits.log_softmax(dim=-1).requires_grad_()
    nothing = torch.zeros_like(logp)
    # Without an advantage, and at e_B = 0, the objective is the estimate.
    estimate = estimator(logp, logp_behavior, nothing, nothing, 0.0)
    (weight,) = torch.autograd.grad(estimate.sum(), logp)  # [S, V]
    # grad log pi_theta(v) to the logits is (1 at v) - pi_theta.
    direction = torch.eye(logp.shape[-1]) - logp.detach().exp()[:, None]
    gradient = weight[:, :, None] * direction  # [S, V, V], of each token to be drawn
    drawn_with = logp_behavior.exp()[:, :, None]  # [S, V, 1]
    mean = (drawn_with * gradient).sum(dim=1)
    variance = (drawn_with * (gradient - mean[:, None]).square()).sum(dim=(1, 2))
    return mean, variance.sqrt()


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(
        2, POLICIES, VOCABULARY, generator=generator, dtype=torch.float64
    )
    logits, noise = LOGIT_STD * normal[0], normal[1]
    head = ["pi_b", "e_B", *(f"top {k}: bias" for k in TOP)]
    for name in SAMPLED:
        head += [f"{name}: bias", f"{name}: noise"]
    rows = [head]
    for kind in KINDS:
        for ess in LEVELS:
            logp_behavior = behavior_at(kind, logits, noise, ess)
            exact = top_gradient(logits, logp_behavior, VOCABULARY)
            errors = []
            for k in TOP:
                bound = top_gradient(logits, logp_behavior, k)
                errors.append((bound - exact).norm(dim=-1))
            for estimator in SAMPLED.values():
                mean, spread = sampled_gradient(estimator, logits, logp_behavior)
                errors += [(mean - exact).norm(dim=-1), spread]
            shares = [(error / exact.norm(dim=-1)).median() for error in errors]
            rows.append([kind, str(ess), *(f"{share:.2f}" for share in shares)])
    text = f"Medians over {POLICIES} pairs of policies.\n\n{table(rows)}"
    (RESULTS / "kl_estimators.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
