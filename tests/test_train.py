"""Test `update` of train.py, one optimizer step on the batch B, with the real parts.

e_B and the gradient are compared with plain autograd on the whole batch, on one rank
and on several, with micro-batches of any size.
"""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import add_noise
from gradient_on_ranks import (
    GROUP_SIZE,
    MICRO_BATCHES,
    ONE_RESPONSE,
    UNLIMITED,
    gradient_of,
    with_nan,
)
from launch import torchrun, torchrun_on_nodes
from test_rollout import gradient_vector, logits_of, relative_error, sampled_tokens
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

import train
from loss import effective_sample_size, p3o, ratio_sums, reinforce
from policy import Policy, build_policy
from rollout import Rollouts
from study.runs import DIVERGED
from train import Config, kl_at_positions, micro_batches

CPU = torch.device("cpu")


def plain_update(
    model: torch.nn.Module, rollouts: Rollouts
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute (11) and (12) on the whole batch at once, with nothing but autograd.

    Returns the gradient of all weights, as one vector, and the statistics of `update`.
    The KL is summed over the whole vocabulary, which the engine has listed.
    """
    mask = rollouts.mask  # M response tokens
    log_pi = logits_of(model, rollouts).log_softmax(dim=-1)  # [M, V]
    logp = log_pi.gather(1, sampled_tokens(rollouts))[:, 0]  # [M]
    log_pi = log_pi.gather(1, rollouts.top_tokens[mask])  # in the engine's order
    kl = (log_pi.exp() * (log_pi - rollouts.top_logp_behavior[mask])).sum(-1)  # [M]

    log_rho = logp - rollouts.logp_behavior[mask]
    rho = log_rho.detach().exp()
    e_b = rho.mean() ** 2 / (rho**2).mean()  # (11)
    weight = torch.minimum(rho, e_b)
    loss = -weight * rollouts.advantage[mask] * logp + (1 - e_b) * kl  # (12)
    gradient = gradient_vector(loss.mean(), model)
    stats = {
        "loss": loss.mean(),
        "ess": e_b,
        "mismatch_kl": kl.mean(),
        "ratio": rho.mean(),
        "above_ess": (rho > e_b).float().mean(),
        "logprob_abs_diff": log_rho.abs().mean(),
        "grad_norm": gradient.norm(),
    }
    return gradient, {name: value.item() for name, value in stats.items()}


@pytest.fixture(scope="module")
def stale(engine, prompts, tmp_path_factory) -> SimpleNamespace:
    """A batch that tiny sampled, and a policy that has moved away since then.

    `folder` has both in the form that gradient_on_ranks.py reads. `gradient` and
    `stats` are the expected results.
    """
    folder = tmp_path_factory.mktemp("stale")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    engine.load_weights(model.state_dict().items(), version="0")
    seeds = [GROUP_SIZE * prompt for prompt in range(8)]
    rollouts = engine.sample(prompts[:8], GROUP_SIZE, seeds, max_tokens=64)
    generator = torch.Generator().manual_seed(0)
    advantage = torch.randn(len(rollouts.text), 1, generator=generator)
    rollouts.advantage = advantage * rollouts.mask
    rollouts.reward = torch.arange(len(rollouts.text))  # identifies the rows
    add_noise(model, 0.04)
    torch.save(rollouts, folder / "rollouts.pt")
    model.save_pretrained(folder / "model")
    gradient, stats = plain_update(model, rollouts)
    # e_B caps many weights and the KL counts, so a wrong e_B or KL would show.
    assert 0.1 < stats["ess"] < 0.94
    assert 0.05 < stats["above_ess"] < 0.95
    assert stats["mismatch_kl"] > 0.01
    return SimpleNamespace(
        folder=folder, rollouts=rollouts, gradient=gradient, stats=stats
    )


@pytest.fixture
def trainee(stale, group) -> Policy:
    """The policy that has moved away, under FSDP2."""
    return build_policy(str(stale.folder / "model"), group)


def assert_right(found: tuple[torch.Tensor, dict[str, float]], stale: Any) -> None:
    gradient, stats = found
    assert stats == pytest.approx(stale.stats, rel=1e-4)
    assert relative_error(gradient, stale.gradient) < 1e-4


# Divisions of the batch


@pytest.mark.parametrize("tokens", MICRO_BATCHES)
def test_micro_batches_of_any_size_change_neither_e_b_nor_the_gradient(
    tokens, stale, trainee
):
    assert_right(gradient_of(trainee, stale.rollouts, micro_batch_tokens=tokens), stale)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, 1 / 4 * math.log(2)),
        ({"top_p": 0.9}, 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)),
        ({"top_k": 2}, 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)),
    ],
)
def test_tokens_that_are_not_listed_count_unless_top_p_or_top_k_is_set(
    fields, expected
):
    # Two of three tokens are listed: pi_theta = (1/2, 1/4 | 1/4), pi_b = (1/4, 1/4 |
    # 1/2). All three give 1/2 log 2 + 1/4 log 1 + 1/4 log 1/2. The two alone are (2/3,
    # 1/3) and (1/2, 1/2).
    logp = torch.tensor([[[1 / 2, 1 / 4]]]).log()
    batch = SimpleNamespace(top_logp_behavior=torch.tensor([[[1 / 4, 1 / 4]]]).log())
    kl = kl_at_positions(logp, batch, Config(**fields))
    assert kl.item() == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def two_ranks(stale) -> dict:
    """The results of gradient_on_ranks.py on two ranks."""
    torchrun(2, "tests/gradient_on_ranks.py", str(stale.folder))
    return torch.load(stale.folder / "ranks-2.pt")


@pytest.mark.parametrize("tokens", MICRO_BATCHES)
def test_two_ranks_change_neither_e_b_nor_the_gradient(tokens, two_ranks, stale):
    assert_right(two_ranks[tokens], stale)


def test_in_bfloat16_the_gradients_of_two_ranks_are_added_in_float32(two_ranks):
    gradient, _ = two_ranks["bfloat16"]
    # The gradient of each rank is bfloat16; the sum of two such numbers has more bits.
    assert not torch.equal(gradient.bfloat16().float(), gradient)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_four_ranks_on_one_node_or_two_change_neither_e_b_nor_the_gradient(
    nodes, stale
):
    # On two nodes the weights are sharded within each and replicated across: HSDP.
    script = "tests/gradient_on_ranks.py"
    torchrun_on_nodes(nodes, 4 // nodes, script, str(stale.folder))
    results = torch.load(stale.folder / "ranks-4.pt")
    assert results["mesh"] == {1: (4,), 2: (2, 2)}[nodes]
    for tokens in MICRO_BATCHES:
        assert_right(results[tokens], stale)


def with_others(monkeypatch: pytest.MonkeyPatch, all_reduce: Callable) -> None:
    """Replace the collectives of train.py as if a second rank existed; keep FSDP's."""
    others = SimpleNamespace(
        all_reduce=all_reduce, get_world_size=lambda: 2, ReduceOp=dist.ReduceOp
    )
    monkeypatch.setattr(train, "dist", others)


def test_a_second_rank_with_the_same_responses_changes_nothing(
    stale, trainee, monkeypatch
):
    # Sums over both ranks are twice those of one rank, and so is |B|. The mean over B
    # and the average of two equal gradients are those of one rank.
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(2)

    with_others(monkeypatch, all_reduce)
    assert_right(gradient_of(trainee, stale.rollouts), stale)


def test_an_e_b_of_each_micro_batch_would_have_changed_the_gradient(stale, trainee):
    # The authors' code computes e_B in this way. A micro-batch of 300 tokens has about
    # six responses.
    def with_its_own(logp, logp_behavior, advantage, kl, e_b):
        sums = ratio_sums(logp - logp_behavior, mask=logp_behavior != 0)
        own = effective_sample_size(sums).item()
        return p3o(logp, logp_behavior, advantage, kl, own)

    given = trainee, stale.rollouts, with_its_own
    gradient, _ = gradient_of(*given, micro_batch_tokens=300)
    assert relative_error(gradient, stale.gradient) > 0.01
    gradient, _ = gradient_of(*given, micro_batch_tokens=UNLIMITED)
    assert relative_error(gradient, stale.gradient) < 1e-4


# The micro-batches


@pytest.mark.parametrize("tokens", [ONE_RESPONSE, 60, 300, UNLIMITED])
def test_each_response_is_in_one_micro_batch_and_none_is_empty_or_too_large(
    tokens, stale
):
    rows = torch.tensor([9, 2, 30, 4, 5, 17, 1])
    selected = stale.rollouts.select(rows, CPU)
    assert selected.text == [stale.rollouts.text[row] for row in rows]
    batches = micro_batches(stale.rollouts, rows, tokens, CPU)
    assert all(batch.text for batch in batches)
    found = torch.cat([batch.reward for batch in batches])
    assert sorted(found.tolist()) == sorted(rows.tolist())
    for batch in batches:
        # Neighbors stay neighbors, so that a prompt is computed once for its responses.
        assert batch.reward.tolist() == sorted(batch.reward.tolist())
        assert batch.text == [stale.rollouts.text[row] for row in batch.reward]
        assert len(batch.text) == 1 or batch.tokens.numel() <= tokens
    assert len(batches) == {ONE_RESPONSE: 7, UNLIMITED: 1}.get(tokens, len(batches))


def test_all_ranks_make_as_many_micro_batches_as_the_longest_response_requires(
    stale, monkeypatch
):
    def all_reduce(longest: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MAX
        longest.clamp_(min=150)  # on another rank

    with_others(monkeypatch, all_reduce)
    batches = micro_batches(stale.rollouts, torch.arange(32), 600, CPU)
    # 600 tokens have room for 4 responses of 150, so 32 responses make 8 micro-batches.
    assert [len(batch.text) for batch in batches] == [4] * 8


@pytest.mark.parametrize("tokens", [ONE_RESPONSE, 300, UNLIMITED])
def test_only_the_last_micro_batch_needs_no_second_forward_pass(tokens, stale, trainee):
    calls = []
    hook = trainee.register_forward_pre_hook(
        lambda *_: calls.append(torch.is_grad_enabled())
    )
    gradient_of(trainee, stale.rollouts, micro_batch_tokens=tokens)
    hook.remove()
    count = len(micro_batches(stale.rollouts, torch.arange(32), tokens, CPU))
    # A batch of one micro-batch takes one forward pass, with a gradient.
    assert calls == [False] * (count - 1) + [True] * count


# The optimizer


def test_a_gradient_is_clipped_to_max_grad_norm(stale, trainee):
    limit = stale.stats["grad_norm"] / 10
    gradient, stats = gradient_of(trainee, stale.rollouts, max_grad_norm=limit)
    assert gradient.norm() == pytest.approx(limit, rel=1e-4)
    # The norm before clipping is logged.
    assert stats["grad_norm"] == pytest.approx(stale.stats["grad_norm"], rel=1e-4)


def test_no_gradient_is_left_for_the_next_update(stale, trainee):
    gradient_of(trainee, stale.rollouts)
    assert all(weight.grad is None for weight in trainee.parameters())


def test_in_bfloat16_weights_and_log_probabilities_stay_float32(stale, trainee, group):
    half = build_policy(str(stale.folder / "model"), group, dtype="bfloat16")
    assert {weight.dtype for weight in half.parameters()} == {torch.float32}
    with torch.no_grad():
        logp, top_logp = half(stale.rollouts)
        expected, _ = trainee(stale.rollouts)
    assert logp.dtype == top_logp.dtype == torch.float32
    # bfloat16 has 8 significant bits, so activations are off by 0.4%. If only the
    # embedding were rounded, and layers computed in float32, the error would be 0.0025.
    assert 0.004 < (logp - expected).abs()[stale.rollouts.mask].mean() < 0.02


def test_on_a_cpu_the_activations_of_a_micro_batch_have_a_limit(trainee, monkeypatch):
    # A layer of tiny has 4 * 128 * 128 weights in its attention, 3 * 128 * 384 in its
    # MLP and 2 * 128 in its norms: per element of a hidden state 512, 1,152 and 2.
    numbers = 2 * 3 * (512 + 1152 + 2)  # in 3 layers
    monkeypatch.setattr(train, "MAX_ACTIVATIONS", 100 * numbers)
    for given, expected in (99, 99), (101, 100):
        cfg = Config(micro_batch_tokens=given)
        assert train.max_micro_batch_tokens(cfg, trainee) == expected


def test_each_layer_is_gathered_by_itself(trainee):
    # Otherwise each rank would hold the whole model at once.
    for layer in trainee.model.base_model.layers:
        assert isinstance(layer, FSDPModule)


# Numbers that are not finite


# REINFORCE has no ratio, so log pi_b only affects e_B, and the advantage the gradient.
NOT_FINITE = {
    "logp_behavior": r"step 7: e_B is nan and the norm of the gradient is \d",
    "advantage": r"step 7: e_B is 0\.\d+ and the norm of the gradient is nan",
}


def test_a_number_that_is_not_finite_stops_the_run_with_the_step(stale, trainee):
    advice = f".*{DIVERGED}.*: lower learning_rate or raise warmup_updates .above.*cont"
    for name, sentence in NOT_FINITE.items():
        with pytest.raises(FloatingPointError, match=sentence + advice):
            gradient_of(trainee, with_nan(stale.rollouts, name), reinforce)


def test_both_ranks_stop_if_one_has_a_number_that_is_not_finite(two_ranks):
    for name, sentence in NOT_FINITE.items():
        first, second = two_ranks[name]
        assert first == second
        assert re.match(sentence, first)


# What leaves the policy


def test_two_ranks_hand_out_whole_weights_and_save_the_whole_model(two_ranks, stale):
    def state_of(folder: str) -> dict[str, torch.Tensor]:
        return AutoModelForCausalLM.from_pretrained(stale.folder / folder).state_dict()

    expected = state_of("model")
    # The tied head has to be there under both of its names, because engines need both.
    assert "lm_head.weight" in expected
    for found in dict(two_ranks["weights"]), state_of("saved"):
        assert sorted(found) == sorted(expected)
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name
