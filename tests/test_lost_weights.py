"""The weight sync is checked by what it did, not by the label that it set.

A sync that loses a tensor, or a part of a fused layer, is noticed in every setting:
also under fp8, lag, top-p and another temperature, where ratios are not near 1 anyway
and the on-policy check is silent.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import KEPT, ROOT
from transformers import AutoModelForCausalLM

from policy import Policy, build_policy, full_weights
from rollout import Engine
from support.flags import Refused
from support.probe import SyncProbe

# vLLM fuses the first two with their neighbors, and an error there is of a part.
IN_FUSED_LAYERS = [
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.2.mlp.up_proj.weight",
]
WHOLE_LAYERS = [
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.input_layernorm.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
]


def move(policy: Policy, scale: float) -> None:
    """Something like an update: noise on every weight."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.to_local().add_(scale * noise)


def without(name: str, policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights on their way into the engine, but one."""
    return ((n, weight) for n, weight in full_weights(policy) if n != name)


@pytest.fixture(scope="module", params=["none", "fp8_per_channel"])
def synced(request, build_engine, group) -> tuple[Engine, Policy]:
    """An engine and a policy in bfloat16 that have been in sync once."""
    engine = build_engine(dtype="bfloat16", quantization=request.param)
    policy = build_policy("tiny", group)
    engine.load_weights(full_weights(policy), version="0")
    # A hundredth of a nat: an update as small as those of a real run.
    move(policy, 0.001)
    return engine, policy


@pytest.mark.parametrize("name", IN_FUSED_LAYERS + WHOLE_LAYERS)
def test_a_sync_without_one_tensor_is_refused_however_little_it_changed(name, synced):
    engine, policy = synced
    assert name in dict(full_weights(policy))
    with pytest.raises(
        Refused, match="the sync to weights '1' (brought nothing to|left out)"
    ):
        engine.load_weights(without(name, policy), version="1")
    engine.load_weights(full_weights(policy), version="1")


def test_a_whole_sync_is_not_refused_and_keeps_the_distance_of_the_start(
    synced, prompts
):
    engine, policy = synced
    engine.load_weights(full_weights(policy), version="1")
    probe = SyncProbe(engine, policy, prompts)
    # 0.001 nats in bfloat16 and 0.003 in fp8.
    assert 0 < probe.at_start < 0.01
    move(policy, 0.01)
    engine.load_weights(full_weights(policy), version="2")
    assert probe.check(engine, policy, step=5) < 0.02
    move(policy, -0.01)


# A loader that says nothing of what it left out: the probe's business. (tiny's head is
# its embedding, which the engine has once; a final norm of half the size is a
# temperature of 2, to which tiny's certain tokens are indifferent.)


@pytest.mark.parametrize(
    "name", [*IN_FUSED_LAYERS, *WHOLE_LAYERS[:3], "lm_head.weight"]
)
def test_the_probe_notices_a_tensor_that_was_lost_without_a_word(name, synced, prompts):
    engine, policy = synced
    engine.load_weights(full_weights(policy), version="1")
    probe = SyncProbe(engine, policy, prompts)

    def with_another(weights: Iterator) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, one of which is another's."""
        for weight_name, weight in weights:
            is_lost = weight_name == name
            yield weight_name, weight.roll(1, dims=0) * 0.5 if is_lost else weight

    engine.load_weights(with_another(full_weights(policy)), version="2")
    with pytest.raises(Refused, match="step 10: after the sync, engine and trainer"):
        probe.check(engine, policy, step=10)


def test_an_engine_of_another_model_is_refused_at_the_start(
    build_engine, group, prompts
):
    engine = build_engine()
    policy = build_policy("tiny", group)
    move(policy, 0.3)
    with pytest.raises(Refused, match="before the first step, engine and trainer"):
        SyncProbe(engine, policy, prompts)


# In a run

MISMATCHES = [
    [],
    ["--lag=1"],
    ["--top_p=0.9"],
    ["--temperature=1.3"],
    ["--rollout_quantization=fp8_per_channel"],
]
NAMES = ["on-policy", "lag", "top-p", "temperature", "fp8"]


@pytest.mark.parametrize("mismatch", MISMATCHES, ids=NAMES)
def test_a_run_whose_sync_breaks_stops_in_every_setting(
    mismatch, train_here, monkeypatch
):
    load_weights = Engine.load_weights

    def broken(engine: Engine, weights: Iterator, version: str) -> None:
        """From weights 2 on the engine gets the weights of half of a layer reversed."""

        def wrong() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                is_lost = name == IN_FUSED_LAYERS[0] and version in ("2", "3")
                yield name, weight.flip(0) if is_lost else weight

        load_weights(engine, wrong(), version)

    monkeypatch.setattr(Engine, "load_weights", broken)
    monkeypatch.setattr("train.PROBE_EVERY", 2)
    with pytest.raises(Refused, match="step 2: after the sync, engine and trainer"):
        train_here("--steps=3", "--prompts_per_step=4", *mismatch)


@pytest.mark.parametrize("mismatch", MISMATCHES, ids=NAMES)
def test_a_run_whose_engine_keeps_its_first_weights_without_a_word_stops(
    mismatch, train_here, monkeypatch
):
    load_weights = Engine.load_weights

    def keeps_the_first(engine: Engine, weights: Iterator, version: str) -> None:
        if version == "0":
            load_weights(engine, weights, version)
        else:
            engine.llm.update_weight_version(version)

    monkeypatch.setattr(Engine, "load_weights", keeps_the_first)
    # Long before such an engine is off by 0.1 nats: it stays behind by all that the
    # policy moves.
    with pytest.raises(
        Refused, match="after the sync, engine and trainer differ by 0.0"
    ):
        train_here("--steps=20", "--prompts_per_step=4", "--eval_every=0", *mismatch)


# The prefix cache


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory) -> Path:
    """tiny with room for 512 tokens: vLLM caches prefixes by blocks of 128 on CPU."""
    folder = tmp_path_factory.mktemp("long")
    shutil.copytree(ROOT / "tiny", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 512
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def distance_after_a_sync(long_tiny, group, prompts) -> Callable[[], float]:
    """How far log pi_b of a long prompt's responses is from the new weights' own."""
    engine = Engine(str(long_tiny), 400, dtype="float32")
    KEPT.append(engine)
    prompt = (prompts[0] * 40)[:300]

    def measure() -> float:
        model = AutoModelForCausalLM.from_pretrained(long_tiny)
        engine.load_weights(model.state_dict().items(), version="0")
        engine.sample([prompt], 1, [0], max_tokens=8)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
        engine.load_weights(model.state_dict().items(), version="1")
        rollouts = engine.sample([prompt], 1, [0], max_tokens=8)
        with torch.no_grad():
            logp, _ = Policy(model)(rollouts)
        return float((logp - rollouts.logp_behavior)[rollouts.mask].abs().max())

    return measure


def test_a_sync_forgets_the_prefixes_that_the_old_weights_computed(
    distance_after_a_sync,
):
    # Keys and values of 256 of the 300 tokens would be the old weights': 0.1 nats off.
    assert distance_after_a_sync() < 1e-4
