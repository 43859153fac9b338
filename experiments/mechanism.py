"""What each objective does with a stale batch and with an fp8 batch: the ratios and the weights.

    python experiments/mechanism.py    # experiments/results/mechanism.{png,json}: two minutes

The stale batch: sampled by tiny/, scored by the policy that STEPS updates made of it. The fp8
batch: sampled by vLLM with fp8_per_channel, scored by the policy in float32. For each batch the
distribution of rho with the cap e_B and, by objective, the weight that a token has on average and
at most, the share of the weight on tokens above the cap, and how many tokens have none at all.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import transformers
from matplotlib import pyplot as plt

from config import load_model_files, load_prompts
from loss import OBJECTIVES, effective_sample_size, group_advantage
from policy import Policy
from reward import score
from rollout import Engine, Rollouts, init_distributed

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments/results"
STEPS, GROUP = 16, 8


def weights(name: str, log_ratio: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """The weight on grad log pi of every response token [M], times the number of tokens."""
    logp = (rollouts.logp_behavior + log_ratio).requires_grad_()  # [N, T]
    batch = rollouts.logp_behavior, rollouts.advantage, rollouts.mask
    loss, _ = OBJECTIVES[name](logp, *batch)
    (gradient,) = torch.autograd.grad(loss, logp)
    return -gradient[rollouts.mask] * rollouts.mask.sum()


def measure(
    policy: Policy, engine: Engine, problems: list, prompts: list
) -> tuple[Rollouts, torch.Tensor]:
    """A batch of 64 prompts with its advantages, and its log rho [N, T]."""
    seeds = [GROUP * i for i in range(64)]
    rollouts = engine.sample(prompts[:64], GROUP, seeds, max_tokens=64)
    answers = [p["answer"] for p in problems[:64] for _ in range(GROUP)]
    reward = torch.tensor(score(rollouts.text, answers, "exact"))
    rollouts.advantage = group_advantage(reward.view(-1, GROUP)).flatten()
    with torch.no_grad():
        return rollouts, (policy(rollouts) - rollouts.logp_behavior) * rollouts.mask


def main() -> None:
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "train.py",
            f"--steps={STEPS}",
            f"--out_dir={out}/run",
            "--eval_every=0",
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        updated = transformers.AutoModelForCausalLM.from_pretrained(f"{out}/run/model")
    initial = transformers.AutoModelForCausalLM.from_pretrained(str(ROOT / "tiny"))
    problems, prompts, *_ = load_prompts(
        "tiny", "train", load_model_files(str(ROOT / "tiny"))[0], 64
    )
    init_distributed()
    plain = Engine(str(ROOT / "tiny"), 128)
    fp8 = Engine(str(ROOT / "tiny"), 128, quantization="fp8_per_channel")
    batches = {
        f"{STEPS} updates old": measure(Policy(updated), plain, problems, prompts),
        "fp8 rollouts": measure(Policy(initial), fp8, problems, prompts),
    }
    figure, axes = plt.subplots(2, 2, figsize=(13, 7), layout="constrained")
    found: dict = {}
    for row, (title, (rollouts, log_ratio)) in zip(axes, batches.items(), strict=True):
        ess = effective_sample_size(log_ratio, rollouts.mask).item()
        ratio = log_ratio[rollouts.mask].exp()
        found[title] = {
            "e_B": ess,
            "tokens": len(ratio),
            "above the cap": (ratio > ess).float().mean().item(),
        }
        bins = torch.logspace(-1.5, 1.5, 91) if ess < 0.999 else torch.logspace(-0.05, 0.05, 91)
        row[0].hist(ratio.numpy(), bins=bins.numpy(), color="C0", alpha=0.8)
        row[0].axvline(ess, color="black", label=f"cap = e_B = {ess:.4f}")
        row[0].set(xscale="log", yscale="log", xlabel="rho", ylabel="tokens", title=title)
        row[0].legend()
        shares = {}
        for name in OBJECTIVES:
            weight = weights(name, log_ratio, rollouts).abs()
            moved = rollouts.advantage[:, None].expand_as(rollouts.mask)[rollouts.mask] != 0
            total = weight.sum()
            shares[name] = {
                "mean |w|": weight.mean().item(),
                "max |w|": weight.max().item(),
                "share of |w| on rho > e_B": (weight[ratio > ess].sum() / total).item(),
                "tokens with A != 0 and no weight": ((weight == 0) & moved).float().mean().item(),
            }
        found[title]["objectives"] = shares
        names = list(shares)
        for key, shift in (("mean |w|", -0.2), ("tokens with A != 0 and no weight", 0.2)):
            heights = [shares[name][key] for name in names]
            row[1].bar([i + shift for i in range(len(names))], heights, width=0.4, label=key)
        row[1].set_xticks(range(len(names)), names, rotation=30)
        row[1].set_ylim(0, 1.2)
        row[1].legend(loc="upper right", ncols=2)
    figure.savefig(RESULTS / "mechanism.png", dpi=110)
    (RESULTS / "mechanism.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    plain.close()


if __name__ == "__main__":
    main()
