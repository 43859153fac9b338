"""How tight is the KL over K tokens and one bucket, for a real vocabulary?

    python experiments/smollm2.py models/SmolLM2-135M-Instruct
    python experiments/kl_tightness.py --model models/SmolLM2-135M-Instruct

loss.kl_divergence over the K likeliest tokens of pi_b is a lower bound of the KL of
(12). Here an engine lists its whole vocabulary at each position it samples, so that the
KL and its gradient are known, and each K can be compared with them. The engine is hot,
cold, or rounds to fp8; the policy is the same model in float32. Writes
experiments/results/kl_tightness.json, and the table kl_tightness.md beside it.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.meter import load_prompts, score_rollouts
from experiments.tables import table
from loss import KL_ESTIMATORS, effective_sample_size, kl_divergence
from policy import Policy
from rollout import Engine, init_distributed, noise_seeds
from support.flags import Flags, PositiveCount, Refused, parse_flags

RESULTS = Path(__file__).with_name("results")
LISTED = (1, 5, 20)
# What makes pi_b another distribution than pi_theta: the engine's quantization, and the
# temperature of its samples.
SETTINGS = {
    "bf16, T = 1": ("none", 1.0),
    "T = 0.6": ("none", 0.6),
    "T = 1.2": ("none", 1.2),
    "fp8": ("fp8_per_channel", 1.0),
}


class TightnessConfig(Flags):
    """A measurement of the bound."""

    model: str = "models/SmolLM2-135M-Instruct"
    """a model folder or a hub name"""
    task: str = "recipes/sums-and-products"
    """whose held-out prompts are asked, as train.py takes it"""
    prompts: PositiveCount = 96
    """of the task; one response to each"""
    prompts_at_once: PositiveCount = 8
    """the engine's lists of a whole vocabulary take 100 bytes an entry, or more"""
    max_response_tokens: PositiveCount = 16
    """truncate longer responses"""


class Bound:
    """What the KL over `listed` tokens gives, and its errors, summed over positions."""

    def __init__(self, listed: int) -> None:
        self.listed = listed
        self.kl = 0.0  # nats
        self.mass = 0.0  # the probability under pi_b of the listed tokens
        self.gradient_error = 0.0  # squared, summed over positions and logits

    def add(
        self, logp: torch.Tensor, logp_behavior: torch.Tensor, exact: torch.Tensor
    ) -> None:
        """Count the positions of logp and logp_behavior, [M, V], likeliest token first.

        `exact` is the gradient of the KL with respect to the logits, [M, V].
        """
        kl, gradient = kl_and_gradient(logp, logp_behavior, self.listed)
        self.kl += kl.sum().item()
        self.mass += logp_behavior[:, : self.listed].exp().sum().item()
        self.gradient_error += (gradient - exact).square().sum().item()


def kl_and_gradient(
    logp: torch.Tensor, logp_behavior: torch.Tensor, listed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KL over the first `listed` tokens, [M], and its gradient, [M, V].

    Both arguments are [M, V]. The gradient is with respect to the logits of pi_theta;
    log-probabilities are logits of themselves.
    """
    logits = logp.detach().double().requires_grad_()
    logp = logits.log_softmax(dim=-1)
    kl = kl_divergence(logp[:, :listed], logp_behavior[:, :listed])  # [M]
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    return kl.detach(), gradient


def tightness(
    engine: Engine,
    policy: Policy,
    prompts: list[list[int]],
    temperature: float,
    cfg: TightnessConfig,
) -> dict[str, Any]:
    """The KL, and what each K makes of it, on one response to each prompt."""
    vocabulary = engine.top_logprobs
    bounds = [Bound(listed) for listed in LISTED]
    seeds = noise_seeds(0, first=0, count=len(prompts), spacing=1)
    kls, estimates, log_ratios = [], [], []
    gradient_square = 0.0
    for first in range(0, len(prompts), cfg.prompts_at_once):
        rollouts = engine.sample(
            prompts[first : first + cfg.prompts_at_once],
            1,
            seeds[first : first + cfg.prompts_at_once],
            max_tokens=cfg.max_response_tokens,
            temperature=temperature,
        )
        logp, top_logp = score_rollouts(policy, rollouts)
        log_ratio = (logp - rollouts.logp_behavior)[rollouts.mask].double()  # [M]
        top_logp = top_logp[rollouts.mask]  # [M, V]
        top_logp_behavior = rollouts.top_logp_behavior[rollouts.mask]
        kl, gradient = kl_and_gradient(top_logp, top_logp_behavior, vocabulary)
        for bound in bounds:
            bound.add(top_logp, top_logp_behavior, gradient)
        kls.append(kl)
        estimates.append(KL_ESTIMATORS["is"](log_ratio))
        log_ratios.append(log_ratio)
        gradient_square += gradient.square().sum().item()
    kl = torch.cat(kls)
    estimate = torch.cat(estimates)
    log_ratio = torch.cat(log_ratios)[None]  # [1, M]
    token_count = len(kl)
    found = {
        "tokens": token_count,
        "e_B": effective_sample_size(
            log_ratio, torch.ones_like(log_ratio).bool()
        ).item(),
        "KL": kl.mean().item(),
        "KL from the sampled token": estimate.mean().item(),
        "its standard error": estimate.std().item() / math.sqrt(token_count),
        "K": {},
    }
    for bound in bounds:
        found["K"][bound.listed] = {
            "KL": bound.kl / token_count,
            "share of the KL": bound.kl / kl.sum().item(),
            "mass of pi_b": bound.mass / token_count,
            "error of the gradient": math.sqrt(bound.gradient_error / gradient_square),
        }
    return found


def table_of_settings(results: dict[str, Any]) -> str:
    """Markdown, with a column for each setting."""
    settings = results["settings"]
    rows = [
        ["", *settings],
        ["tokens", *(str(found["tokens"]) for found in settings.values())],
        ["e_B", *(f"{found['e_B']:.3f}" for found in settings.values())],
        ["KL, nats a token", *(f"{found['KL']:.5f}" for found in settings.values())],
    ]
    for listed in LISTED:
        for name in ("share of the KL", "error of the gradient", "mass of pi_b"):
            values = [found["K"][listed][name] for found in settings.values()]
            rows.append(
                [f"K = {listed}: {name}", *(f"{value:.3f}" for value in values)]
            )
    estimates = [
        f"{found['KL from the sampled token']:.4f} ± {found['its standard error']:.4f}"
        for found in settings.values()
    ]
    rows.append(["KL from the sampled token ± standard error", *estimates])
    return table(rows)


def main() -> None:
    cfg = parse_flags(TightnessConfig)
    prompts = load_prompts(
        cfg.model, cfg.task, cfg.max_response_tokens, limit=cfg.prompts
    )
    init_distributed()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        cfg.model, dtype=torch.float32
    )
    vocabulary = model.config.vocab_size
    policy = Policy(model)
    longest = max(len(prompt) for prompt in prompts) + cfg.max_response_tokens
    engines = {}
    for quantization in ("none", "fp8_per_channel"):
        engines[quantization] = Engine(
            cfg.model, longest, quantization=quantization, top_logprobs=vocabulary
        )
        engines[quantization].load_weights(model.state_dict().items(), version="0")
    results: dict[str, Any] = {"config": cfg.model_dump(), "vocabulary": vocabulary}
    results["settings"] = {}
    for name, (quantization, temperature) in SETTINGS.items():
        start = time.perf_counter()
        found = tightness(engines[quantization], policy, prompts, temperature, cfg)
        results["settings"][name] = found
        seconds = time.perf_counter() - start
        print(f"{name}: {found['tokens']} tokens, {seconds:.0f} s", flush=True)
    text = table_of_settings(results)
    print(f"\n{text}")
    (RESULTS / "kl_tightness.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "kl_tightness.md").write_text(text + "\n")
    engines["none"].close()


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(f"kl_tightness.py: {error}")
