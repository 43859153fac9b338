"""tools/memory.py beside what policies and engines allocate, and the recipes."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT

from policy import build_policy
from support.command import Refused, parse_flags
from tools import memory
from tools.bench import peak_bytes, random_rollouts
from tools.memory import GB, MemoryConfig, memory_of, shape_of
from train import Config

# The public dimensions of the hub's models.
CONFIGS = Path(__file__).parent / "data/configs"
RECIPES = sorted((ROOT / "recipes").glob("*gpu*.yaml"))


def recipe(path, *flags):
    """A GPU recipe on its GPUs, with the model's config.json from tests/data."""
    ranks = 1 if "1gpu" in path.name else 8
    cfg = parse_flags(MemoryConfig, [f"--config={path}", f"--ranks={ranks}", *flags])
    cfg.model = str(CONFIGS / Path(cfg.model).name)
    return cfg


def bytes_of(tensors):
    return sum(tensor.to_local().nbytes for tensor in tensors)


def test_weights_moments_and_gradients_are_counted_to_the_byte(group):
    policy = build_policy("tiny", group)
    optimizer = torch.optim.AdamW(policy.parameters())
    policy(random_rollouts(2, 31, 20))[0].sum().backward()
    optimizer.step()
    held = [*policy.parameters()]
    for state in optimizer.state.values():
        held += [state["exp_avg"], state["exp_avg_sq"]]
    parts = memory_of(Config(), shape_of("tiny"), 1)
    assert parts["update"]["weights, moments: 12 P / R"] == bytes_of(held)
    gradients = [weight.grad for weight in policy.parameters()]
    assert parts["update"]["gradient: 4 P / R"] == bytes_of(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_grow_with_tokens_as_is_counted(group, checkpointing):
    """From 1,024 to 3,072 tokens, so without weights: by 30% more or less."""
    policy = build_policy(
        "tiny", group, "bfloat16", gradient_checkpointing=checkpointing
    )

    def gradient(responses):
        policy(random_rollouts(responses, 63, 20))[0].sum().backward()

    real = peak_bytes(lambda: gradient(48)) - peak_bytes(lambda: gradient(16))
    shape = shape_of("tiny")
    counted = [
        memory_of(
            Config(micro_batch_tokens=tokens, gradient_checkpointing=checkpointing),
            shape,
            ranks=1,
        )["update"]["activations of a micro-batch"]
        for tokens in (2048, 4096)
    ]
    assert counted[1] - counted[0] == pytest.approx(real, rel=0.3)


def test_fp8_has_one_byte_for_a_weight_of_a_layer_and_a_second_engine():
    cfg = recipe(ROOT / "recipes/deepscaler-8gpu-fp8.yaml")
    shape = shape_of(cfg.model)
    parts = memory_of(cfg, shape, 8)["rollout"]
    # 1 byte for 3.63e9 weights, and 2 for the other 0.39e9. The second engine has 2.
    assert shape.linear == 3_633_315_840
    weights = parts["engine: weights, KV cache"] - 24 * GB
    assert weights == 2 * 4_022_468_096 - 3_633_315_840
    assert parts["second engine, to evaluate"] - 24 * GB == 2 * 4_022_468_096


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus_and_is_refused_where_it_does_not(path):
    cfg = recipe(path)
    assert "update, with the reserve" in memory.report(cfg)
    # What is decoded together fits into the cache when responses have half the most
    # tokens, and half of these are there. With more, vLLM computes some tokens twice.
    sequence = cfg.max_prompt_tokens + cfg.max_response_tokens // 4
    room = cfg.kv_cache_gb * GB // memory.cache_bytes_per_token(shape_of(cfg.model))
    assert cfg.max_num_seqs * sequence <= room
    # train.py would refuse another number of prompts.
    assert cfg.prompts_per_step % (cfg.ranks * cfg.minibatches) == 0
    with pytest.raises(Refused, match="the rollout takes .* give more ranks"):
        memory.report(cfg.model_copy(update={"device_gb": 20.0}))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_begins_with_the_table_of_its_memory(path):
    cfg = recipe(path)
    _, *rows = memory.report(cfg).splitlines()  # The title has the model's folder.
    assert "".join(f"# {row}\n" for row in rows) in path.read_text()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(Refused, match=f"no model at '{tmp_path}'"):
        memory.report(MemoryConfig(model=str(tmp_path)))
