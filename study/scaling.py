"""How a step scales to more GPUs on paper, and how that of the default does on cores.

    python study/scaling.py --config recipes/deepscaler-8gpu-fp8.yaml
    python study/scaling.py --measure      # 12 minutes on two cores

The first line takes the flags of train.py, reads the model's config.json, and prints
the table of recipes/README.md. Its seconds are a model and no measurement: the rates
are those of H100 data sheets, times a share: one that was measured, and three guesses.
The second line runs the embedded default on one rank and on two, each with a core.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings of torch's C++
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.command import PositiveCount, Refused, parse_flags, run_script
from tools.bench import Failed, cell, in_rounds, ratios, run_train, still
from tools.memory import (
    GB,
    PROMPT,
    Shape,
    cache_bytes_per_token,
    engine_bytes,
    shape_of,
)
from train import Config

NODES = (1, 2, 3, 6)  # 144 prompts are a multiple of their GPUs
GPUS_OF_NODE = 8
# The rates of an H100 SXM, and of a 400 Gb/s network card for each GPU.
# Operations a second, dense bfloat16. An H200, which has the same rate, got this share
# in an update of 1.5 billion parameters (results/gpu/commands.txt).
PRODUCTS = 0.32 * 989e12
MEMORY = 0.6 * 3.35e12  # bytes a second, while vLLM decodes
NVLINK = 0.7 * 450e9  # bytes a second
NETWORK = 0.7 * 50e9  # bytes a second


class ScalingConfig(Config):
    """A run of train.py, and what its seconds are counted with."""

    response_tokens: PositiveCount = 8192
    """mean length of a response; the longest has max_response_tokens"""
    measure: bool = False
    """run the embedded default on one rank and on two instead"""
    rounds: PositiveCount = 3
    """how often each is measured"""
    counted: PositiveCount = 15
    """steps that count in each run"""


class Step(NamedTuple):
    """Seconds of the phases of a step."""

    rollout: float
    update: float
    sync: float


def rollout_seconds(cfg: ScalingConfig, shape: Shape, responses: int) -> float:
    """Seconds in which an engine gives the `responses` of a rank.

    A decoding step reads all weights, and the cache of all sequences that are decoded
    at the same time: those for which the cache has room, halfway through on average. A
    full round of them takes as many steps as the mean response has tokens, and the
    last round as many as the longest.
    """
    cached = (cfg.max_prompt_tokens or PROMPT) + cfg.response_tokens / 2
    cached *= cache_bytes_per_token(shape)
    room = int(cfg.kv_cache_gb * GB // cached)
    together = min(responses, cfg.max_num_seqs, room)
    steps = (responses / together - 1) * cfg.response_tokens + cfg.max_response_tokens
    cache_bytes = int(cfg.kv_cache_gb * GB)
    weights = engine_bytes(cfg, shape, cfg.rollout_quantization) - cache_bytes
    return steps * (weights + together * cached) / MEMORY


def step_on(cfg: ScalingConfig, shape: Shape, nodes: int, prompts: int) -> Step:
    """A step with this many prompts."""
    responses = prompts * cfg.group_size // (nodes * GPUS_OF_NODE)  # of a rank
    prompt = cfg.max_prompt_tokens or PROMPT
    length = prompt + cfg.response_tokens
    tokens = responses * length
    # A micro-batch has room for the longest response in each of its rows.
    rows = max(1, cfg.micro_batch_tokens // (prompt + cfg.max_response_tokens))
    parts = -(-responses // rows)  # micro-batches

    # A pass has 2 operations for each weight and token, and attends to half of the
    # sequence on average. A backward pass is two. Another pass finds e_B, of all
    # micro-batches but one.
    attention = 4 * shape.layers * shape.query * length / 2
    passes = 3 + cfg.gradient_checkpointing + (parts - 1) / parts
    products = passes * tokens * (2 * shape.total + attention) / PRODUCTS
    # FSDP gathers the weights in bfloat16 for each forward and backward pass, and
    # scatters the gradient in float32, among the GPUs of a node. A shard of the
    # gradient is then reduced over the nodes.
    others = (GPUS_OF_NODE - 1) / GPUS_OF_NODE
    gathers = 2 * parts + (parts - 1)
    nvlink = others * (2 * gathers + 4 * parts) * shape.total / NVLINK
    shard = 4 * shape.total / GPUS_OF_NODE
    network = parts * 2 * (nodes - 1) / nodes * shard / NETWORK
    return Step(
        rollout=rollout_seconds(cfg, shape, responses),
        # The links work while the next layer is computed.
        update=max(products, nvlink + network),
        sync=others * 4 * shape.total / NVLINK,  # gathered in float32
    )


def report(cfg: ScalingConfig) -> str:
    """A row of seconds for each number of nodes; efficiency is against one node.

    "strong" has the recipe's batch on all nodes, and "weak" one that grows with them.
    """
    shape = shape_of(cfg.model)
    lines = [
        "| nodes | GPUs | rollout, s | update, s | sync, s | strong | weak |",
        "|---|---|---|---|---|---|---|",
    ]
    alone = sum(step_on(cfg, shape, 1, cfg.prompts_per_step))
    for nodes in NODES:
        step = step_on(cfg, shape, nodes, cfg.prompts_per_step)
        larger = step_on(cfg, shape, nodes, cfg.prompts_per_step * nodes)
        lines.append(
            f"| {nodes} | {nodes * GPUS_OF_NODE} | {step.rollout:.0f} | "
            f"{step.update:.1f} | {step.sync:.2f} | {alone / sum(step) / nodes:.0%} | "
            f"{alone / sum(larger):.0%} |"
        )
    return "\n".join(lines)


def measure(cfg: ScalingConfig) -> str:
    """A step of the default on one rank and on two: ratios of a round's medians."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise Refused("--measure compares one core with two, and finds only one here")

    def run(ranks: int, prompts: int) -> float:
        settings = still("tiny", "float32", prompts_per_step=prompts)
        return run_train(settings, cfg.counted, ranks, cores[:ranks])["a step"]

    arms = {
        "alone": lambda: run(1, 32),
        "two ranks": lambda: run(2, 32),
        "half of it alone": lambda: run(1, 16),
    }
    try:
        found = in_rounds(arms, cfg.rounds)
    except Failed as error:
        raise Refused(f"a run failed: {error}") from error
    strong = ratios(found["alone"], found["two ranks"])
    weak = ratios(found["two ranks"], found["half of it alone"])
    return (
        f"the same 32 prompts, one rank / two (at best 2): {cell(strong)}\n"
        f"32 prompts on two ranks / 16 on one (at best 1): {cell(weak)}"
    )


def main() -> None:
    cfg = parse_flags(ScalingConfig)
    print(measure(cfg) if cfg.measure else report(cfg))


if __name__ == "__main__":
    run_script(main)
