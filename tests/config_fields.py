"""Compare engine and policy on every field of the configs of the trainable types.

    python tests/config_fields.py TYPE >> tests/data/config_fields.jsonl

A line is one random model of two layers: its type, the fields that differ from the
type's defaults, and the largest |log pi_theta - log pi_b| of a sampled token in nats,
or the error that ended the attempt. Every weight gets noise, so that a bias or a norm
that one side leaves out is seen.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from policy import build_policy, full_weights
from rollout import Engine
from support.machine import init_distributed

SIZE = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128}
SIZE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZE |= {"head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.2}
SIZE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
ROPE = {
    "default": {"partial_rotary_factor": 0.5},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16},
}


def variants(config) -> list[dict]:
    """Return fields to override: each field of the config, and what vLLM may read."""
    fields = config.to_dict()
    tried = [{}, WINDOW, {"sliding_window": 8}, {"head_dim": 64}, {"is_causal": False}]
    for name, value in fields.items():
        if isinstance(value, bool):
            tried.append({name: not value})
        elif isinstance(value, float | int | None) and name not in SIZE:
            tried.append({name: 0.3 if isinstance(value, float) else 3})
    for name in "attention_bias bias mlp_bias qkv_bias qk_norm".split():
        tried.append({name: not fields.get(name)})
    act = "hidden_act" if "hidden_act" in fields else "hidden_activation"
    tried += [{act: each} for each in ("silu", "gelu", "relu2")]
    for layer in "full_attention", "sliding_attention":
        tried.append({"layer_types": ["full_attention", layer], "sliding_window": 8})
    original = {"original_max_position_embeddings": 32, "rope_theta": 300.0}
    for kind, factors in ROPE.items():
        tried.append({"rope_parameters": {"rope_type": kind, **original, **factors}})
    return tried


def build(model_type: str, fields: dict, folder: str) -> None:
    """Save a random model whose config has these fields."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZE | fields)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained("tiny").save_pretrained(folder)


def gap(folder: str, mesh, alive: list) -> float:
    """Return the largest |log pi_theta - log pi_b| on samples of up to 110 tokens."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    # Engines share tables of positions, which a failed load leaves damaged.
    rotary_embedding._ROPE_DICT.clear()
    engine = Engine(folder, 120, load_format="dummy", kv_cache_gb=0.02)
    # An earlier engine may have changed the class of the policy's model.
    with set_current_vllm_config(engine.llm.llm_engine.vllm_config):
        policy = build_policy(folder, mesh)
    alive += [engine, policy]
    engine.load_weights(full_weights(policy), version="0")
    prompts = [list(range(3, 6 + 9 * k)) for k in range(4)]
    rollouts = engine.sample(prompts, 1, [0, 1, 2, 3], max_tokens=80, ignore_eos=True)
    with torch.no_grad():
        logp, _ = policy(rollouts)
    policy.reshard()
    return (logp - rollouts.logp_behavior).abs()[rollouts.mask].max().item()


def main(model_type: str) -> None:
    mesh, alive, built = init_distributed(), [], []
    with TemporaryDirectory() as root:
        # All are built before the first engine, which prepares the classes of some
        # types for vLLM's compiler.
        for fields in variants(AutoConfig.for_model(model_type, **SIZE)):
            folder = f"{root}/{len(built)}"
            try:
                build(model_type, fields, folder)
            except Exception:
                continue  # transformers has no such model
            built.append((fields, folder))
        for fields, folder in built:
            row = {"type": model_type, "fields": fields, "gap": None}
            try:
                row["gap"] = gap(folder, mesh, alive)
            except Exception as error:
                row["error"] = str(error)[:90]
            print(json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
