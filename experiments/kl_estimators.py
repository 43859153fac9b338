"""The bias and the noise of k3 and is, the two estimators of KL(pi_theta || pi_b) in loss.py.

    python experiments/kl_estimators.py        (from the repository root; CPU, seconds)

A policy is one softmax over a small vocabulary, so that expectations under pi_b, which draws the
tokens, are sums: nothing is sampled. pi_b ~ pi_theta * exp(s d), s from small to large, and
    flatter    d = logits, s < 0: rollouts at temperature T = 1 / (1 + s) > 1
    sharper    d = logits, s > 0: rollouts at temperature T < 1
    noise      d = normal noise on every logit, s its std: rounding, as of fp8
s is solved for, so that all seeds have the same e_B = 1 / (1 + chi^2(pi_theta || pi_b)), which is
(2) for many tokens of this policy. "Gradient" is that to its logits, pi_b and its draws fixed.

What to conclude: `is` has no bias. k3 is right near e_B = 1 only: as e_B falls its gradient turns
away from the exact one, most under noise; where pi_b is flatter it also grows too large, and is
noisier than `is`. Where pi_b is sharper k3 is the calm one, and `is` needs hundreds of tokens to be
worth its noise, as its mean is made of rare tokens with a large ratio. "tokens" says how many: the
draws of one policy from which on `is` has the smaller mean squared error in the gradient (0:
always). Writes results/kl_estimators.{json,png}; numbers depend on VOCABULARY and LOGIT_STD.
"""

import json
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # loss.py is a file beside this folder, not an installed package
from loss import KL_ESTIMATORS  # noqa: E402

VOCABULARY, LOGIT_STD, SEEDS = 64, 2.0, range(20)
ESS = [0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
SIGN = {"flatter": -1, "sharper": 1, "noise": 1}
QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}  # over the seeds
Row = dict[str, float | dict[str, float]]


def solve_scale(logits: Tensor, direction: Tensor, sign: int, ess: float) -> Tensor:
    """The s [S] at which e_B is ess, by bisection: e_B falls as |s| grows."""
    logp = logits.log_softmax(dim=-1)  # [S, V]
    low, high = torch.zeros_like(logits[:, 0]), torch.full_like(logits[:, 0], 8.0)  # [S]
    for _ in range(60):
        middle = (low + high) / 2  # [S]
        logb = (logits + sign * middle[:, None] * direction).log_softmax(dim=-1)  # [S, V]
        fresh = 1 / (2 * logp - logb).exp().sum(dim=-1) > ess  # (2), as E_b[rho] = 1; [S]
        low, high = torch.where(fresh, middle, low), torch.where(fresh, high, middle)  # [S]
    return sign * low


def compare(logits: Tensor, logb: Tensor) -> dict[str, Tensor]:
    """Estimators against the exact KL, in value and in gradient; every result is [S]."""
    logits = logits.clone().requires_grad_()  # [S, V]
    log_ratio = logits.log_softmax(dim=-1) - logb  # log rho of every token, [S, V]
    b, pi = logb.exp(), (logb + log_ratio.detach()).exp()  # [S, V]
    kl = ((logb + log_ratio).exp() * log_ratio).sum(dim=-1)  # KL(pi_theta || pi_b), [S]
    (kl_grad,) = torch.autograd.grad(kl.sum(), logits, retain_graph=True)  # [S, V]
    kl, norm = kl.detach(), kl_grad.norm(dim=-1)  # [S]
    result = {"kl": kl, "mean_abs_log_ratio": (b * log_ratio.detach().abs()).sum(dim=-1)}
    bias, variance = {}, {}
    for name, estimator in KL_ESTIMATORS.items():
        each = estimator(log_ratio)  # [S, V]
        (weight,) = torch.autograd.grad(each.sum(), log_ratio, retain_graph=True)  # [S, V]
        (grad,) = torch.autograd.grad((b * each).sum(), logits, retain_graph=True)  # mean, [S, V]
        value = (b * each.detach()).sum(dim=-1)  # [S]
        value_variance = (b * (each.detach() - value[:, None]) ** 2).sum(dim=-1)  # [S]
        score_square = 1 - 2 * pi + (pi**2).sum(dim=-1, keepdim=True)  # |grad log pi|^2, [S, V]
        variance[name] = (b * weight**2 * score_square).sum(dim=-1) - (grad**2).sum(dim=-1)  # [S]
        bias[name] = (grad - kl_grad).norm(dim=-1)  # [S]
        result[f"{name}_value_over_kl"] = value / kl
        result[f"{name}_value_std_over_kl"] = value_variance.sqrt() / kl  # of one sample
        result[f"{name}_grad_norm_ratio"] = grad.norm(dim=-1) / norm
        result[f"{name}_grad_cosine"] = torch.cosine_similarity(grad, kl_grad, dim=-1)
        result[f"{name}_grad_std_over_norm"] = variance[name].sqrt() / norm  # of one sample
        result[f"{name}_grad_bias_over_norm"] = bias[name] / norm
    tokens = (variance["is"] - variance["k3"]) / bias["k3"] ** 2  # n: bias^2 + variance / n equal
    return result | {"tokens": tokens.clamp(min=0)}


def draw(results: dict[str, list[Row]], path: Path) -> None:
    panels = {
        "value_over_kl": "value: mean / exact KL",
        "grad_norm_ratio": "gradient: norm of the mean / exact norm",
        "grad_cosine": "gradient: cosine of the mean with the exact one",
        "grad_std_over_norm": "gradient: std of one sample / exact norm",
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axis, (key, title) in zip(axes.flat, panels.items(), strict=True):
        curves = [("k3", case, f"C{i}", f"k3, {case}") for i, case in enumerate(results)]
        if key == "grad_std_over_norm":
            curves += [("is", case, f"C{i}", f"is, {case}") for i, case in enumerate(results)]
        else:  # no bias: the same line for each of them
            curves += [("is", "noise", "black", "is, all three")]
        for name, case, color, label in curves:
            y = {q: [row[f"{name}_{key}"][q] for row in results[case]] for q in QUANTILES}
            style = "-" if name == "k3" else "--"
            axis.plot(ESS, y["median"], style, color=color, marker="o", ms=3, label=label)
            axis.fill_between(ESS, y["q25"], y["q75"], color=color, alpha=0.12, lw=0)
        axis.set(title=title, xlabel="e_B, from fresh to stale", xlim=(1.0, min(ESS)))
        if key != "grad_cosine":
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.legend(title="estimator, pi_b")
    title = "Estimators of KL(pi_theta || pi_b) from tokens that pi_b drew"
    figure.suptitle(f"{title}: median and quartiles of {len(SEEDS)} policies")
    figure.savefig(path, dpi=120)


def main() -> None:
    seeded = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    normal = torch.stack([torch.randn(2, VOCABULARY, generator=g).double() for g in seeded])
    logits, noise = LOGIT_STD * normal[:, 0], normal[:, 1]  # [S, V] each
    columns = ["strength", "kl", "k3_value_over_kl", "k3_grad_norm_ratio", "k3_grad_cosine"]
    columns += ["k3_grad_std_over_norm", "is_grad_std_over_norm", "tokens"]
    line = "{:>7} {:5.2f} {:9.2f} {:5.3f} | {:9.2f} {:5.2f} {:7.2f} {:5.1f} | {:7.1f} | {:6.0f}"
    print("   pi_b   e_B  T or std    KL | k3: value  norm  cosine   std | is: std | tokens")
    results: dict[str, list[Row]] = {case: [] for case in SIGN}
    for case, ess in ((case, ess) for case in SIGN for ess in ESS):
        direction = noise if case == "noise" else logits  # [S, V]
        scale = solve_scale(logits, direction, SIGN[case], ess)  # [S]
        logb = (logits + scale[:, None] * direction).log_softmax(dim=-1)  # log pi_b, [S, V]
        found = {"strength": scale if case == "noise" else 1 / (1 + scale)} | compare(logits, logb)
        row: Row = {"ess": ess}
        for name, x in found.items():
            row[name] = {k: float(f"{x.quantile(q).item():.4g}") for k, q in QUANTILES.items()}
        results[case].append(row)
        print(line.format(case, ess, *(row[name]["median"] for name in columns)))
    setup = dict(vocabulary=VOCABULARY, logit_std=LOGIT_STD, seeds=list(SEEDS))
    setup |= dict(command="python experiments/kl_estimators.py", torch=torch.__version__)
    path = ROOT / "experiments" / "results" / "kl_estimators.json"
    path.write_text(json.dumps(setup | {"results": results}, indent=1) + "\n")
    draw(results, path.with_suffix(".png"))
    print("saved", path, "and its .png")


if __name__ == "__main__":
    main()
