"""Computes the memory that a run needs on each GPU, before anything is loaded.

    python tools/memory.py --config recipes/gsm8k-8gpu.yaml --ranks 8

It takes the flags of train.py, but assumes that trainer and engine compute in bfloat16
and that rollout_tp is at most the number of key heads. It reads only the model's
config.json; --model has to be a model folder or a name without a revision. A GB is
2^30 bytes, as in --kv_cache_gb, and an "80 GB" card offers 79 of these. The script
refuses a run that does not fit.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from policy import CHUNK
from support.command import Refused, run_script
from train import Config

GB = 2**30
PROMPT = 1024  # tokens assumed for a prompt if max_prompt_tokens sets no limit
ELEMENT = 2  # bytes: trainer and engine compute in bfloat16
# This estimate covers CUDA's context, NCCL, CUDA graphs, fragmentation, vLLM's prefill
# and sampler, and the temporary tensors of a layer. A sleeping engine keeps its CUDA
# graphs and NCCL's buffers.
RESERVE = 12 * GB


class MemoryConfig(Config):
    """Compute the memory that a run of train.py needs on each GPU."""

    ranks: PositiveInt = 1
    """GPUs per node"""
    device_gb: PositiveFloat = 79.0
    """memory of a GPU in GB of 2^30 bytes"""


class Shape(NamedTuple):
    """Sizes of a model. A head that is tied to the embedding counts once."""

    total: int  # P, all weights
    linear: int  # weights of the linear layers, without the head
    head: int  # weights of the head
    root: int  # weights outside of the layers: embedding, last norm, head
    layers: int  # number of layers
    hidden: int  # elements of a hidden state
    activations: int  # bytes that all layers keep per token
    key_value: int  # elements of a key in a layer; a value has as many


def shape_of(model_name: str) -> Shape:
    """Return the sizes of a model like Llama or Qwen.

    Raises Refused if there is no such model.
    """
    try:
        config = AutoConfig.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise Refused(f"no model at {model_name!r}: {reason}") from None
    with torch.device("meta"):  # without memory for the weights
        model = AutoModelForCausalLM.from_config(config)
    layers = model.base_model.layers
    attention = layers[0].self_attn
    in_layers = list(layers.parameters())
    total = model.num_parameters()
    queries = attention.o_proj.in_features
    key_value = queries * config.num_key_value_heads // config.num_attention_heads
    # For the backward pass, each of two RMS norms of a layer keeps a float32 input, a
    # normalized and a weighted output. Attention keeps q, k, v and its output, and the
    # MLP keeps four activations of intermediate_size.
    norms = 2 * (4 + 2 * ELEMENT) * config.hidden_size
    wide = 2 * (queries + key_value)
    wide += 4 * config.intermediate_size
    return Shape(
        total=total,
        linear=sum(weight.numel() for weight in in_layers if weight.dim() == 2),
        head=model.get_output_embeddings().weight.numel(),
        root=total - sum(weight.numel() for weight in in_layers),
        layers=len(layers),
        hidden=config.hidden_size,
        activations=len(layers) * (norms + ELEMENT * wide),
        key_value=key_value,
    )


def engine_bytes(cfg: Config, shape: Shape, quantization: str) -> int:
    """Return the bytes of an engine's weights and KV cache.

    With fp8 a weight of a linear layer takes one byte.
    """
    weights = ELEMENT * shape.total
    if quantization != "none":
        weights -= (ELEMENT - 1) * shape.linear
    return weights // cfg.rollout_tp + int(cfg.kv_cache_gb * GB)


def memory_of(cfg: Config, shape: Shape, ranks: int) -> dict[str, dict[str, int]]:
    """Return the bytes on one of a node's GPUs, by phase and by use.

    The engine sleeps during an update. If rollouts are quantized, a second engine
    evaluates the policy, and it never sleeps.
    """
    always = {"weights, moments: 12 P / R": 12 * shape.total // ranks}
    if cfg.rollout_quantization != "none":
        always["second engine, to evaluate"] = engine_bytes(cfg, shape, "none")
    engine = engine_bytes(cfg, shape, cfg.rollout_quantization)
    prompt = cfg.max_prompt_tokens or PROMPT
    tokens = max(cfg.micro_batch_tokens, prompt + cfg.max_response_tokens)
    kept = shape.activations
    if cfg.gradient_checkpointing:
        # Every layer keeps its input, and the one being recomputed keeps all
        # activations.
        kept = shape.layers * ELEMENT * shape.hidden + kept // shape.layers
    vocabulary = shape.head // shape.hidden
    update = {
        "gradient: 4 P / R": 4 * shape.total // ranks,
        # FSDP keeps the embedding and the head unsharded during the update, and at its
        # end also their gradient.
        "embedding, head, gradient: 4 bytes": 2 * ELEMENT * shape.root,
        "activations of a micro-batch": tokens * kept,
        # These are in float32: the head, its gradient, a chunk's gradient of the head,
        # and three copies of a chunk's logits.
        "head in chunks": 3 * 4 * (shape.head + min(CHUNK, tokens) * vocabulary),
    }
    rollout = {"engine: weights, KV cache": engine}
    return {"rollout": always | rollout, "update": always | update}


def cache_bytes_per_token(shape: Shape) -> int:
    """Return the bytes that a token takes in the KV cache of all layers."""
    return 2 * shape.layers * shape.key_value * ELEMENT


def report(cfg: MemoryConfig) -> str:
    """Return a table of `memory_of`. Raises Refused if a phase does not fit."""
    shape = shape_of(cfg.model)
    phases = memory_of(cfg, shape, cfg.ranks)
    lines = [
        f"{cfg.model} on R = {cfg.ranks} GPUs, P = {shape.total:,}: GB on each",
    ]
    for phase, parts in phases.items():
        taken = sum(parts.values()) + RESERVE
        if taken > cfg.device_gb * GB:
            raise Refused(
                f"the {phase} needs {taken / GB:.1f} GB on each GPU, with a reserve of "
                f"{RESERVE // GB}, and a GPU has {cfg.device_gb:.1f}: use more ranks; "
                "for the update, gradient_checkpointing or fewer micro_batch_tokens; "
                "for the rollout (in fp8 for both), less kv_cache_gb or more rollout_tp"
            )
        lines += [f"  {name:36}{size / GB:7.2f}" for name, size in parts.items()]
        lines.append(f"{phase + ', with the reserve':38}{taken / GB:7.2f}")
    load = 4 * shape.total * cfg.ranks / GB
    lines.append(f"{'main memory, to load: R x 4 P':38}{load:7.2f}")
    tokens = int(cfg.kv_cache_gb * GB) // cache_bytes_per_token(shape)
    lines.append(f"{'KV cache, tokens':38}{tokens * cfg.rollout_tp:7,}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(lambda: print(report(MemoryConfig.from_flags())))
