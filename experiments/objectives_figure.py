"""The weight on grad log pi of a token by its ratio, for every objective: a figure.

    python experiments/objectives_figure.py    # experiments/results/objectives.png

The gradient of a loss is -1/|B| sum_t w_t grad log pi_theta(y_t). The figure has w_t
by rho_t, by autograd through the very functions that train. The last panel is P3O's
KL: the exact one puts a weight on every token v that could have stood at the position,
and two estimators put all of it on the sampled one.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from matplotlib import pyplot as plt
from torch import Tensor

from experiments.colors import color_of
from experiments.token_weights import COMPARED, token_weights
from loss import KL_ESTIMATORS, kl_divergence

RESULTS = Path(__file__).resolve().parent / "results"
LOG_RATIO = torch.linspace(-2.5, 2.5, 1001, dtype=torch.float64)  # log rho, nats


class Curve(NamedTuple):
    """A line of the figure."""

    label: str
    objective: str
    style: str = "-"
    # What the whole batch would tell: here it is chosen.
    batch_quantities: dict[str, float] = {}


# A panel has the objectives that treat a large ratio in the same way.
PANELS = {
    "p3o: capped at $e_B$": [
        Curve("$e_B$ = 0.9", "p3o", "-", {"ess": 0.9}),
        Curve("$e_B$ = 0.5", "p3o", "--", {"ess": 0.5}),
        Curve("$e_B$ = 0.1", "p3o", ":", {"ess": 0.1}),
    ],
    "the ratio is not looked at": [Curve("reinforce", "reinforce")],
    "no gradient beyond a range": [
        Curve("grpo", "grpo"),
        Curve("dapo", "dapo", "--"),
    ],
    "the same, by response or by budget": [
        Curve("gspo", "gspo"),
        # The budget of the batch sets the cutoff, not the token.
        Curve("m2po, cutoff 0.25", "m2po", "--", {"cutoff": 0.25}),
    ],
    "capped at a constant": [
        Curve("cispo", "cispo"),
        Curve("tis", "tis", "--"),
        Curve("decoupled", "decoupled", ":"),
    ],
}


def weight_by_ratio(curve: Curve, advantage: float) -> Tensor:
    """w_t at every rho of LOG_RATIO, [M]: each token is a response of its own."""
    log_ratio = LOG_RATIO[:, None]  # [N, 1]
    weight = token_weights(
        COMPARED[curve.objective],
        log_ratio,
        logp_behavior=torch.full_like(log_ratio, -1.0),
        advantage=torch.full_like(log_ratio, advantage),
        mask=torch.ones_like(log_ratio, dtype=torch.bool),
        **curve.batch_quantities,
    )
    return weight[:, 0]


def weight_of_estimator(name: str) -> Tensor:
    """What an estimator of the KL adds to w_t of the sampled token, for 1 - e_B = 1."""
    log_ratio = LOG_RATIO.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(KL_ESTIMATORS[name](log_ratio).sum(), log_ratio)
    return -gradient


def weight_of_exact_kl() -> Tensor:
    """What the exact KL adds to the weight of a token v, over pi_b(v), for 1 - e_B = 1.

    The vocabulary has two tokens, and pi_b(v) is 0.01 at every point.
    """
    b = 0.01
    logp_behavior = torch.full_like(LOG_RATIO, b).log()  # [M]
    logp = (logp_behavior + LOG_RATIO).requires_grad_()  # [M]
    # The other token is listed too. Its weight is not looked at.
    other = (1 - logp.detach().exp()).log()
    other_behavior = (1 - logp_behavior.exp()).log()
    kl = kl_divergence(
        torch.stack([logp, other], dim=1),
        torch.stack([logp_behavior, other_behavior], dim=1),
    )
    (gradient,) = torch.autograd.grad(kl.sum(), logp)
    return -gradient / b


def draw(path: Path) -> None:
    """One panel a kind of objective, above 0 for A = +1 and below 0 for A = -1."""
    figure, axes = plt.subplots(
        2, 3, figsize=(11, 6.6), layout="constrained", sharex=True
    )
    for axis, (title, curves) in zip(axes.flat, PANELS.items(), strict=False):
        for curve in curves:
            look = {
                "color": color_of(curve.objective),
                "linestyle": curve.style,
                "linewidth": 2,
            }
            axis.plot(
                LOG_RATIO.exp(), weight_by_ratio(curve, 1.0), label=curve.label, **look
            )
            axis.plot(LOG_RATIO.exp(), weight_by_ratio(curve, -1.0), **look)
        axis.set_title(title)
    draw_kl(axes.flat[-1])
    for axis in axes.flat:
        axis.axhline(0, color="0.7", linewidth=0.8, zorder=0)
        axis.axvline(1, color="0.7", linewidth=0.8, zorder=0)
        axis.set(xscale="log", xticks=[0.1, 0.2, 0.5, 1, 2, 5, 10], ylim=(-5.5, 5.5))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.legend(loc="lower left", fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel(r"ratio $\rho = \pi_\theta / \pi_b$ of the token")
    for axis in axes[:, 0]:
        axis.set_ylabel(r"weight on grad log $\pi_\theta$")
    figure.suptitle("Above 0: A = +1, the token becomes likelier. Below 0: A = -1.")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_kl(axis: plt.Axes) -> None:
    """The last panel: the pull of P3O's second term."""
    pulls = [
        ("exact: on each v, times $\\pi_b(v)$", weight_of_exact_kl(), "p3o", "-"),
        ("is: on the sampled token", weight_of_estimator("is"), "p3o, is", "--"),
        ("k3: on the sampled token", weight_of_estimator("k3"), "p3o, k3", "-"),
    ]
    for label, weight, name, style in pulls:
        axis.plot(
            LOG_RATIO.exp(),
            weight,
            label=label,
            color=color_of(name),
            linestyle=style,
            linewidth=2,
        )
    axis.set_title("p3o's KL, times $1 - e_B$")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    ratios = (0.1, 0.5, 1.0, 2.0, 10.0)
    places = [int((LOG_RATIO.exp() - ratio).abs().argmin()) for ratio in ratios]
    print("weight of a token at A = +1    rho =", *(f"{rho:7g}" for rho in ratios))
    for curves in PANELS.values():
        for curve in curves:
            weight = weight_by_ratio(curve, 1.0).abs()
            name = curve.label.replace("$", "")
            if curve.objective not in name:
                name = f"{curve.objective}, {name}"
            print(f"{name:36}", *(f"{weight[place]:7.2f}" for place in places))
    path = RESULTS / "objectives.png"
    draw(path)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
