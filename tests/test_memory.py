"""Test that tools/memory.py counts what policies really allocate, and the GPU recipes.

The first test is about the head, which policy.py applies to chunks of tokens.
"""

import gc
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import policy as policy_module
from policy import Policy, build_policy
from support.command import Refused
from tools import memory
from tools.memory import GB, MemoryConfig, memory_of, shape_of
from train import Config

# The public dimensions of the hub's models.
CONFIGS = Path(__file__).parent / "data/configs"
RECIPES = sorted((ROOT / "recipes").glob("*gpu*.yaml"))


def recipe(path, *flags):
    """Return a GPU recipe on its GPUs, with the model's config.json of tests/data."""
    ranks = 1 if "1gpu" in path.name else 8
    cfg = MemoryConfig.from_flags([f"--config={path}", f"--ranks={ranks}", *flags])
    cfg.model = str(CONFIGS / Path(cfg.model).name)
    return cfg


def peak_bytes(act):
    """Return the most bytes that torch allocates at once on the CPU during act()."""
    gc.disable()  # What it freed during act() would be subtracted.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        act()
    gc.enable()
    events = record.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in allocations))


def random_rollouts(responses, length, vocabulary):
    """Return what a policy reads of responses of `length` tokens, with short prompts.

    Each prompt has one token.
    """
    listed = min(20, vocabulary)  # K
    return SimpleNamespace(
        tokens=torch.randint(vocabulary, (responses, 1 + length)),
        prompt_length=torch.ones(responses, dtype=torch.int64),
        mask=torch.ones(responses, length, dtype=torch.bool),
        top_tokens=torch.randint(vocabulary, (responses, length, listed)),
    )


def bytes_of(tensors):
    return sum(tensor.to_local().nbytes for tensor in tensors)


@pytest.mark.slow
def test_logits_are_made_only_of_response_tokens_and_never_held_all_at_once(
    monkeypatch,
):
    scored = []
    score = policy_module.token_log_probabilities

    def counted(hidden, *others):
        scored.append(len(hidden))
        return score(hidden, *others)

    monkeypatch.setattr(policy_module, "token_log_probabilities", counted)
    config = AutoConfig.from_pretrained("tiny", num_hidden_layers=0, vocab_size=20_000)
    policy = Policy(AutoModelForCausalLM.from_config(config))
    rollouts = random_rollouts(128, 64, config.vocab_size)
    peak = peak_bytes(lambda: policy(rollouts)[0].sum().backward())
    # The backward pass computes the logits again.
    assert sum(scored) == 2 * 128 * 64
    # 128 x 64 tokens have 0.66 GB of logits in float32. A chunk has 1,024 tokens, and
    # three copies of its logits take 0.25 GB.
    assert peak < 0.5 * 4 * config.vocab_size * 128 * 64


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
def test_activations_grow_with_tokens_as_counted(group, checkpointing):
    # The count is right to 30%. The difference between 3,072 and 1,024 tokens does not
    # include the weights.
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


def test_fp8_takes_one_byte_for_a_weight_of_a_layer_and_needs_a_second_engine():
    cfg = recipe(ROOT / "recipes/deepscaler-8gpu-fp8.yaml")
    shape = shape_of(cfg.model)
    parts = memory_of(cfg, shape, 8)["rollout"]
    # The engine takes 1 byte for 3.63e9 weights and 2 for the other 0.39e9. The second
    # engine takes 2 for each.
    assert shape.linear == 3_633_315_840
    weights = parts["engine: weights, KV cache"] - 24 * GB
    assert weights == 2 * 4_022_468_096 - 3_633_315_840
    assert parts["second engine, to evaluate"] - 24 * GB == 2 * 4_022_468_096


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_starts_with_its_memory_fits_its_gpus_and_is_refused_on_smaller(path):
    cfg = recipe(path)
    _, *rows = memory.report(cfg).splitlines()  # The title names the model's folder.
    assert any("update, with the reserve" in row for row in rows)
    assert "".join(f"# {row}\n" for row in rows) in path.read_text()
    # If responses reach half of the maximum length and are half done, the sequences
    # that are decoded together fit into the cache. Otherwise vLLM would compute some
    # tokens twice.
    sequence = cfg.max_prompt_tokens + cfg.max_response_tokens // 4
    room = cfg.kv_cache_gb * GB // memory.cache_bytes_per_token(shape_of(cfg.model))
    assert cfg.max_num_seqs * sequence <= room
    # train.py refuses any other number of prompts.
    assert cfg.prompts_per_step % (cfg.ranks * cfg.minibatches) == 0
    with pytest.raises(Refused, match="the rollout needs .* use more ranks"):
        memory.report(cfg.model_copy(update={"device_gb": 20.0}))
