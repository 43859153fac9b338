"""The mismatch meter: how far off-policy does a rollout engine make a policy?

    python experiments/meter.py --model tiny --temperature 1.2
    python experiments/meter.py --rollout_quantization fp8_per_channel --top_p 0.9

vLLM samples as the flags say. The trainer's forward pass scores the same tokens in
float32, and the two are compared: nothing is trained, and no answer is checked. It says
what to expect of any framework that samples with vLLM.
"""

import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Literal

# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loss import (
    KL_ESTIMATORS,
    effective_sample_size,
    kl_divergence,
    restrict_to_support,
)
from policy import Policy
from reward import load_task
from rollout import Engine, Rollouts, init_distributed, noise_seeds
from support.checks import samples_fully
from support.flags import (
    Count,
    Flags,
    PositiveCount,
    Probability,
    Refused,
    Temperature,
    parse_flags,
)
from support.prompts import check_model, encode_problems
from support.tasks import task_of

# K of the KLs that are printed, as far as the engine lists so many tokens.
LISTED = (1, 5, 20)
# A mean over fewer samples of a token says little about this token.
OFTEN = 10
# Responses of one forward pass.
ROWS = 16


class MeterConfig(Flags):
    """A measurement: what samples, and how."""

    model: str = "tiny"
    """a model folder or a hub name"""
    task: str = "tiny"
    """whose held-out prompts are asked, as train.py takes it"""
    rollout_quantization: Literal["none", "fp8_per_channel"] = "none"
    """of the engine's linear layers, weights and activations"""
    rollout_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """the engine computes in it"""
    temperature: Temperature = 1.0
    """of the rollouts"""
    top_p: Probability = 1.0
    """of the rollouts"""
    top_k: Count = 0
    """of the rollouts; 0: all tokens"""
    policy_temperature: Temperature = 1.0
    """of pi_theta"""
    top_logprobs: Count = 20
    """K: the KL is over the K likeliest tokens of pi_b; 0: from the sampled token"""
    responses: PositiveCount = 256
    """to measure on, rounded up to the same number for each prompt"""
    max_response_tokens: PositiveCount = 64
    """truncate longer responses"""


def load_prompts(
    model: str, task: str, max_response_tokens: int, limit: int
) -> list[list[int]]:
    """The task's first held-out prompts as token ids of the model. Raises Refused."""
    try:
        tokenizer, context = check_model(model)
        split = encode_problems(
            load_task(task, "heldout")[:limit],
            tokenizer,
            instruction=task_of(task).instruction,
            room=context - max_response_tokens,
            drop_long=False,
            name=f"heldout prompts of {task}",
        )
    except ValueError as error:
        raise Refused(str(error)) from error
    return split.prompts


def score_rollouts(
    policy: Policy, rollouts: Rollouts
) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi_theta of the response tokens [N, T] and of the top tokens [N, T, K]."""
    logp = torch.zeros_like(rollouts.logp_behavior)
    top_logp = torch.zeros_like(rollouts.top_logp_behavior)
    for first in range(0, len(rollouts.text), ROWS):
        rows = list(range(first, min(first + ROWS, len(rollouts.text))))
        batch = rollouts.select(rows)
        with torch.no_grad():
            batch_logp, batch_top_logp = policy(batch)
        columns = batch.mask.shape[1]
        logp[rows, :columns] = batch_logp
        top_logp[rows, :columns] = batch_top_logp
    return logp, top_logp


def measure(log_ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """What the log rho [N, T] of a batch says about the mismatch, in nats a token."""
    tokens = log_ratio[mask].double()  # [M]
    ratio = tokens.exp().sort().values
    found = {
        "e_B": effective_sample_size(log_ratio, mask).item(),
        "mean |log rho|": tokens.abs().mean().item(),
        "max |log rho|": tokens.abs().max().item(),
    }
    for percent in (1, 10, 50, 90, 99):
        place = round(percent / 100 * (len(ratio) - 1))
        found[f"rho q{percent}"] = ratio[place].item()
    found["KL, sampled token"] = KL_ESTIMATORS["is"](tokens).mean().item()
    return found


def kl_by_listed_tokens(
    top_logp: torch.Tensor, top_logp_behavior: torch.Tensor, restrict: bool
) -> dict[int, float]:
    """The mean KL over the K likeliest tokens and one bucket, for each K of LISTED.

    Both are [M, K], of M response tokens, the likeliest token of pi_b first. restrict
    says that pi_b was cut by top-p or top-k, as in train.kl_of_positions.
    """
    found = {}
    for listed in LISTED:
        if listed > top_logp.shape[-1]:
            break
        logp = top_logp[:, :listed]
        logp_behavior = top_logp_behavior[:, :listed]
        if restrict:
            logp, logp_behavior = restrict_to_support(logp, logp_behavior)
        found[listed] = kl_divergence(logp, logp_behavior).mean().item()
    return found


def most_off(
    rollouts: Rollouts, log_ratio: torch.Tensor
) -> list[tuple[float, int, int]]:
    """(mean |log rho|, samples, token id) of the tokens sampled OFTEN, worst first."""
    off: dict[int, list[float]] = defaultdict(list)
    row, t = rollouts.mask.nonzero(as_tuple=True)
    tokens = rollouts.tokens[row, rollouts.prompt_length[row] + t]
    sizes = log_ratio[row, t].abs()
    for token, size in zip(tokens.tolist(), sizes.tolist(), strict=True):
        off[token].append(size)
    often = []
    for token, of_token in off.items():
        if len(of_token) >= OFTEN:
            often.append((sum(of_token) / len(of_token), len(of_token), token))
    return sorted(often, reverse=True)


def main() -> None:
    """Sample with the engine as set, score with the trainer, and print the mismatch."""
    cfg = parse_flags(MeterConfig)
    prompts = load_prompts(
        cfg.model, cfg.task, cfg.max_response_tokens, limit=cfg.responses
    )
    start = time.perf_counter()
    init_distributed()
    engine = Engine(
        cfg.model,
        max(len(prompt) for prompt in prompts) + cfg.max_response_tokens,
        quantization=cfg.rollout_quantization,
        dtype=cfg.rollout_dtype,
        top_logprobs=cfg.top_logprobs,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        cfg.model, dtype=torch.float32
    )
    engine.load_weights(model.state_dict().items(), version="0")
    responses_to_each = -(-cfg.responses // len(prompts))  # rounded up
    rollouts = engine.sample(
        prompts,
        responses_to_each,
        noise_seeds(0, first=0, count=len(prompts), spacing=responses_to_each),
        max_tokens=cfg.max_response_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
    )
    logp, top_logp = score_rollouts(Policy(model, cfg.policy_temperature), rollouts)
    log_ratio = logp - rollouts.logp_behavior  # (7), [N, T]

    token_count = int(rollouts.mask.sum())
    seconds = time.perf_counter() - start
    print(f"{len(rollouts.text)} responses, {token_count} tokens, {seconds:.0f} s")
    # The mean of -log pi_b over samples of pi_b.
    entropy = -rollouts.logp_behavior[rollouts.mask].mean().item()
    print(f"{'entropy of pi_b':20}{entropy:10.5g}")
    for name, value in measure(log_ratio, rollouts.mask).items():
        print(f"{name:20}{value:10.5g}")
    kl_by_k = kl_by_listed_tokens(
        top_logp[rollouts.mask],
        rollouts.top_logp_behavior[rollouts.mask],
        restrict=not samples_fully(cfg),
    )
    for listed, value in kl_by_k.items():
        print(f"{f'KL, K = {listed}':20}{value:10.5g}")
    print(f"most off ({OFTEN} samples or more)")
    for size, samples, token in most_off(rollouts, log_ratio)[:5]:
        text = repr(engine.tokenizer.decode([token]))
        print(f"  {text:18}{size:10.5g}  mean |log rho| of {samples}")
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(f"meter.py: {error}")
