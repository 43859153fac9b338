"""Test the sync of the weights from the policy to the engine, and its check.

Each engine of a run starts with random weights. So if a weight never arrives, engine
and policy are nats apart on fresh samples.
"""

import json
import shutil
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, add_noise

import train
from policy import Policy, build_policy, check_sync, full_weights
from rollout import Engine
from support.command import Stopped

SYNC_ERROR = "after the sync of weights 0, engine and policy differ by"
FP8 = ["--rollout_quantization=fp8_per_channel", "--rollout_dtype=bfloat16"]


@pytest.fixture(scope="module")
def embedded(group) -> Policy:
    """Return the embedded policy under FSDP. No test changes it."""
    return build_policy("tiny", group)


# The check


# vLLM fuses the first three with others, and the head is tied to the embedding.
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
def test_a_sync_that_lacks_one_tensor_is_refused(name, embedded, build_engine, prompts):
    engine = build_engine(load_format="dummy")
    weights = dict(full_weights(embedded))
    weights.pop(name)
    engine.load_weights(weights.items(), version="0")
    with pytest.raises(Stopped, match=SYNC_ERROR):
        check_sync(engine, embedded, prompts)


@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_a_sync_renews_all_weights_and_old_weights_are_refused(
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
    # We measured about 0.001 nats in bfloat16 and 0.003 in fp8.
    assert 0 < check_sync(engine, policy, prompts) < 0.01
    add_noise(policy, 0.05)
    with pytest.raises(Stopped, match=SYNC_ERROR):
        check_sync(engine, policy, prompts)
    engine.load_weights(full_weights(policy), version="1")
    # Noisy weights round worse: 0.07 in fp8. With the old weights it is above 0.4.
    assert check_sync(engine, policy, prompts) < 0.1


def test_in_float32_an_engine_that_is_one_update_behind_is_refused(
    engine, policy, group, prompts
):
    trained = build_policy("tiny", group)
    assert check_sync(engine, trained, prompts) < 1e-5
    add_noise(trained, 1e-4)  # AdamW's first step is the learning rate.
    with pytest.raises(Stopped, match="samples .for these dtypes the limit is 0.0001"):
        check_sync(engine, trained, prompts)
    # With a trainer in bfloat16, rounding exceeds that limit, 1e-4.
    assert check_sync(engine, build_policy("tiny", group, "bfloat16"), prompts) > 1e-4


def test_one_unlikely_token_of_a_short_answer_stops_no_run(
    engine, policy, group, prompts, monkeypatch
):
    sample = engine.sample

    def sample_short_answers(*args, **options):
        samples = sample(*args, **options | {"max_tokens": 4})
        samples.logp_behavior[0, 0] += 4
        return samples

    monkeypatch.setattr(engine, "sample", sample_short_answers)
    # 4 nats are 0.06 in the mean over 64 tokens. Over 16 tokens they would be 0.25,
    # above the limit of bfloat16, 0.15.
    half = build_policy("tiny", group, "bfloat16")
    assert 0.06 < check_sync(engine, half, prompts) < 0.1


def test_all_ranks_stop_if_one_exceeds_the_limit(engine, policy, embedded, monkeypatch):
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
    with pytest.raises(Stopped, match="0.05 nats .* the limit is 0.03"):
        check_sync(engine, embedded, prompts)


def test_after_a_check_the_policy_still_hands_out_its_newest_weights(
    engine, policy, group, prompts
):
    # Without a backward pass FSDP's root would stay gathered, with weights that are
    # outdated after the next optimizer step.
    trained = build_policy("tiny", group)
    check_sync(engine, trained, prompts)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(1.0)
    sent = dict(full_weights(trained))
    # The tied head has both of its names, because an engine needs both.
    assert sorted(sent) == sorted(policy.state_dict())
    for name, weight in policy.state_dict().items():
        assert torch.allclose(sent[name], weight + 1.0, atol=1e-6), name


# In a run


@pytest.mark.parametrize(
    "loses, sentence, flags",
    [
        (lambda engine, version: True, SYNC_ERROR, []),
        (lambda engine, version: version > "0", "after the sync of weights 5, ", []),
        (
            lambda engine, version: version > "0",
            "after the sync of weights 5, ",
            ["--lag=1", "--temperature=1.3", "--top_p=0.9", *FP8],
        ),
        # The engine that evaluates is the one without fp8.
        (lambda engine, version: engine.quantization == "none", SYNC_ERROR, FP8),
    ],
)
def test_a_run_stops_if_an_engine_silently_keeps_its_weights(
    loses, sentence, flags, train_here, monkeypatch
):
    load_weights = Engine.load_weights

    def forgetful(engine: Engine, weights: Iterator, version: str) -> None:
        if loses(engine, version):
            engine.llm.update_weight_version(version)
        else:
            load_weights(engine, weights, version)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match=sentence):
        patch.setattr(Engine, "load_weights", forgetful)
        train_here(
            *("--steps=9", "--prompts_per_step=4", "--group_size=4"),
            *("--minibatches=4", "--learning_rate=1e-3", *flags),
        )


def test_every_evaluation_of_an_fp8_run_is_of_the_newest_policy(
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
    # The evaluating engine differs from the policy only by rounding to bfloat16.
    assert max(distances) < 0.01
    assert len(distances) == 2


# The prefix cache


def test_a_sync_forgets_the_prefixes_that_the_old_weights_computed(
    build_engine, group, prompts, tmp_path
):
    # On a CPU vLLM caches prefixes in blocks of 128 tokens, so tiny needs more room.
    folder = tmp_path / "long"
    shutil.copytree(ROOT / "tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 512})
    )
    engine = build_engine(folder, max_model_len=400)
    policy = build_policy(str(folder), group)
    prompt = (prompts[0] * 40)[:300]
    for version in "0", "1":
        engine.load_weights(full_weights(policy), version)
        # If the keys and values of 256 of the 300 tokens were those of weights 0, log
        # pi_b would be 0.1 nats off.
        assert check_sync(engine, policy, [prompt]) < 1e-4
        add_noise(policy, 0.02)
