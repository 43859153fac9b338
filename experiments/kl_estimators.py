"""Bias and noise of four ways to get the gradient of KL(pi_theta || pi_b) in (12).

    python experiments/kl_estimators.py    # results/kl_estimators.{json,png}

A position is one softmax over a small vocabulary: pi_b draws the token, and a mean over
its draws is a sum over the vocabulary. So nothing is sampled here, and a bias is exact.
`is` and `k3` (loss.KL_ESTIMATORS) look at the drawn token alone. The divergence over
the K likeliest tokens of pi_b and one bucket (loss.kl_divergence) does not look at it:
it has a bias, as a lower bound, and no noise. Over all tokens it is the KL itself.

pi_b differs from pi_theta in one of three ways, from a little to a lot:
    hotter     rollouts at a temperature over 1
    colder     rollouts at a temperature under 1
    rounded    normal noise on every logit, as of a quantized engine
How much is set by e_B = 1 / (1 + chi^2(pi_theta || pi_b)), which is (11) over many
tokens of this position. Gradients are those to the logits of pi_theta, and bias and
noise are relative to the norm of the exact one: bias is the norm of the difference of
the means, noise the standard deviation of one token's gradient, so 100 tokens have a
tenth of it.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from matplotlib import pyplot as plt
from torch import Tensor

from experiments.colors import color_of
from loss import KL_ESTIMATORS, kl_divergence

RESULTS = Path(__file__).resolve().parent / "results"
VOCABULARY = 64
LOGIT_STD = 2.0  # of the logits of pi_theta, which are normal
POLICIES = 20  # S, pairs of pi_theta and pi_b at each point; each has a seed
ESS = [0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
KINDS = ("hotter", "colder", "rounded")
TOP = (1, 5, 20, VOCABULARY)  # K
LOOKS = {
    "is": (color_of("p3o, is"), "--"),
    "k3": (color_of("p3o, k3"), "-"),
    "top 1": ("#9ECAE1", "-"),
    "top 5": ("#4292C6", "-"),
    "top 20": ("#084594", "-"),
}


def behavior(kind: str, logits: Tensor, noise: Tensor, strength: Tensor) -> Tensor:
    """log pi_b [S, V] of this kind, for pi_theta's logits [S, V] and a strength [S]."""
    strength = strength[:, None]
    if kind == "hotter":
        moved = logits / (1 + strength)
    elif kind == "colder":
        moved = logits * (1 + strength)
    else:
        moved = logits + strength * noise
    return moved.log_softmax(dim=-1)


def effective_sample_size(logp: Tensor, logp_behavior: Tensor) -> Tensor:
    """e_B in the limit of many tokens, [S]: 1 / E_b[rho^2], as E_b[rho] is 1."""
    return 1 / (2 * logp - logp_behavior).exp().sum(dim=-1)


def strength_of(kind: str, logits: Tensor, noise: Tensor, ess: float) -> Tensor:
    """The strength [S] at which e_B is `ess`, by bisection: e_B falls as it grows."""
    logp = logits.log_softmax(dim=-1)
    low = torch.zeros_like(logits[:, 0])
    high = torch.full_like(logits[:, 0], 100.0)
    for _ in range(60):
        middle = (low + high) / 2
        logp_behavior = behavior(kind, logits, noise, middle)
        too_weak = effective_sample_size(logp, logp_behavior) > ess
        low = torch.where(too_weak, middle, low)
        high = torch.where(too_weak, high, middle)
    return low


def exact_kl(logits: Tensor, logp_behavior: Tensor) -> Tensor:
    """KL(pi_theta || pi_b), [S], written out as the sum over the vocabulary."""
    logp = logits.log_softmax(dim=-1)
    return (logp.exp() * (logp - logp_behavior)).sum(dim=-1)


def top_kl(logits: Tensor, logp_behavior: Tensor, k: int) -> Tensor:
    """loss.kl_divergence over the k likeliest tokens of pi_b, [S]."""
    listed = logp_behavior.topk(k, dim=-1).indices  # [S, K]
    logp = logits.log_softmax(dim=-1)
    return kl_divergence(logp.gather(1, listed), logp_behavior.gather(1, listed))


def gradient_of(value: Tensor, logits: Tensor) -> Tensor:
    """The gradient of each value [S] to its logits: [S, V]."""
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    return gradient


def compare(logits: Tensor, logp_behavior: Tensor) -> dict[str, dict[str, Tensor]]:
    """By estimator: its mean over the exact KL, and the bias and noise of its gradient.

    logits and logp_behavior are [S, V], results [S]. The noise is one token's.
    """
    logits = logits.clone().requires_grad_()
    exact = exact_kl(logits, logp_behavior)
    exact_gradient = gradient_of(exact, logits)
    norm = exact_gradient.norm(dim=-1)
    result = {}
    for name, estimator in KL_ESTIMATORS.items():
        drawn_with = logp_behavior.exp()  # [S, V] the probability of drawing each token
        log_ratio = logits.log_softmax(dim=-1) - logp_behavior
        mean = (drawn_with * estimator(log_ratio)).sum(dim=-1)
        mean_gradient = gradient_of(mean, logits)
        result[name] = {
            "value": mean.detach() / exact.detach(),
            "bias": (mean_gradient - exact_gradient).norm(dim=-1) / norm,
            "noise": noise_of(name, logits.detach(), logp_behavior) / norm,
        }
    for k in TOP:
        bound = top_kl(logits, logp_behavior, k)
        bound_gradient = gradient_of(bound, logits)
        result[f"top {k}"] = {
            "value": bound.detach() / exact.detach(),
            "bias": (bound_gradient - exact_gradient).norm(dim=-1) / norm,
            "noise": torch.zeros_like(norm),
        }
    return result


def noise_of(name: str, logits: Tensor, logp_behavior: Tensor) -> Tensor:
    """The standard deviation of an estimator's gradient to the logits, one token: [S].

    Over the draws of pi_b, and as a length: the root of the mean squared distance from
    the mean.
    """
    drawn_with = logp_behavior.exp()  # [S, V]
    logp = logits.log_softmax(dim=-1)
    log_ratio = (logp - logp_behavior).requires_grad_()
    (weight,) = torch.autograd.grad(KL_ESTIMATORS[name](log_ratio).sum(), log_ratio)
    # grad log pi_theta(v) to the logits is (1 at v) - pi_theta: [S, V, V].
    score = torch.eye(VOCABULARY) - logp.exp()[:, None, :]
    gradient = weight[:, :, None] * score  # [S, V, V], of each token that can be drawn
    mean = (drawn_with[:, :, None] * gradient).sum(dim=1)  # [S, V]
    distance = (gradient - mean[:, None]).square().sum(dim=-1)  # [S, V]
    return (drawn_with * distance).sum(dim=-1).sqrt()


def quartiles(values: Tensor) -> list[float]:
    """The quartiles of [S], four digits each; rounding below 1e-9 is 0."""
    found = values.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return [float(f"{value:.4g}") if abs(value) > 1e-9 else 0.0 for value in found]


def draw(rows: list[dict], path: Path) -> None:
    """Bias above and noise below, one column a kind of mismatch."""
    figure, axes = plt.subplots(
        2, 3, figsize=(11, 6.6), layout="constrained", sharex=True, sharey="row"
    )
    for column, kind in enumerate(KINDS):
        of_kind = [row for row in rows if row["pi_b"] == kind]
        for quantity, axis in zip(("bias", "noise"), axes[:, column], strict=True):
            for name, (color, style) in LOOKS.items():
                low, median, high = zip(
                    *(row[name][quantity] for row in of_kind), strict=True
                )
                if max(median) == 0:  # the bias of `is`, the noise of the others
                    continue
                axis.plot(ESS, median, style, color=color, linewidth=2, label=name)
                axis.fill_between(ESS, low, high, color=color, alpha=0.15, linewidth=0)
            axis.set(yscale="log", xlim=(1, min(ESS)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.grid(alpha=0.3)
        axes[0, column].set_title(f"$\\pi_b$ is {kind}")
        axes[1, column].set_xlabel("$e_B$, from fresh to stale")
    axes[0, 0].set_ylabel("bias of the gradient / its norm")
    axes[1, 0].set_ylabel("noise of one token's gradient / norm")
    axes[0, 2].legend(title="bias of `is`: 0", loc="upper left", ncols=2, fontsize=9)
    axes[1, 2].legend(title="noise of top K: 0", loc="upper left", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    generators = [torch.Generator().manual_seed(seed) for seed in range(POLICIES)]
    normal = torch.stack(
        [
            torch.randn(2, VOCABULARY, generator=g, dtype=torch.float64)
            for g in generators
        ]
    )  # [S, 2, V]
    logits = LOGIT_STD * normal[:, 0]
    noise = normal[:, 1]
    print("medians: bias of the gradient, and noise of one token's, over its norm")
    print(
        "pi_b      e_B      KL |  k3 bias   noise | is noise |   bias of top 1, 5, 20"
    )
    rows = []
    for kind in KINDS:
        for ess in ESS:
            strength = strength_of(kind, logits, noise, ess)
            logp_behavior = behavior(kind, logits, noise, strength)
            row = {
                "pi_b": kind,
                "e_B": ess,
                "strength": quartiles(strength),
                "KL": quartiles(exact_kl(logits, logp_behavior)),
            }
            for name, quantities in compare(logits, logp_behavior).items():
                row[name] = {key: quartiles(x) for key, x in quantities.items()}
            rows.append(row)
            top = " ".join(f"{row[f'top {k}']['bias'][1]:7.3f}" for k in (1, 5, 20))
            print(
                f"{kind:8} {ess:4} {row['KL'][1]:7.4f} |  {row['k3']['bias'][1]:7.3f} "
                f"{row['k3']['noise'][1]:7.2f} | {row['is']['noise'][1]:8.2f} | {top}"
            )
    content = {
        "command": "python experiments/kl_estimators.py",
        "vocabulary": VOCABULARY,
        "std of the logits": LOGIT_STD,
        "policies": POLICIES,
        "numbers": "quartiles over the policies",
        "rows": rows,
    }
    path = RESULTS / "kl_estimators.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    draw(rows, path.with_suffix(".png"))
    print(f"\n{path} and .png")


if __name__ == "__main__":
    main()
