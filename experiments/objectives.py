"""The objectives at work, run as `python loss.py`: what e_B does, and what each does with a ratio.

Prints e_B, the cap, the KL weight and the share of capped tokens of synthetic batches from fresh to
badly stale, and draws the weight on grad log pi of every objective, by autograd through loss.py.
"""

from pathlib import Path

import torch
from matplotlib import pyplot as plt

from loss import OBJECTIVES, effective_sample_size, p3o_loss

FIGURE = Path(__file__).parent / "results" / "objectives.png"


def main() -> None:
    """Print what e_B does, from fresh to stale; draw each objective's weight on grad log pi."""
    torch.manual_seed(0)
    mask, advantage = torch.ones(64, 128, dtype=torch.bool), torch.randn(64)  # [B, T], [B]
    print("batch: log rho ~ N(-s^2/2, s^2)      e_B = cap   1 - e_B = KL weight   tokens capped")
    batches = {"same": 0.0, "bf16": 0.03, "fp8": 0.2, "stale": 0.6, "very stale": 1.5}
    for name, s in batches.items():
        log_ratio = s * torch.randn(64, 128) - s**2 / 2  # [B, T]; mean rho 1, e_B -> exp(-s^2)
        ess = effective_sample_size(log_ratio, mask)
        _, stats = p3o_loss(log_ratio, torch.zeros(64, 128), advantage, mask)
        print(f"{name:>14}, s = {s:<4} {ess:25.4f} {1 - ess:21.4f} {stats['capped']:15.1%}")

    log_ratio = torch.linspace(-2.3, 2.3, 461)[:, None]  # [B, 1]: every token its own sequence
    mask, zero = torch.ones_like(log_ratio, dtype=torch.bool), torch.zeros_like(log_ratio)
    curves = [("p3o", f"p3o, e_B = {ess}", {"ess": ess}) for ess in (0.9, 0.5, 0.1)]
    given = {"gspo": {"sequence_count": 1}, "m2po": {"cutoff": 0.25}}
    curves += [(name, name, given.get(name, {})) for name in OBJECTIVES if name != "p3o"]
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for axis, sign in zip(axes, (1, -1), strict=True):
        for i, (name, label, known) in enumerate(curves):
            logp = log_ratio.clone().requires_grad_()  # [B, 1]
            OBJECTIVES[name](logp, zero, zero + sign, mask, token_count=1, **known)[0].backward()
            style = {"color": plt.cm.Blues_r(i / 4), "lw": 3} if i < 3 else {"color": f"C{i - 2}"}
            axis.plot(log_ratio.exp(), -logp.grad, ls=["-", "--", ":"][i % 3], label=label, **style)
        axis.set(xscale="log", xlabel="rho", ylabel="weight on grad log pi", title=f"A = {sign:+}")
        axis.set_ylim(1.5 * sign - 4, 1.5 * sign + 4)
    axes[1].legend(ncols=2, loc="lower left", fontsize="small")
    figure.savefig(FIGURE, dpi=120)
    print(f"saved {FIGURE}")
