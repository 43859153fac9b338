"""How a step scales to more GPUs and nodes, on paper: bytes moved, seconds by phase.

    python experiments/scaling.py --config recipes/deepscaler-8gpu-fp8.yaml

It takes the flags of train.py, reads the model's config.json alone, and prints a table
for 1, 2, 4 and 8 nodes of 8 GPUs: once with the same batch (strong scaling), and once
with a batch that grows with the nodes (weak). The rates are those of H100 data sheets,
times the share of them that well-tuned code gets, a guess. So the seconds are a model
and no measurement. It shows which phase stops scaling, and why.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.memory import (
    PROMPT,
    Sizes,
    kv_bytes_per_token,
    sizes_of,
)
from support.flags import PositiveCount, Probability, parse_flags
from train import Config

GB = 10**9
NODES = (1, 2, 4, 8)
RANKS_OF_NODE = 8
# Rates of an H100 SXM by its data sheet, and of a 400 Gb/s network card for each GPU.
PRODUCTS = 989e12  # floating-point operations a second, dense bfloat16
MEMORY = 3.35e12  # bytes a second
NVLINK = 450e9  # bytes a second, in each direction
NETWORK = 50e9  # bytes a second, in each direction


class ScalingConfig(Config):
    """A run of train.py, and what its seconds are counted with."""

    response_tokens: PositiveCount = 8192
    """mean length of a response; the longest has max_response_tokens"""
    share_of_products: Probability = 0.4
    """of the data sheet's products, in the update"""
    share_of_memory: Probability = 0.6
    """of the data sheet's memory rate, while vLLM decodes"""
    share_of_links: Probability = 0.7
    """of NVLink's and the network's rates, in collectives"""


@dataclass(frozen=True)
class Step:
    """Seconds of the phases of a step, and GB that a rank receives in them."""

    rollout: float
    update: float
    exposed: float  # of the update: what its products do not hide of the collectives
    sync: float
    nvlink_gb: float
    network_gb: float

    @property
    def seconds(self) -> float:
        return self.rollout + self.update + self.sync


def decode_seconds(
    cfg: ScalingConfig, model: transformers.PreTrainedConfig, sizes: Sizes, rows: int
) -> float:
    """Seconds in which an engine answers `rows` prompts of this rank.

    A decoding step reads all weights, and the cache of all sequences that are decoded
    at the same time. The longest response takes max_response_tokens steps, however few
    others there are.
    """
    kv_bytes = kv_bytes_per_token(model, 2)
    prompt = cfg.max_prompt_tokens or PROMPT
    # vLLM gives a sequence the memory that it needs. Those that are decoded at the same
    # time are halfway through on average.
    cached = prompt + cfg.response_tokens / 2
    fit = int(cfg.kv_cache_gb * 2**30 / (cached * kv_bytes))
    together = min(rows, cfg.max_num_seqs, fit)
    rounds = rows / together
    # A full round takes a mean response, and the last one the longest.
    steps = (rounds - 1) * cfg.response_tokens + cfg.max_response_tokens
    weight_bytes = 2 * sizes.total
    if cfg.rollout_quantization != "none":
        weight_bytes -= sizes.linear
    step_bytes = weight_bytes + together * cached * kv_bytes
    by_memory = step_bytes / (MEMORY * cfg.share_of_memory)
    by_products = 2 * sizes.total * together / (PRODUCTS * cfg.share_of_products)
    return steps * max(by_memory, by_products)


def step_on(
    cfg: ScalingConfig, model: transformers.PreTrainedConfig, nodes: int
) -> Step:
    """A step on so many nodes."""
    sizes = sizes_of(model, RANKS_OF_NODE)
    ranks = nodes * RANKS_OF_NODE
    rows = -(-cfg.prompts_per_step // ranks) * cfg.group_size
    length = (cfg.max_prompt_tokens or PROMPT) + cfg.response_tokens
    tokens = rows * length
    micro_batches = -(-tokens // cfg.micro_batch_tokens)

    # A forward pass is 2 operations a weight and token, and attention to half of the
    # sequence on average; a backward pass is two of it.
    attention = 4 * sizes.layers * sizes.query * length / 2
    forward = tokens * (2 * sizes.total + attention)
    passes = 3 + cfg.gradient_checkpointing + (micro_batches > 1)
    products = passes * forward / (PRODUCTS * cfg.share_of_products)
    # FSDP gathers the weights in bfloat16 for each forward and backward pass, and
    # scatters the gradient in float32: of all other ranks of the node.
    others = (RANKS_OF_NODE - 1) / RANKS_OF_NODE
    gathers = 2 + (micro_batches > 1)
    nvlink_bytes = micro_batches * others * (gathers * 2 + 4) * sizes.total
    # Across nodes a rank's shard of the gradient is reduced after each micro-batch.
    network_bytes = (
        micro_batches * 2 * (nodes - 1) / nodes * 4 * sizes.total / RANKS_OF_NODE
    )
    # For e_B every rank gets log rho, the advantage and the mask of all rows.
    ratio_bytes = 3 * 4 * rows * (ranks - 1) * cfg.max_response_tokens
    if nodes == 1:
        nvlink_bytes += ratio_bytes
    else:
        network_bytes += ratio_bytes
    collectives = nvlink_bytes / NVLINK + network_bytes / NETWORK
    exposed = max(0.0, collectives / cfg.share_of_links - products)

    # The sync: weights in bfloat16 from the other ranks of the node, into the engine.
    sync_bytes = others * 2 * sizes.total
    sync = sync_bytes / (NVLINK * cfg.share_of_links)
    sync += 2 * 2 * sizes.total / (MEMORY * cfg.share_of_memory)
    return Step(
        rollout=decode_seconds(cfg, model, sizes, rows),
        update=products + exposed,
        exposed=exposed,
        sync=sync,
        nvlink_gb=(nvlink_bytes + sync_bytes) / GB,
        network_gb=network_bytes / GB,
    )


def table(cfg: ScalingConfig, model: transformers.PreTrainedConfig, weak: bool) -> str:
    """A line for each number of nodes; efficiency is against one node."""
    lines = [
        "| nodes | GPUs | prompts a step | rollout, s | update, s | "
        "of it waiting for links, s | sync, s | step, s | efficiency | "
        "NVLink, GB | network, GB |",
        "|" + "---|" * 11,
    ]
    one_node = step_on(cfg, model, 1)
    for nodes in NODES:
        factor = nodes if weak else 1
        prompts = cfg.prompts_per_step * factor
        step = step_on(
            cfg.model_copy(update={"prompts_per_step": prompts}), model, nodes
        )
        efficiency = one_node.seconds / step.seconds * factor / nodes
        lines.append(
            f"| {nodes} | {nodes * RANKS_OF_NODE} | {prompts} | {step.rollout:.0f} | "
            f"{step.update:.1f} | {step.exposed:.1f} | {step.sync:.2f} | "
            f"{step.seconds:.0f} | {efficiency:.0%} | {step.nvlink_gb:.0f} | "
            f"{step.network_gb:.1f} |"
        )
    return "\n".join(lines)


def report(cfg: ScalingConfig) -> str:
    """Both tables, as Markdown."""
    model = transformers.AutoConfig.from_pretrained(cfg.model)
    return (
        f"The same batch on more nodes:\n\n{table(cfg, model, weak=False)}\n\n"
        f"A batch that grows with the nodes:\n\n{table(cfg, model, weak=True)}\n"
    )


if __name__ == "__main__":
    print(report(parse_flags(ScalingConfig)))
