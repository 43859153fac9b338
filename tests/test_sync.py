"""The weights on their way from the trainer into the engine.

A sync brings the two together; a sync that is left out, is broken, or forgets a layer
shows: in the numbers of a batch, in a probe, in what vLLM says itself.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from test_rollout import AGREE, gap, moved, sample
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import train
from policy import Policy, build_policy, full_weights
from rollout import Engine
from support.checkpoints import checkpoints
from support.flags import Refused
from support.probe import PROBE_EVERY, SyncProbe
from train import Config


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_sync_brings_engine_and_trainer_together_and_a_skipped_one_shows(
    tied, build_engine, prompts, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained("tiny")
    if not tied:
        config = model.config
        config.tie_word_embeddings = False
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        model = LlamaForCausalLM(config)
        model.load_state_dict(weights)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained("tiny").save_pretrained(tmp_path)
    engine = build_engine(tmp_path)
    assert gap(model, sample(engine, prompts[:4])).max() < AGREE

    moved(model)
    stale = sample(engine, prompts[:4])
    assert stale.weight_version != "1"
    assert gap(model, stale).max() > 0.1  # the skipped sync

    engine.load_weights(model.state_dict().items(), version="1")
    fresh = sample(engine, prompts[:4])
    assert fresh.weight_version == "1"
    assert gap(model, fresh).max() < AGREE


@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_what_makes_an_engine_faster_on_a_cpu_changes_no_bit_of_what_it_samples(
    quantization, build_engine, prompts, monkeypatch
):
    engine = build_engine(dtype="bfloat16", quantization=quantization, top_logprobs=20)
    model = AutoModelForCausalLM.from_pretrained("tiny")
    for version in ("1", "2"):
        moved(model)
        engine.load_weights(model.state_dict().items(), version=version)
        faster = sample(engine, prompts[:4])
        with monkeypatch.context() as patch:
            patch.setattr(engine, "while_generating", nullcontext)
            expected = sample(engine, prompts[:4])
        assert faster.weight_version == expected.weight_version == version
        assert torch.equal(faster.tokens, expected.tokens)
        assert torch.equal(faster.logp_behavior, expected.logp_behavior)
        assert torch.equal(faster.top_logp_behavior, expected.top_logp_behavior)


def test_on_a_cpu_the_head_is_cast_once_a_rollout_and_the_copy_is_dropped_after_it(
    build_engine, prompts, monkeypatch
):
    engine = build_engine(dtype="bfloat16")

    def copies(model: torch.nn.Module) -> dict | None:
        return model.logits_processor.copies

    steps = []
    decode = engine.llm.llm_engine.step

    def step():
        outputs = decode()
        (kept,) = engine.llm.apply_model(copies)
        steps.append({id(copy): copy.dtype for copy in kept.values()})
        return outputs

    monkeypatch.setattr(engine.llm.llm_engine, "step", step)
    sample(engine, prompts[:4])
    assert len(steps) > 10
    # One copy of one head, and the same one after every decoding step.
    assert list(steps[0].values()) == [torch.float32]
    assert all(of_step == steps[0] for of_step in steps)
    assert engine.llm.apply_model(copies) == [None]
    # Driven directly, the engine is vLLM's own.
    monkeypatch.undo()
    engine.llm.generate([{"prompt_token_ids": prompts[0]}], use_tqdm=False)
    assert engine.llm.apply_model(copies) == [None]


# What vLLM says


@pytest.fixture(scope="module")
def another_engine(build_engine) -> Engine:
    """An engine that may be left with weights of which nothing good is known."""
    return build_engine()


@pytest.mark.parametrize(
    "forgotten, layer",
    [
        ("lm_head", "ParallelLMHead"),
        ("model.layers.1.mlp.down_proj", "RowParallelLinear"),
        ("model.norm", "RMSNorm"),
    ],
)
def test_a_sync_without_the_weights_of_a_layer_is_refused(
    forgotten, layer, another_engine, policy
):
    weights = [
        (name, weight)
        for name, weight in policy.state_dict().items()
        if not name.startswith(forgotten)
    ]
    with pytest.raises(Refused, match=f"weights '7' brought nothing to a .*{layer}"):
        another_engine.load_weights(weights, version="7")
    another_engine.load_weights(policy.state_dict().items(), version="8")


# The probe


def train_for_a_while(policy: Policy) -> None:
    """Something like an update of a policy under FSDP: noise on this rank's shards."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            shard = weight.to_local()
            shard.add_(0.05 * torch.randn(shard.shape, generator=generator))


def test_the_engine_scores_texts_as_the_trainer_does_at_temperature_1(
    engine, policy, prompts
):
    # At temperature 1, whatever they were sampled at.
    rollouts = sample(engine, prompts[:4], temperature=1.4)
    with torch.no_grad():
        logp, _ = Policy(policy)(rollouts)
    scores = engine.log_probabilities(rollouts)
    assert (scores - logp)[rollouts.mask].abs().max() < AGREE
    assert (scores[~rollouts.mask] == 0).all()


def test_a_probe_is_content_with_a_sync_and_refuses_weights_that_lag_behind(
    engine, policy, prompts, group
):
    trained = build_policy("tiny", group)
    probe = SyncProbe(engine, trained, prompts)
    assert probe.at_start < AGREE
    train_for_a_while(trained)
    sentence = "step 5: after the sync, engine and trainer differ by"
    with pytest.raises(Refused, match=sentence):
        probe.check(engine, trained, step=5)
    engine.load_weights(full_weights(trained), version="5")
    assert probe.check(engine, trained, step=5) < AGREE


def test_a_probe_leaves_the_policy_able_to_hand_out_its_newest_weights(
    engine, policy, prompts, group
):
    trained = build_policy("tiny", group)
    probe = SyncProbe(engine, trained, prompts)
    # A pass without gradient would leave FSDP's root gathered, with weights that an
    # optimizer step makes old.
    train_for_a_while(trained)
    engine.load_weights(full_weights(trained), version="5")
    assert probe.check(engine, trained, step=5) < AGREE


# In a run


def broken_from(version: int) -> Callable[[Engine, Iterator, str], None]:
    """A load_weights that adds noise to what it loads, from this version on."""
    load_weights = Engine.load_weights
    generator = torch.Generator().manual_seed(0)

    def broken(engine: Engine, weights: Iterator, new_version: str) -> None:
        noisy = []
        for name, weight in weights:
            noise = 0.05 * torch.randn(weight.shape, generator=generator)
            noisy.append((name, weight + noise * (int(new_version) >= version)))
        load_weights(engine, noisy, new_version)

    return broken


@pytest.mark.parametrize("temperature", [1.0, 1.4])
def test_a_sync_that_is_broken_from_the_start_ends_the_run_before_its_first_step(
    temperature, train_here, monkeypatch
):
    # At another temperature than the policy's no batch could have shown it.
    monkeypatch.setattr(Engine, "load_weights", broken_from(0))
    sentence = "before the first step, engine and trainer differ by"
    with pytest.raises(Refused, match=sentence):
        train_here("--steps=4", "--prompts_per_step=4", f"--temperature={temperature}")


def test_a_batch_that_should_be_on_policy_and_is_not_ends_the_run_in_its_first_step(
    train_here, monkeypatch
):
    # The first sync is good, and then the engine forgets: what the probe has not seen.
    sample_step = train.sample_step

    def forgetful(engine: Engine, *arguments):
        weights = moved(AutoModelForCausalLM.from_pretrained("tiny"), scale=0.05)
        engine.load_weights(weights.state_dict().items(), version="0")
        return sample_step(engine, *arguments)

    monkeypatch.setattr(train, "sample_step", forgetful)
    with pytest.raises(Refused, match="step 1: a batch that should be on-policy"):
        train_here("--steps=4", "--prompts_per_step=4")


def test_such_a_batch_ends_a_resumed_run_in_the_first_step_that_it_makes(
    train_here, monkeypatch, tmp_path
):
    flags = ["--prompts_per_step=4", "--save_every=2"]
    out = tmp_path / "run"
    train_here(*flags, "--steps=2", out_dir=out)
    sample_step = train.sample_step

    def forgetful(engine: Engine, cfg: Config, step: int, *more):
        weights = moved(AutoModelForCausalLM.from_pretrained("tiny"), scale=0.05)
        engine.load_weights(weights.state_dict().items(), version=str(step - 1))
        return sample_step(engine, cfg, step, *more)

    monkeypatch.setattr(train, "sample_step", forgetful)
    with pytest.raises(Refused, match="step 3: a batch that should be on-policy"):
        train_here(*flags, "--steps=4", "--resume", out_dir=out)


def test_a_sync_that_breaks_later_is_warned_of_and_the_run_goes_on(
    train_here, monkeypatch, capsys
):
    monkeypatch.setattr(Engine, "load_weights", broken_from(2))
    rows = train_here("--steps=3", "--prompts_per_step=4")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    # Weights 2 sample the batch of step 3.
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: step 3: a batch that should be on-policy")
    assert re.search("furthest off is the response '.+'$", warnings[0])


def test_off_policy_the_probe_ends_a_run_whose_sync_breaks_and_the_run_is_saved(
    train_here, monkeypatch, tmp_path
):
    # At another temperature ratios far from 1 are nothing to complain of.
    assert PROBE_EVERY == 5
    monkeypatch.setattr(Engine, "load_weights", broken_from(4))
    out = tmp_path / "run"
    flags = ["--steps=6", "--prompts_per_step=4", "--temperature=1.4"]
    with pytest.raises(Refused, match="step 5: after the sync"):
        train_here(*flags, f"--out_dir={out}")
    assert [path.name for path in checkpoints(out)] == ["step-000005"]


def test_a_sync_left_out_is_detected_as_soon_as_the_old_weights_have_sampled(
    train_here, monkeypatch, tmp_path
):
    load_weights = Engine.load_weights

    def forgetful(engine: Engine, weights: Iterator, version: str) -> None:
        if version != "2":
            load_weights(engine, weights, version)

    flags = ["--steps=4", "--prompts_per_step=4"]
    out = tmp_path / "run"
    sentence = "step 3: its batch was sampled by weights 1, not by weights 2"
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "load_weights", forgetful)
        with pytest.raises(Refused, match=sentence):
            train_here(*flags, out_dir=out)
    # The checkpoint is without that batch, so a run can go on from there.
    assert [path.name for path in checkpoints(out)] == ["step-000002"]
    assert train_here(*flags, "--resume", out_dir=out)[-1]["step"] == 4
