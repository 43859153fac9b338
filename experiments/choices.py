"""What small choices of the trainer are worth: each beside what it was chosen over.

experiments/bench.py runs this and writes what it finds, by the titles of its table.
"""

import os
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed import DeviceMesh

from experiments.memory import peak_bytes
from experiments.speed import (
    HEADS,
    LISTED,
    MICRO_BATCHES,
    ROLLOUT_TURNS,
    SETTLING,
    TURNS,
    build_engine,
    first_step,
    head_gradient,
    in_turn,
    padding,
    ratios,
    sample_directly,
    seconds_of,
    spread,
)
from policy import CHUNK, Policy
from rollout import Engine, Rollouts
from train import Config, build_optimizer, rows_of_micro_batches

# Whose head is divided, into which other chunks, and for how many tokens.
HEAD = "SmolLM2-135M"
CHUNKS = (256, 4096)
CHUNK_TOKENS = 4096
# Of what takes little time or differs by little.
SHORT_TURNS = 10


def gradient_in_chunks(
    head: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor, chunk: int
) -> None:
    """speed.head_gradient, to be done again and again."""
    head_gradient(head, hidden, tokens, chunk)
    head.grad = hidden.grad = None


def measure_chunks() -> dict[str, Any]:
    """Memory and time of the head in smaller and larger chunks, beside CHUNK.

    In float32, with made-up weights, on the CPU always.
    """
    vocabulary, hidden_size = HEADS[HEAD]
    head = torch.randn(vocabulary, hidden_size, requires_grad=True)
    hidden = torch.randn(CHUNK_TOKENS, hidden_size, requires_grad=True)
    tokens = torch.randint(vocabulary, (CHUNK_TOKENS, 1 + LISTED))
    gradient = partial(gradient_in_chunks, head, hidden, tokens)
    acts = {str(chunk): partial(gradient, chunk) for chunk in (CHUNK, *CHUNKS)}
    seconds = in_turn(TURNS, **acts)
    peak = peak_bytes(acts[str(CHUNK)])
    found: dict[str, Any] = {}
    for chunk in CHUNKS:
        title = f"a head of {HEAD}'s size, chunks of {chunk:,} tokens / {CHUNK:,}"
        found[f"{title}, time"] = ratios(seconds[str(chunk)], seconds[str(CHUNK)])
        found[f"{title}, peak memory"] = peak_bytes(acts[str(chunk)]) / peak
    return found


def measure_engines(
    cfg: Config, engine: Engine, prompts: list[list[int]], engines: list[Engine]
) -> dict[str, Any]:
    """A rollout by Engine.generate, by its vLLM alone, and by one that compiles.

    Engine has vLLM compile nothing on a CPU. All have the same noise, and are asked for
    as many log-probabilities. Compiled layers round otherwise, so responses may differ:
    times are for a token. The engine that compiles is put into `engines`.
    """
    # Not at the top of the file: it takes seconds.
    import vllm

    llm_of_engine = vllm.LLM

    def compiling(*arguments: Any, **settings: Any) -> vllm.LLM:
        return llm_of_engine(*arguments, **settings | {"enforce_eager": False})

    def start() -> None:
        # Nothing is compiled beforehand, by an earlier run of this.
        no_cache = patch.dict(os.environ, VLLM_DISABLE_COMPILE_CACHE="1")
        with no_cache, patch.object(vllm, "LLM", compiling):
            compiled = build_engine(cfg, engine.max_model_len, cfg.top_logprobs)
        engines.append(compiled)

    seconds_to_start = seconds_of(start)
    listed = {"logprobs": engine.top_logprobs, "flat_logprobs": True}
    plain = partial(sample_directly, engine.llm, cfg, prompts, **listed)
    compiled = partial(sample_directly, engines[-1].llm, cfg, prompts, **listed)

    def ours() -> list:
        # What Engine.generate does beside calling vLLM.
        with engine.while_generating(engine.llm):
            return plain()

    more_tokens = tokens_in(compiled()) / tokens_in(plain())
    seconds = in_turn(ROLLOUT_TURNS, ours=ours, plain=plain, compiled=compiled)
    of_plain = [more_tokens * s for s in seconds["plain"]]
    return {
        "rollout's time in a process that only samples, vLLM alone / Engine.generate": (
            ratios(seconds["plain"], seconds["ours"])
        ),
        "rollout's time, vLLM that compiles its layers / that does not": ratios(
            seconds["compiled"], of_plain
        ),
        "start of vLLM that compiles its layers, s": seconds_to_start,
    }


def tokens_in(outputs: list) -> int:
    """Tokens of all responses in vLLM's RequestOutputs."""
    return sum(
        len(response.token_ids) for output in outputs for response in output.outputs
    )


def measure_order(policy: Policy, rollouts: Rollouts, device: str) -> dict[str, Any]:
    """The gradient of log pi_theta in micro-batches by length, beside those in the
    order of sampling.

    Both have equally many responses in each.
    """
    sampled = list(range(len(rollouts.text)))
    # As a single micro-batch they stay in the order of rows_of_micro_batches.
    (by_length,) = rows_of_micro_batches(rollouts, sampled, 2**30, policy.sharing)
    count = len(sampled) // MICRO_BATCHES
    orders = {}
    for name, rows in (("by length", by_length), ("as sampled", sampled)):
        orders[name] = [rows[i : i + count] for i in range(0, len(rows), count)]

    def gradient(micro_batches: list[list[int]]) -> None:
        for rows in micro_batches:
            policy(rollouts.select(rows, device))[0].sum().backward()
        policy.zero_grad()

    for _ in range(SETTLING):
        gradient(orders["as sampled"])
    acts = {name: partial(gradient, order) for name, order in orders.items()}
    seconds = in_turn(SHORT_TURNS, **acts)
    found: dict[str, Any] = {
        f"padding, share of the places in {MICRO_BATCHES} micro-batches {name}": (
            padding(policy, rollouts, order)
        )
        for name, order in orders.items()
    }
    title = f"gradient's time, {MICRO_BATCHES} micro-batches by length / as sampled"
    found[title] = ratios(seconds["by length"], seconds["as sampled"])
    return found


def measure_optimizer(policy: Policy, cfg: Config) -> dict[str, Any]:
    """An optimizer step of the fused AdamW, beside that of torch's default."""
    fused, _ = build_optimizer(policy, cfg)
    default = torch.optim.AdamW(
        policy.parameters(), cfg.learning_rate, weight_decay=cfg.weight_decay
    )
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)
    seconds = in_turn(SHORT_TURNS, fused=fused.step, default=default.step)
    policy.zero_grad()
    return {
        "an optimizer step by fused AdamW, s": spread(seconds["fused"]),
        "optimizer step's time, fused AdamW / torch's default": ratios(
            seconds["fused"], seconds["default"]
        ),
    }


def measure_lists(rollouts: Rollouts) -> dict[str, Any]:
    """A list of log-probabilities for each response, as Engine.as_rollouts has them
    from vLLM: as a tensor by way of numpy, beside torch's own.
    """
    lists = [
        logp[mask].flatten().tolist()
        for logp, mask in zip(rollouts.top_logp_behavior, rollouts.mask, strict=True)
    ]

    def by_numpy() -> None:
        torch.from_numpy(np.concatenate([np.array(of, np.float32) for of in lists]))

    def by_torch() -> None:
        torch.cat([torch.tensor(of) for of in lists])

    seconds = in_turn(SHORT_TURNS, by_numpy=by_numpy, by_torch=by_torch)
    return {
        "lists of log-probabilities to a tensor, s": spread(seconds["by_numpy"]),
        "time of these, by numpy / by torch": ratios(
            seconds["by_numpy"], seconds["by_torch"]
        ),
    }


def measure_choices(
    configs: dict[str, Config], mesh: DeviceMesh, engines: list[Engine]
) -> dict[str, Any]:
    """All of the above, for each model and dtype. Rollouts come first, in a process
    that has not trained yet.
    """
    first_steps = {
        name: first_step(cfg, mesh, engines) for name, cfg in configs.items()
    }
    models: dict[str, dict[str, Any]] = {name: {} for name in configs}
    if mesh.device_type == "cpu":
        for name, (_, engine, _, prompts) in first_steps.items():
            models[name] |= measure_engines(configs[name], engine, prompts, engines)
    chunks = measure_chunks()
    for name, (policy, _, rollouts, _) in first_steps.items():
        models[name] |= measure_order(policy, rollouts, mesh.device_type)
        models[name] |= measure_lists(rollouts)
        models[name] |= measure_optimizer(policy, configs[name])
    return {"chunks": chunks, "models": models}
