r"""Measures how far off-policy the samples of a rollout engine are.

    python tools/meter.py --model tiny --temperature 1.2
    python tools/meter.py --rollout_quantization fp8_per_channel \
        --rollout_dtype bfloat16 --top_p 0.9
    python tools/meter.py --model models/SmolLM2-135M-Instruct \
        --task recipes/sums-and-products --responses 16 --max_response_tokens 16 \
        --top_logprobs 49152 --temperature 1.2

vLLM samples with these flags, and the trainer's forward pass scores the same tokens in
float32. Nothing is trained, and no answer is checked. The script runs on one rank
and without tensor parallelism. Any float32 trainer that samples with vLLM and these
flags has the same mismatch.

The KL is computed as in training: over the --top_logprobs likeliest tokens of pi_b and,
without top-p and top-k, one bucket for all others. The third command lists the whole
vocabulary, so its KL is exact. Such lists take 100 bytes per entry or more: 1 GB for
200 tokens.
"""

import sys
from pathlib import Path

import torch
import transformers
from pydantic import PositiveInt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from loss import effective_sample_size, ratio_sums
from policy import Policy
from rollout import Engine, noise_seed
from support.command import run_script
from support.machine import init_distributed
from support.models import model_folder


class MeterConfig(train.Config):
    """Measure how far off-policy fresh samples with these flags are."""

    responses: PositiveInt = 256
    """responses to measure, rounded up so that each prompt has equally many"""


def measure(log_ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return measures of the mismatch from the log rho [N, T] of a batch, in nats."""
    tokens = log_ratio[mask].double()  # [M]
    ratio = tokens.exp()
    found = {
        "e_B": effective_sample_size(ratio_sums(log_ratio, mask)).item(),
        "mean |log rho|": tokens.abs().mean().item(),
        "max |log rho|": tokens.abs().max().item(),
    }
    for percent in (1, 50, 99):
        quantile = ratio.quantile(percent / 100, interpolation="nearest")
        found[f"rho q{percent}"] = quantile.item()
    # Under pi_b, the mean of rho log rho - rho + 1 is the KL.
    found["KL, sampled token"] = (ratio * tokens - ratio + 1).mean().item()
    return found


def main() -> None:
    cfg = MeterConfig.from_flags()
    _, _, heldout, max_model_len = train.load_data(cfg)
    prompts = heldout.prompts[: cfg.responses]
    device = torch.device(init_distributed().device_type)
    # The model is built before the engine, as vLLM changes classes of transformers.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder(cfg.model), dtype=torch.float32, trust_remote_code=False
    ).to(device)
    policy = Policy(model, cfg.policy_temperature)
    engine = Engine(
        cfg.model,
        max_model_len,
        quantization=cfg.rollout_quantization,
        dtype=cfg.rollout_dtype,
        top_logprobs=cfg.top_logprobs,
        kv_cache_gb=cfg.kv_cache_gb,
        max_num_seqs=cfg.max_num_seqs,
    )
    to_each = -(-cfg.responses // len(prompts))  # rounded up
    rollouts = engine.sample(
        prompts,
        to_each,
        [noise_seed(cfg.seed, group, to_each) for group in range(len(prompts))],
        max_tokens=cfg.max_response_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
    )
    rollouts = rollouts.select(torch.arange(len(rollouts.text)), device)
    with torch.no_grad():
        logp, top_logp = policy(rollouts)
    log_ratio = logp - rollouts.logp_behavior  # (7), [N, T]
    mask = rollouts.mask

    print(f"{len(rollouts.text)} responses, {int(mask.sum())} tokens")
    # Under pi_b, the mean of -log pi_b is the entropy.
    print(f"{'entropy of pi_b':20}{-rollouts.logp_behavior[mask].mean():10.5g}")
    for name, value in measure(log_ratio, mask).items():
        print(f"{name:20}{value:10.5g}")
    kl = train.kl_at_positions(top_logp, rollouts, cfg)  # [N, T]
    print(f"{f'KL, K = {top_logp.shape[-1]}':20}{kl[mask].mean():10.5g}")


if __name__ == "__main__":
    run_script(main)
