"""What each objective does with a stale batch and with an fp8 batch: the ratios and the weights.

    python experiments/mechanism.py    # experiments/results/mechanism.{png,json}: four minutes

The stale batch is one of the laboratory's "lag 16, learning rate 0.0005" under P3O: sampled by the
weights of step SAMPLED, scored by those of step SCORED. The fp8 batch: sampled by vLLM with
fp8_per_channel from tiny/, scored by the policy in float32. For each: the distribution of rho, the
cap e_B and the tokens above it; by objective, what the tokens below and above the cap weigh on
average, the largest weight, how many have none at all; and e_B in micro-batches of 600 tokens.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
import transformers
from matplotlib import pyplot as plt
from torch import Tensor

from config import load_model_files, load_prompts
from experiments.mismatch import LARGER, flags_of
from loss import OBJECTIVES, effective_sample_size, group_advantage
from policy import Policy
from reward import score
from rollout import Engine, Rollouts, init_distributed
from train import micro_batches

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments/results"
BELOW, ABOVE = "mean |w|, rho at most e_B", "mean |w|, rho above e_B"
DROPPED = "share of tokens with A but no weight"
SAMPLED, SCORED, PROMPTS, GROUP = 33, 49, 64, 8


def weights(name: str, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """The weight on grad log pi of every response token [M], times the number of tokens."""
    logp = (rollouts.logp_behavior + log_ratio).requires_grad_()  # [N, T]
    batch = rollouts.logp_behavior, rollouts.advantage, rollouts.mask
    loss, _ = OBJECTIVES[name](logp, *batch)
    (gradient,) = torch.autograd.grad(loss, logp)
    return -gradient[rollouts.mask] * rollouts.mask.sum()


def trained(steps: int) -> transformers.PreTrainedModel:
    """The policy of the laboratory's P3O run, lag 16 with the larger learning rate, at a step."""
    flags = [*flags_of(("lag 16", "p3o", LARGER, 0), {}), "--eval_every=0", f"--steps={steps}"]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *flags, f"--out_dir={out}/run"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return transformers.AutoModelForCausalLM.from_pretrained(f"{out}/run/model")


def measure(
    policy: Policy, engine: Engine, problems: list, prompts: list
) -> tuple[Rollouts, Tensor]:
    """A batch of 64 prompts with its advantages, and its log rho [N, T]."""
    seeds = [GROUP * i for i in range(PROMPTS)]
    rollouts = engine.sample(prompts, GROUP, seeds, max_tokens=64)
    answers = [p["answer"] for p in problems for _ in range(GROUP)]
    reward = torch.tensor(score(rollouts.text, answers, "exact"))
    rollouts.advantage = group_advantage(reward.view(-1, GROUP)).flatten()
    with torch.no_grad():
        return rollouts, (policy(rollouts) - rollouts.logp_behavior) * rollouts.mask


def summary(rollouts: Rollouts, log_ratio: Tensor) -> dict:
    """What mechanism.json tells of a batch."""
    mask = rollouts.mask
    ess, ratio = effective_sample_size(log_ratio, mask).item(), log_ratio[mask].exp()  # [M]
    moved = (rollouts.advantage[:, None] * mask)[mask] != 0  # [M]
    parts = micro_batches(rollouts, list(range(len(mask))), 600)
    small = sorted(effective_sample_size(log_ratio[p], mask[p]).item() for p in parts)
    told = {
        "e_B": ess,
        "tokens": len(ratio),
        "above the cap": (ratio > ess).float().mean().item(),
        "e_B of its micro-batches: least, median, most": [small[0], median(small), small[-1]],
        "smallest and largest rho": [ratio.min().item(), ratio.max().item()],
        "objectives": {},
    }
    for name in OBJECTIVES:
        weight = weights(name, log_ratio, rollouts).abs()  # [M]
        told["objectives"][name] = {
            BELOW: weight[ratio <= ess].mean().item(),
            ABOVE: weight[ratio > ess].mean().item(),
            DROPPED: ((weight == 0) & moved).float().mean().item(),
            "max |w|": weight.max().item(),
        }
    return told


def main() -> None:
    tiny = str(ROOT / "tiny")
    old, new = trained(SAMPLED), trained(SCORED)
    initial = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    problems, prompts, *_ = load_prompts("tiny", "train", load_model_files(tiny)[0], 64)
    problems, prompts = problems[:PROMPTS], prompts[:PROMPTS]
    init_distributed()
    plain, fp8 = Engine(tiny, 128), Engine(tiny, 128, quantization="fp8_per_channel")
    plain.load_weights(old.state_dict().items(), version=str(SAMPLED))
    batches = {
        f"lag {SCORED - SAMPLED}, step {SCORED + 1}": measure(
            Policy(new), plain, problems, prompts
        ),
        "fp8 rollouts": measure(Policy(initial), fp8, problems, prompts),
    }
    found = {title: summary(*batch) for title, batch in batches.items()}
    figure, axes = plt.subplots(2, 2, figsize=(13, 7.5), layout="constrained", width_ratios=(2, 3))
    for row, (title, (rollouts, log_ratio)) in zip(axes, batches.items(), strict=True):
        told, ratio = found[title], log_ratio[rollouts.mask].exp().numpy()
        ess, (low, high) = told["e_B"], told["smallest and largest rho"]
        bins = np.geomspace(low, high, 90)
        row[0].hist(
            ratio[ratio <= ess],
            bins=bins,
            color="C0",
            label=f"{1 - told['above the cap']:.0%} below the cap",
        )
        row[0].hist(
            ratio[ratio > ess], bins=bins, color="C1", label=f"{told['above the cap']:.0%} above it"
        )
        row[0].axvline(ess, color="black", label=f"cap = e_B = {ess:.4f}")
        row[0].set(xscale="log", yscale="log", xlabel="rho", ylabel="tokens", title=title)
        row[0].legend()
        names = list(OBJECTIVES)
        for shift, (key, color) in enumerate({BELOW: "C0", ABOVE: "C1", DROPPED: "C7"}.items()):
            heights = [told["objectives"][name][key] for name in names]
            places = [i + (shift - 1) * 0.27 for i in range(len(names))]
            row[1].bar(places, heights, width=0.27, color=color, label=key)
        for i, name in enumerate(names):
            told_of = told["objectives"][name]
            digits = 0 if told_of["max |w|"] > 100 else 2
            text = f"at most\n{told_of['max |w|']:,.{digits}f}"
            if told_of[BELOW] > 1:  # beyond the axis
                text += f"\nblue: {told_of[BELOW]:,.0f}"
            box = dict(facecolor="white", edgecolor="none", pad=1)
            row[1].text(i, 1.2, text, ha="center", va="top", fontsize=8, bbox=box)
        row[1].set_xticks(range(len(names)), names)
        row[1].set(ylim=(0, 1.3), ylabel="mean |w|, or share", xlabel="|w|: the weight of a token")
    axes[1, 1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    figure.savefig(RESULTS / "mechanism.png", dpi=110)
    (RESULTS / "mechanism.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    plain.close()


if __name__ == "__main__":
    main()
