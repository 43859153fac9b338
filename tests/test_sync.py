"""The weights on their way from the policy into the engine, and the check of them.

Each engine of a run begins with random weights. So a weight that never arrives shows:
engine and policy are then nats apart on fresh samples.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import KEPT, NONE_COMPLETE, ROOT, add_noise

import train
from policy import Policy, build_policy, check_sync, full_weights
from rollout import Engine
from support.command import Stopped

NO_WEIGHTS = "after the sync of weights 0, engine and policy differ by"
FP8 = ["--rollout_quantization=fp8_per_channel", "--rollout_dtype=bfloat16"]


@pytest.fixture(scope="module")
def embedded(group) -> Policy:
    """The embedded policy under FSDP, which no test changes."""
    return build_policy("tiny", group)


# What is refused


# vLLM fuses the first three with their neighbors, and the embedding is the head.
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_sync_that_leaves_one_tensor_out_is_refused(
    name, embedded, build_engine, prompts
):
    engine = build_engine(load_format="dummy")
    weights = dict(full_weights(embedded))
    weights.pop(name)
    engine.load_weights(weights.items(), version="0")
    with pytest.raises(Stopped, match=NO_WEIGHTS):
        check_sync(engine, embedded, prompts)


@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_a_sync_is_renewed_as_a_whole_and_old_weights_are_refused(
    quantization, build_engine, group, prompts
):
    engine = build_engine(
        load_format="dummy", dtype="bfloat16", quantization=quantization
    )
    assert engine.llm.model_config.head_dtype == torch.float32  # as in Policy
    policy = build_policy("tiny", group)
    with pytest.raises(Stopped, match="engine and policy differ by"):
        check_sync(engine, policy, prompts)
    engine.load_weights(full_weights(policy), version="0")
    # About 0.001 nats in bfloat16, and 0.003 in fp8.
    assert 0 < check_sync(engine, policy, prompts) < 0.01
    add_noise(policy, 0.05)
    with pytest.raises(Stopped, match=NO_WEIGHTS):
        check_sync(engine, policy, prompts)
    engine.load_weights(full_weights(policy), version="1")
    # Noisy weights round worse: fp8 has 0.07, the old weights more than 0.4.
    assert check_sync(engine, policy, prompts) < 0.1


def test_in_float32_an_engine_that_is_one_update_behind_is_refused(
    engine, policy, group, prompts
):
    trained = build_policy("tiny", group)
    assert check_sync(engine, trained, prompts) < 1e-5
    add_noise(trained, 1e-4)  # AdamW's first step moves a weight by the learning rate.
    with pytest.raises(
        Stopped, match="nats per token on fresh samples .the limit in float32 on a"
    ):
        check_sync(engine, trained, prompts)
    # Beside a trainer in bfloat16 more than that limit, 1e-4, is rounding.
    half = build_policy("tiny", group, "bfloat16")
    assert check_sync(engine, half, prompts) > 1e-4


def test_one_unlikely_token_of_a_short_answer_stops_no_run(
    engine, policy, group, prompts, monkeypatch
):
    sample = engine.sample

    def sample_short_answers(*args, **options):
        samples = sample(*args, **options | {"max_tokens": 4})
        samples.logp_behavior[0, 0] += 4
        return samples

    monkeypatch.setattr(engine, "sample", sample_short_answers)
    # 4 nats in 64 tokens are 0.06 in the mean. In 16 tokens they would be 0.25, above
    # the limit of bfloat16, 0.15.
    half = build_policy("tiny", group, "bfloat16")
    assert 0.06 < check_sync(engine, half, prompts) < 0.1


def test_all_ranks_stop_where_one_is_further_off(engine, policy, embedded, monkeypatch):
    def all_reduce(distance, op):
        assert op == dist.ReduceOp.MAX
        distance.clamp_(min=0.2)  # on another rank

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(Stopped, match="differ by 0.2 nats"):
        check_sync(engine, embedded, [[1]])


def test_a_float16_engine_is_close_to_a_float32_policy_and_has_a_limit_of_its_own(
    build_engine, embedded, prompts, monkeypatch
):
    engine = build_engine(load_format="dummy", dtype="float16")
    engine.load_weights(full_weights(embedded), version="0")
    assert 0 < check_sync(engine, embedded, prompts) < 0.001
    monkeypatch.setattr(dist, "all_reduce", lambda distance, op: distance.fill_(0.05))
    with pytest.raises(Stopped, match="0.05 nats .* limit in float16 is 0.03"):
        check_sync(engine, embedded, prompts)


def test_after_a_check_the_policy_still_hands_out_its_newest_weights(
    engine, policy, group, prompts
):
    # A pass without gradient would leave FSDP's root gathered, with weights that an
    # optimizer step makes old.
    trained = build_policy("tiny", group)
    check_sync(engine, trained, prompts)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(1.0)
    sent = dict(full_weights(trained))
    # The tied head is there under both its names: an engine wants both.
    assert sorted(sent) == sorted(policy.state_dict())
    for name, weight in policy.state_dict().items():
        assert torch.allclose(sent[name], weight + 1.0, atol=1e-6), name


def test_the_check_is_at_the_policys_own_temperature(engine, policy, group, prompts):
    # At T = 1 in one of the two they would be 0.3 nats apart.
    hot = build_policy("tiny", group, temperature=1.5)
    assert check_sync(engine, hot, prompts) < 1e-4


# In a run


@pytest.mark.parametrize(
    "lost_from, sentence, setting",
    [
        (0, NO_WEIGHTS, []),
        (1, "after the sync of weights 5, ", []),
        (1, "weights 5, ", ["--lag=1", "--temperature=1.3", "--top_p=0.9", *FP8]),
    ],
)
def test_a_run_whose_engine_keeps_its_weights_without_a_word_stops(
    lost_from, sentence, setting, train_here, monkeypatch
):
    load_weights = Engine.load_weights

    def forgetful(engine: Engine, weights: Iterator, version: str) -> None:
        if int(version) < lost_from:
            load_weights(engine, weights, version)
        else:
            engine.asleep = False
            engine.llm.update_weight_version(version)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match=sentence):
        patch.setattr(Engine, "load_weights", forgetful)
        train_here(
            *("--steps=9", "--prompts_per_step=4", "--group_size=4"),
            *("--minibatches=4", "--learning_rate=1e-3", *setting),
        )


def test_a_run_whose_evaluator_keeps_its_weights_stops(train_here, monkeypatch):
    load_weights = Engine.load_weights

    def forgetful(engine: Engine, weights: Iterator, version: str) -> None:
        if engine.quantization == "none":  # the second engine, which evaluates
            engine.llm.update_weight_version(version)
        else:
            load_weights(engine, weights, version)

    sentence = "after the sync of weights 0, "
    with monkeypatch.context() as patch, pytest.raises(Stopped, match=sentence):
        patch.setattr(Engine, "load_weights", forgetful)
        train_here("--steps=1", "--prompts_per_step=4", NONE_COMPLETE, *FP8)


def test_every_evaluation_of_an_fp8_run_is_of_the_policy_as_it_is_by_then(
    train_here, monkeypatch
):
    save_and_evaluate = train.save_and_evaluate
    distances = []

    def compared(step, run, cfg):
        accuracy = save_and_evaluate(step, run, cfg)
        distances.append(check_sync(run.evaluator, run.policy, run.heldout.prompts))
        return accuracy

    monkeypatch.setattr(train, "save_and_evaluate", compared)
    flags = ["--steps=1", "--learning_rate=3e-3", "--warmup_updates=0", *FP8]
    _, row = train_here(*flags, "--seed=1", "--prompts_per_step=4")
    assert row["groups_with_signal"] > 0  # so that the policy moves
    # Only rounding to bfloat16 is between the engine that evaluates and the policy.
    assert max(distances) < 0.01
    assert len(distances) == 2


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
def long_engine(long_tiny, group) -> Engine:
    engine = Engine(str(long_tiny), 400, dtype="float32")
    KEPT.append(engine)
    return engine


def test_a_sync_forgets_the_prefixes_that_the_old_weights_computed(
    long_engine, long_tiny, group, prompts
):
    policy = build_policy(str(long_tiny), group)
    prompt = (prompts[0] * 40)[:300]
    for version in "0", "1":
        long_engine.load_weights(full_weights(policy), version)
        # Keys and values of 256 of the 300 tokens could be those of weights 0, and log
        # pi_b 0.1 nats off.
        assert check_sync(long_engine, policy, [prompt]) < 1e-4
        add_noise(policy, 0.02)
