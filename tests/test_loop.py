"""The pieces of the training loop, each alone: what it hands to the next one.

A loop that is wrong may still learn, only worse, and no number that it prints says so.
Each test here is about one line of the loop that such a fault can hide in.
"""

import json
import math
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
)

import train
from eval import EvalConfig, evaluate, load_benchmarks
from loss import OBJECTIVES
from policy import (
    Policy,
    build_policy,
    can_share_prompts,
    full_weights,
    sequence_of_response,
    shared_sequences,
)
from rollout import Rollouts
from support.checkpoints import load_checkpoint, save_checkpoint
from support.flags import Refused, find_objective
from support.prompts import Split
from train import (
    Config,
    accumulate_gradient,
    add_reward,
    build_engines,
    build_optimizer,
    compute_logp_prox,
    heldout_accuracy,
    load_data,
    problem_numbers,
    rows_of_micro_batches,
    rows_of_minibatches,
    sample_step,
    sharing_of,
    update,
)


@dataclass
class RecordingEngine:
    """An engine that samples nothing, and remembers what it was asked for."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def sample(
        self, prompts: list[list[int]], n: int, seeds: list[int], **sampling: Any
    ) -> SimpleNamespace:
        self.calls.append({"prompts": prompts, "n": n, "seeds": seeds, **sampling})
        return SimpleNamespace(text=[""] * (n * len(prompts)))


def noise_of(call: dict[str, Any]) -> list[int]:
    """The seed of every response of a call: response j to a prompt has seed + j."""
    return [seed + j for seed in call["seeds"] for j in range(call["n"])]


# 1 rollout

SMALL = {"prompts_per_step": 6, "group_size": 4}
PROMPTS = [[problem] for problem in range(20)]


def test_a_step_samples_its_own_problems_with_the_settings_of_the_run(group):
    cfg = Config(
        **SMALL, temperature=1.4, top_p=0.9, top_k=7, max_response_tokens=5, seed=3
    )
    engine = RecordingEngine()
    sample_step(engine, cfg, 2, PROMPTS)
    [call] = engine.calls
    assert call["prompts"] == [[problem] for problem in problem_numbers(cfg, 2, 20)]
    assert call["n"] == 4
    settings = {"temperature": 1.4, "top_p": 0.9, "top_k": 7, "max_tokens": 5}
    assert {name: call[name] for name in settings} == settings


def test_no_two_responses_of_a_run_have_the_same_noise(group):
    engine = RecordingEngine()
    for step in range(1, 11):
        sample_step(engine, Config(**SMALL), step, PROMPTS)
    noise = [seed for call in engine.calls for seed in noise_of(call)]
    # 10 steps of 6 prompts with 4 responses each.
    assert len(set(noise)) == len(noise) == 240


@pytest.mark.parametrize("seed", [0, 1])
def test_the_noise_of_the_rollouts_is_not_that_of_the_evaluation(seed, group):
    rollout_engine = RecordingEngine()
    sample_step(rollout_engine, Config(**SMALL, seed=seed), 1, PROMPTS)
    evaluator = RecordingEngine()
    problems = [{"prompt": "1+1", "answer": "2"}] * 20
    evaluate(evaluator, problems, PROMPTS, "exact", samples=4)
    [rollout_call] = rollout_engine.calls
    [evaluation_call] = evaluator.calls
    assert not set(noise_of(rollout_call)) & set(noise_of(evaluation_call))


def test_on_two_ranks_a_step_has_the_prompts_and_the_noise_that_it_has_on_one(
    group, monkeypatch
):
    cfg = Config(**SMALL)
    alone = RecordingEngine()
    sample_step(alone, cfg, 3, PROMPTS)
    [of_one] = alone.calls
    for rank in 0, 1:
        engine = RecordingEngine()
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_rank", lambda rank=rank: rank)
            patch.setattr(dist, "get_world_size", lambda: 2)
            sample_step(engine, cfg, 3, PROMPTS)
        [of_two] = engine.calls
        # Rank 0 has groups 0, 2 and 4 of the step, rank 1 has groups 1, 3 and 5.
        assert of_two["prompts"] == of_one["prompts"][rank::2]
        assert of_two["seeds"] == of_one["seeds"][rank::2]


# 2 reward


def responses(*texts: str) -> SimpleNamespace:
    """All of Rollouts that the reward looks at."""
    return SimpleNamespace(text=list(texts), reward=None, advantage=None)


# Two prompts a step, three responses to each. The problems have the answers 0 to 3.
THREE_EACH = {"prompts_per_step": 2, "group_size": 3}
ANSWERS = [{"prompt": f"0+{answer}", "answer": str(answer)} for answer in range(4)]


def test_a_response_is_compared_with_the_answer_to_its_own_prompt(group):
    cfg = Config(**THREE_EACH)
    for step in 1, 2:
        first, second = problem_numbers(cfg, step, len(ANSWERS))
        right_first, right_second = str(first), str(second)
        rollouts = responses(
            right_first, right_second, "9", right_second, right_second, right_first
        )
        add_reward(rollouts, cfg, step, ANSWERS)
        assert rollouts.reward.tolist() == [1, 0, 0, 1, 1, 0]


def test_the_advantage_of_a_response_is_within_the_group_of_its_own_prompt(group):
    cfg = Config(**THREE_EACH)
    first, second = (str(p) for p in problem_numbers(cfg, 1, len(ANSWERS)))
    rollouts = responses(first, "9", "9", second, second, second)
    add_reward(rollouts, cfg, 1, ANSWERS)
    # The first group has the rewards 1, 0, 0, with mean 1/3 and deviation
    # sqrt((4/9 + 1/9 + 1/9) / 2) = 1/sqrt(3). The second one has no signal.
    expected = [2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), 0, 0, 0]
    assert rollouts.advantage.tolist() == pytest.approx(expected, abs=1e-5)

    unscaled = responses(first, "9", "9", second, second, second)
    add_reward(unscaled, Config(**THREE_EACH, scale_advantage=False), 1, ANSWERS)
    expected = [2 / 3, -1 / 3, -1 / 3, 0, 0, 0]
    assert unscaled.advantage.tolist() == pytest.approx(expected, abs=1e-6)


def test_answers_are_checked_by_the_verifier_of_the_task(group, tmp_path):
    task = tmp_path / "task.jsonl"
    task.write_text('{"prompt": "0+1", "answer": "1"}\n')
    (tmp_path / "task.json").write_text('{"verifier": "gsm8k"}')
    rollouts = responses("#### 1", "1", "#### 2")
    cfg = Config(prompts_per_step=1, group_size=3, task=str(task))
    add_reward(rollouts, cfg, 1, [{"prompt": "0+1", "answer": "1"}])
    assert rollouts.reward.tolist() == [1, 0, 0]
    # The embedded task takes the last word.
    rollouts = responses("#### 1", "1", "#### 2")
    tiny = Config(prompts_per_step=1, group_size=3)
    add_reward(rollouts, tiny, 1, [{"prompt": "0+1", "answer": "1"}])
    assert rollouts.reward.tolist() == [1, 1, 0]


# Prompts


@pytest.fixture
def instructed_task(tmp_path) -> str:
    """One problem with an instruction, which tiny can spell."""
    (tmp_path / "task.jsonl").write_text('{"prompt": "1+2", "answer": "3"}\n')
    settings = {"verifier": "exact", "instruction": "0123"}
    (tmp_path / "task.json").write_text(json.dumps(settings))
    return str(tmp_path / "task.jsonl")


def test_the_instruction_of_a_task_begins_every_prompt(instructed_task):
    data = load_data(Config(task=instructed_task))
    for split in data.train, data.heldout:
        [prompt] = split.prompts
        text = data.tokenizer.decode(prompt)
        assert text.startswith("<bos>0123")
        assert text.endswith("1+2:")


def test_an_evaluation_sends_the_prompts_that_the_training_sends(instructed_task):
    trained_on = load_data(Config(task=instructed_task)).heldout.prompts
    _, benchmarks = load_benchmarks(EvalConfig(task=[instructed_task]))
    assert benchmarks[instructed_task].prompts == trained_on


# 3 update: minibatches


def passes_of(cfg: Config, step: int = 1) -> list[list[list[int]]]:
    """The minibatches of every pass over a step's rollouts."""
    return [rows_of_minibatches(cfg, step, number) for number in (1, 2, 3)]


def test_a_pass_has_each_response_in_one_minibatch(group):
    cfg = Config(prompts_per_step=6, group_size=4, minibatches=3)
    for minibatches in passes_of(cfg):
        assert [len(rows) for rows in minibatches] == [8, 8, 8]
        rows = [row for rows in minibatches for row in rows]
        assert sorted(rows) == list(range(24))


def test_a_minibatch_has_whole_groups(group):
    cfg = Config(prompts_per_step=6, group_size=4, minibatches=3)
    for minibatches in passes_of(cfg):
        for rows in minibatches:
            groups = {row // 4 for row in rows}
            assert len(groups) == 2


def test_the_minibatches_of_each_step_and_pass_are_others(group):
    cfg = Config(prompts_per_step=6, group_size=4, minibatches=3)
    drawn = [passes_of(cfg, step)[number] for step in (1, 2) for number in (0, 1, 2)]
    for place, minibatches in enumerate(drawn):
        assert minibatches not in drawn[:place]


def test_a_minibatch_has_the_same_groups_on_any_number_of_ranks(group, monkeypatch):
    cfg = Config(prompts_per_step=6, group_size=4, minibatches=3)
    alone = rows_of_minibatches(cfg, 1, 1)
    groups: list[set[int]] = [set(), set(), set()]
    for rank in 0, 1:
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_rank", lambda rank=rank: rank)
            patch.setattr(dist, "get_world_size", lambda: 2)
            for number, rows in enumerate(rows_of_minibatches(cfg, 1, 1)):
                # Group p of rank r is group 2 p + r of the step.
                groups[number] |= {2 * (row // 4) + rank for row in rows}
    assert groups == [{row // 4 for row in rows} for rows in alone]


def made_up_lengths(*response_lengths: int) -> SimpleNamespace:
    """What rows_of_micro_batches looks at; each prompt has 10 tokens."""
    length = torch.tensor(response_lengths)
    mask = torch.arange(max(response_lengths)) < length[:, None]
    return SimpleNamespace(prompt_length=torch.full_like(length, 10), mask=mask)


def test_micro_batches_have_each_row_once_and_keep_to_their_size(group):
    rollouts = made_up_lengths(30, 5, 20, 5, 30, 10, 15, 10)
    rows = [1, 2, 3, 4, 5, 6, 7]
    micro_batches = rows_of_micro_batches(rollouts, rows, max_tokens=60)
    assert sorted(row for some in micro_batches for row in some) == rows
    length = (10 + rollouts.mask.sum(dim=1)).tolist()
    sizes = [len(some) * max(length[row] for row in some) for some in micro_batches]
    # By length: 15, 15, 20 | 20, 25 | 30 | 40. A further row would be one too many.
    assert sizes == [60, 50, 30, 40]


# 3 update: the optimizer


def weights_and(schedule_of: Config) -> tuple[torch.nn.Module, Any, Any]:
    """A module of one weight, 1.0, with the optimizer and the schedule of a run."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    optimizer, schedule = build_optimizer(module, schedule_of)
    return module, optimizer, schedule


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_weights_decay_as_configured_and_by_nothing_else(weight_decay):
    cfg = Config(learning_rate=0.1, warmup_steps=0, weight_decay=weight_decay)
    module, optimizer, _ = weights_and(cfg)
    module.weight.grad = torch.zeros(1, 1)
    optimizer.step()
    # AdamW takes learning rate * decay * weight away: 0.1 * 0.5 * 1 = 0.05.
    assert module.weight.item() == pytest.approx(1 - 0.1 * weight_decay, abs=1e-7)


def test_the_first_step_of_adamw_is_one_learning_rate():
    # Adam's first step is learning rate * gradient / |gradient|.
    module, optimizer, _ = weights_and(Config(learning_rate=0.1, warmup_steps=0))
    module.weight.grad = torch.full((1, 1), 7.0)
    optimizer.step()
    assert module.weight.item() == pytest.approx(1 - 0.1, abs=1e-6)


def test_the_learning_rate_warms_up_and_is_constant_from_then_on():
    cfg = Config(learning_rate=0.1, warmup_steps=4)
    _, optimizer, schedule = weights_and(cfg)
    rates = []
    for _ in range(7):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    expected = [0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1]
    assert rates == pytest.approx(expected, rel=1e-12)


# 3 update: the gradient on a real batch


@pytest.fixture(scope="module")
def stale_batch(engine, prompts) -> Rollouts:
    """Four groups of four responses, sampled by tiny, with made-up advantages."""
    tiny = AutoModelForCausalLM.from_pretrained("tiny")
    engine.load_weights(tiny.state_dict().items(), version="0")
    rollouts = engine.sample(prompts[:4], 4, [0, 4, 8, 12], max_tokens=64)
    generator = torch.Generator().manual_seed(0)
    rollouts.advantage = torch.randn(16, generator=generator)
    return rollouts


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> str:
    """A model that tiny might have become since then: noise on every weight."""
    folder = tmp_path_factory.mktemp("moved")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.03 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return str(folder)


# A lag, so that the trainer does not expect the batch to be on-policy.
BATCH = {"prompts_per_step": 4, "group_size": 4, "lag": 1}


def gradient_vector(policy: Policy) -> torch.Tensor:
    """The gradient on all weights, as one vector."""
    return torch.cat(
        [weight.grad.full_tensor().flatten() for weight in weights(policy)]
    )


def weights(policy: Policy) -> list[torch.Tensor]:
    return list(policy.parameters())


def weight_vector(policy: Policy) -> torch.Tensor:
    """All weights, as one vector."""
    return torch.cat([w.detach().full_tensor().flatten() for w in weights(policy)])


def gradient_by(
    policy: Policy, rollouts: Rollouts, micro_batch_tokens: int = 16384
) -> tuple[torch.Tensor, dict[str, float]]:
    """P3O's gradient on all rows of a batch, and its statistics."""
    cfg = Config(**BATCH, micro_batch_tokens=micro_batch_tokens)
    rows = list(range(len(rollouts.text)))
    stats = accumulate_gradient(policy, rollouts, rows, OBJECTIVES["p3o"], cfg, 1)
    gradient = gradient_vector(policy)
    policy.zero_grad()
    return gradient, stats


def relative_distance(vector: torch.Tensor, expected: torch.Tensor) -> float:
    return float((vector - expected).norm() / expected.norm())


def test_micro_batches_change_neither_e_b_nor_the_gradient(stale_batch, moved, group):
    policy = build_policy(moved, group)
    expected, stats = gradient_by(policy, stale_batch)
    assert 0.3 < stats["ess"] < 0.97  # so that a wrong e_B would show
    for tokens in 1, 200:
        gradient, of_micro_batches = gradient_by(policy, stale_batch, tokens)
        assert relative_distance(gradient, expected) < 1e-4
        for name in "ess", "kl", "loss", "policy_loss", "kl_loss":
            assert of_micro_batches[name] == pytest.approx(stats[name], rel=1e-4), name


# 3 update: a prompt that a group shares


def two_groups() -> Rollouts:
    """Prompt 7 8 9 with responses 1 2 and 3, and in between prompt 7 8 with 4 5 6."""
    tokens = [[7, 8, 9, 1, 2], [7, 8, 4, 5, 6], [7, 8, 9, 3, 0]]
    mask = [[True, True, False], [True, True, True], [True, False, False]]
    return Rollouts(
        tokens=torch.tensor(tokens),
        prompt_length=torch.tensor([3, 2, 3]),
        mask=torch.tensor(mask),
        logp_behavior=torch.zeros(3, 3),
        top_tokens=torch.zeros(3, 3, 0, dtype=torch.long),
        top_logp_behavior=torch.zeros(3, 3, 0),
        truncated=torch.zeros(3).bool(),
        text=["1 2", "4 5 6", "3"],
        weight_version="0",
    )


def test_responses_to_a_prompt_stand_behind_a_single_copy_of_it():
    sequences = shared_sequences(two_groups(), sharing=2)
    assert sequences.tokens.tolist() == [[7, 8, 4, 5, 6, 0], [7, 8, 9, 1, 2, 3]]
    assert sequences.of_response.tolist() == [1, 0, 1]
    # Responses 1 2 and 3 begin at places 3 and 5, and both at position 3.
    assert sequences.start.tolist() == [3, 2, 5]
    assert sequences.position_ids.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 3]]


def test_a_response_sees_its_prompt_and_itself_up_to_each_token_and_no_other():
    sequences = shared_sequences(two_groups(), sharing=2)
    # Rows see columns, both in the order 7 8 9 | 1 2 | 3.
    assert sequences.attention_mask[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_a_prompt_that_comes_twice_in_a_batch_makes_no_sequence_longer():
    # Two groups of two with prompt 7 8, and a group with prompt 7 8 0 between them.
    tokens = torch.tensor([[7, 8, 1, 0]] * 2 + [[7, 8, 0, 1]] * 2 + [[7, 8, 1, 0]] * 2)
    batch = replace(
        two_groups().select([1, 1, 1, 1, 1, 1]),
        tokens=tokens,
        prompt_length=torch.tensor([2, 2, 3, 3, 2, 2]),
        mask=torch.ones(6, 1).bool(),
    )
    a, b, c = sequence_of_response(batch, sharing=2).view(3, 2).tolist()
    assert {a[0], b[0], c[0]} == {a[1], b[1], c[1]} == {0, 1, 2}
    assert sequence_of_response(batch, sharing=1).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_shared_prompt_changes_no_log_probability(stale_batch, moved, group):
    policy = build_policy(moved, group)
    for rows in [0], [], [9, 2, 1, 14, 0], list(range(16)):
        batch = stale_batch.select(rows)
        logps = {}
        for policy.sharing in 1, 4:
            with torch.no_grad():
                logps[policy.sharing] = policy(batch)
        for alone, shared in zip(logps[1], logps[4], strict=True):
            torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)


def places_read(policy: Policy) -> list[int]:
    """A list that gets the number of places of each forward pass from here on."""
    read: list[int] = []
    policy.model.base_model.register_forward_pre_hook(
        lambda model, inputs, keywords: read.append(keywords["input_ids"].numel()),
        with_kwargs=True,
    )
    return read


def lengths_of_groups(rollouts: Rollouts) -> torch.Tensor:
    """A prompt and its four responses, in tokens: [P]."""
    response_tokens = rollouts.mask.sum(dim=1).view(-1, 4).sum(dim=1)
    return rollouts.prompt_length[::4] + response_tokens


def test_a_shared_prompt_changes_no_gradient_and_is_computed_once(
    stale_batch, moved, group
):
    policy = build_policy(moved, group)
    expected, expected_stats = gradient_by(policy, stale_batch)
    read = places_read(policy)
    policy.sharing = 4
    gradient, stats = gradient_by(policy, stale_batch)
    assert relative_distance(gradient, expected) < 1e-5
    assert stats == pytest.approx(expected_stats, rel=1e-4)
    # Four sequences, padded to the longest.
    assert read == [4 * int(lengths_of_groups(stale_batch).max())]


def test_no_forward_pass_reads_more_than_micro_batch_tokens_with_shared_prompts(
    stale_batch, moved, group
):
    policy = build_policy(moved, group)
    policy.sharing = 4
    read = places_read(policy)
    longest = int(lengths_of_groups(stale_batch).max())
    gradient_by(policy, stale_batch, longest)
    compute_logp_prox(policy, stale_batch, Config(micro_batch_tokens=longest))
    # Twice for the gradient, as e_B takes a pass, and once for log pi_prox.
    assert len(read) == 3 * 4
    assert max(read) <= longest


def test_micro_batches_have_whole_groups_where_these_share_a_prompt(stale_batch, group):
    longest = int(lengths_of_groups(stale_batch).max())
    for groups_of_each in 1, 2, 4:
        micro_batches = rows_of_micro_batches(
            stale_batch, list(range(16)), groups_of_each * longest, sharing=4
        )
        assert len(micro_batches) <= 4 / groups_of_each
        groups = []
        for rows in micro_batches:
            of_micro_batch = sorted({row // 4 for row in rows})
            # All rows of its groups, and no others.
            assert sorted(rows) == [
                4 * number + j for number in of_micro_batch for j in range(4)
            ]
            groups += of_micro_batch
        assert sorted(groups) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "config, can_share",
    [
        (LlamaConfig(), True),
        (Qwen2Config(), True),
        # Its layers have a window of 4,096 tokens.
        (MistralConfig(), True),
        (MistralConfig(sliding_window=128), False),
        # Some of its layers are convolutions.
        (Lfm2Config(layer_types=["conv", "full_attention"] * 16), False),
        # It carries a state along.
        (MambaConfig(), False),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_a_prompt_is_shared_only_where_every_layer_heeds_the_mask(config, can_share):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert can_share_prompts(model) is can_share


def test_a_prompt_is_shared_only_under_an_attention_that_takes_such_a_mask():
    for attention, can_share in ("sdpa", True), ("eager", False):
        model = AutoModelForCausalLM.from_pretrained(
            "tiny", attn_implementation=attention
        )
        assert can_share_prompts(model) is can_share


def test_a_group_shares_its_prompt_where_it_has_512_tokens_at_most():
    cfg = Config(group_size=4, max_response_tokens=64)
    # The longest prompt, and 4 responses of 64 tokens: 256 + 4 * 64 = 512.
    assert sharing_of(cfg, longest=256 + 64) == 4
    assert sharing_of(cfg, longest=257 + 64) == 1
    # Nor is a sequence longer than a micro-batch where it need not be.
    small = Config(group_size=4, max_response_tokens=64, micro_batch_tokens=511)
    assert sharing_of(small, longest=256 + 64) == 1


def test_the_policy_of_a_run_shares_prompts_where_its_groups_are_short(
    engine, group, tmp_path, monkeypatch
):
    monkeypatch.setattr(train, "build_engines", lambda cfg, longest: (engine, engine))
    # Signals stay those of the tests.
    monkeypatch.setattr(train, "catch_signals", list)
    for group_size, sharing in (4, 4), (8, 1):
        # At most 4 * 64 and 8 * 64 tokens of responses, and the prompt.
        cfg = Config(group_size=group_size, max_response_tokens=64)
        run = train.Run(cfg, load_data(cfg), tmp_path, group)
        assert run.policy.sharing == sharing


# 3 update: what is computed


def count_calls(function: Callable) -> tuple[Callable, list[int]]:
    """The function, and a list that has an entry for each call of it."""
    calls: list[int] = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return function(*arguments, **keywords)

    return counted, calls


def test_gradient_checkpointing_computes_layers_twice_and_changes_no_gradient(
    stale_batch, moved, group, monkeypatch
):
    attention = type(build_policy(moved, group).model.base_model.layers[0].self_attn)
    counted, calls = count_calls(attention.forward)
    monkeypatch.setattr(attention, "forward", counted)
    gradients = {}
    calls_of = {}
    for is_on in False, True:
        policy = build_policy(moved, group, gradient_checkpointing=is_on)
        calls.clear()
        gradients[is_on], _ = gradient_by(policy, stale_batch)
        calls_of[is_on] = len(calls)
    layers = len(policy.model.base_model.layers)
    assert calls_of == {False: layers, True: 2 * layers}
    assert relative_distance(gradients[True], gradients[False]) < 1e-5


@pytest.fixture
def update_of(stale_batch, moved, group) -> Callable:
    """Makes one update by plain gradient descent on a batch that is stale.

    Returns the policy, its weights before and after, the rollouts and the statistics.
    """

    def make(learning_rate: float = 1.0, objective: str = "p3o", **fields: Any):
        policy = build_policy(moved, group)
        before = weight_vector(policy)
        optimizer = torch.optim.SGD(policy.parameters(), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: 1.0)
        rollouts = stale_batch.select(list(range(16)))
        history = update(
            policy,
            optimizer,
            schedule,
            rollouts,
            find_objective(OBJECTIVES, objective, {}),
            Config(**BATCH, **fields),
            1,
            is_first=True,
        )
        return SimpleNamespace(
            policy=policy,
            before=before,
            after=weight_vector(policy),
            rollouts=rollouts,
            history=history,
            schedule=schedule,
        )

    return make


def test_a_gradient_is_clipped_to_max_grad_norm(update_of):
    # One minibatch and learning rate 1: the weights move by the gradient.
    free = update_of(minibatches=1, max_grad_norm=1e9)
    [stats] = free.history
    moved = float((free.after - free.before).norm())
    assert moved == pytest.approx(stats["grad_norm"], rel=1e-4)
    limit = stats["grad_norm"] / 10
    clipped = update_of(minibatches=1, max_grad_norm=limit)
    moved = float((clipped.after - clipped.before).norm())
    assert moved == pytest.approx(limit, rel=1e-4)
    # What is logged is the norm before it was clipped.
    assert clipped.history[0]["grad_norm"] == pytest.approx(
        stats["grad_norm"], rel=1e-6
    )


def test_no_gradient_is_left_for_the_next_step(update_of):
    updated = update_of(minibatches=2)
    assert all(weight.grad is None for weight in weights(updated.policy))
    # The second minibatch has its own gradient alone. At learning rate 0 it is that of
    # a policy that has not seen the first one.
    still = update_of(learning_rate=0.0, minibatches=2)
    rows = rows_of_minibatches(Config(**BATCH, minibatches=2), 1, 1)[1]
    cfg = Config(**BATCH)
    policy = still.policy
    accumulate_gradient(policy, still.rollouts, rows, OBJECTIVES["p3o"], cfg, 1)
    alone = float(gradient_vector(policy).norm())
    assert still.history[1]["grad_norm"] == pytest.approx(alone, rel=1e-4)


def test_every_minibatch_is_a_step_of_the_schedule(update_of):
    updated = update_of(passes=2, minibatches=2)
    assert len(updated.history) == 4
    assert updated.schedule.last_epoch == 4


def test_logp_prox_is_of_the_policy_before_the_first_update_on_the_batch(
    update_of, moved, group
):
    updated = update_of(
        objective="experiments.objectives:decoupled",
        passes=2,
        minibatches=2,
        micro_batch_tokens=200,
    )
    with torch.no_grad():
        before, _ = build_policy(moved, group)(updated.rollouts)
        after, _ = updated.policy(updated.rollouts)
    logp_prox = updated.rollouts.logp_prox
    assert (logp_prox - before).abs().max() < 1e-4
    # Neither the policy that sampled nor the one after the updates is near it.
    assert (after - before).abs().max() > 0.1
    assert (updated.rollouts.logp_behavior - before).abs().max() > 0.1


def test_the_objective_gets_the_kl_over_the_k_likeliest_tokens(
    stale_batch, moved, group
):
    given = []
    p3o = OBJECTIVES["p3o"]

    def recording(*tensors: torch.Tensor, **keywords: Any) -> Any:
        given.append(keywords["kl"])
        return p3o.loss(*tensors, **keywords)

    policy = build_policy(moved, group)
    rows = list(range(16))
    objective = replace(p3o, loss=recording)
    accumulate_gradient(policy, stale_batch, rows, objective, Config(**BATCH), 1)
    with torch.no_grad():
        _, top_logp = policy(stale_batch)
    # tiny has 20 tokens, and all of them are listed: the sum over the vocabulary.
    difference = top_logp - stale_batch.top_logp_behavior
    expected = (top_logp.exp() * difference).sum(dim=-1)
    [kl] = given
    assert kl is not None
    assert expected[stale_batch.mask].mean() > 0.01
    mean = expected[stale_batch.mask].mean()
    # A micro-batch has its rows in another order, and the same mean.
    mean_given = float(kl.detach().sum() / stale_batch.mask.sum())
    assert mean_given == pytest.approx(float(mean), rel=1e-4)


def test_a_run_of_a_hot_policy_is_on_policy_at_the_temperature_of_its_rollouts(
    train_here,
):
    # pi_theta is tiny at T = 1.5, in the trainer and in the engine. At T = 1 in one of
    # the two, the ratios of such a batch are 0.3 nats off in the mean.
    rows = train_here(
        "--steps=1",
        "--prompts_per_step=4",
        "--temperature=1.5",
        "--policy_temperature=1.5",
        "--rollout_dtype=float32",
    )
    assert rows[1]["mismatch_max"] < 1e-3
    assert rows[1]["ess"] > 0.999


# 4 sync


def test_the_weights_on_their_way_out_are_those_after_the_last_update(
    stale_batch, group
):
    policy = build_policy("tiny", group)
    held_by_the_optimizer = weights(policy)
    with torch.no_grad():
        # Without a backward pass it leaves the root's weights gathered.
        policy(stale_batch.select([0]))
        for weight in held_by_the_optimizer:
            weight.add_(1.0)
    tiny = AutoModelForCausalLM.from_pretrained("tiny").state_dict()
    sent = {name: weight.clone() for name, weight in full_weights(policy)}
    # The tied head is there under both its names: an engine wants both.
    assert sorted(sent) == sorted(tiny)
    for name, weight in sent.items():
        assert torch.allclose(weight, tiny[name] + 1.0, atol=1e-6), name


# A checkpoint, between two steps


def test_a_resumed_trainer_makes_the_next_step_of_the_one_that_saved(
    stale_batch, moved, group, tmp_path
):
    # AdamW's second step depends on the moments of the first, and the warm-up on how
    # many steps there were.
    cfg = Config(**BATCH, minibatches=1, warmup_steps=5, learning_rate=1e-2)

    def second_step(policy: Policy, optimizer: Any, schedule: Any) -> list[dict]:
        rollouts = stale_batch.select(list(range(16)))
        p3o = OBJECTIVES["p3o"]
        return update(
            policy, optimizer, schedule, rollouts, p3o, cfg, 2, is_first=False
        )

    policy = build_policy(moved, group)
    optimizer, schedule = build_optimizer(policy, cfg)
    first = stale_batch.select(list(range(16)))
    update(policy, optimizer, schedule, first, OBJECTIVES["p3o"], cfg, 1, is_first=True)
    state = (policy, optimizer, schedule)
    save_checkpoint(tmp_path, 1, *state, deque(), group_size=4, keep=1)
    [stats] = second_step(*state)
    after_second = weight_vector(policy)

    other = build_policy("tiny", group)
    resumed = (other, *build_optimizer(other, cfg))
    done = load_checkpoint(
        tmp_path, *resumed, deque(), group_size=4, rollouts_type=Rollouts
    )
    assert done == 1
    [resumed_stats] = second_step(*resumed)
    assert stats["learning_rate"] == pytest.approx(2 / 5 * 1e-2)
    assert resumed_stats == pytest.approx(stats, rel=1e-6)
    assert torch.allclose(weight_vector(other), after_second, rtol=0, atol=1e-6)


# 5 evaluate


def test_what_is_evaluated_is_the_policy_and_its_greedy_decoding(group):
    # Neither depends on the temperature at which rollouts are sampled.
    cfg = Config(temperature=1.4, policy_temperature=0.8, max_response_tokens=5)
    problems = [{"prompt": "0+1", "answer": "1"}] * 2
    engine = RecordingEngine()
    heldout_accuracy(engine, cfg, Split(problems, [[1], [2]], 0))
    assert [call["temperature"] for call in engine.calls] == [0.8, 0.0]
    for call in engine.calls:
        assert call["prompts"] == [[1], [2]]
        assert call["max_tokens"] == 5
        assert call.get("top_p", 1) == 1


@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_what_is_evaluated_is_never_a_quantized_copy(quantization, monkeypatch):
    def described(model: str, longest: int, **options: Any) -> dict[str, Any]:
        return options

    monkeypatch.setattr(train, "Engine", described)
    cfg = Config(rollout_quantization=quantization)
    engine, evaluator = build_engines(cfg, longest=100)
    assert engine["quantization"] == quantization
    assert evaluator.get("quantization", "none") == "none"


# The settings of a run reach what they are for

OF_ENGINES = {
    "rollout_tp": 2,
    "rollout_dtype": "float32",
    "rollout_quantization": "fp8_per_channel",
    "top_logprobs": 3,
    "kv_cache_gb": 0.7,
    "max_num_seqs": 9,
    "verbose": True,
}


def test_the_engines_have_the_settings_of_the_run(monkeypatch):
    monkeypatch.setattr(train, "Engine", lambda *given, **options: (given, options))
    engine, evaluator = build_engines(Config(model="m", **OF_ENGINES), longest=100)
    of_both = {
        "tp": 2,
        "dtype": "float32",
        "kv_cache_gb": 0.7,
        "max_num_seqs": 9,
        "verbose": True,
    }
    of_rollouts = {
        "quantization": "fp8_per_channel",
        "top_logprobs": 3,
        "can_sleep": True,
    }
    assert engine == (("m", 100), of_both | of_rollouts)
    assert evaluator == (("m", 100), of_both)


def test_the_policy_has_the_settings_of_the_run(monkeypatch, tmp_path):
    class Built(Exception):
        pass

    def build(*given, **options):
        raise Built(given, options)

    asleep = SimpleNamespace(sleep=lambda: None)
    monkeypatch.setattr(train, "build_engines", lambda *given: (asleep, asleep))
    monkeypatch.setattr(train, "build_policy", build)
    cfg = Config(dtype="bfloat16", policy_temperature=1.3, gradient_checkpointing=True)
    with pytest.raises(Built) as built:
        train.Run(cfg, SimpleNamespace(longest=100), tmp_path, "mesh")
    given, options = built.value.args
    assert given == ("tiny", "mesh")
    assert options == {
        "dtype": "bfloat16",
        "temperature": 1.3,
        "gradient_checkpointing": True,
        "sharing": sharing_of(cfg, 100),
    }


def test_the_optimizer_has_the_settings_of_the_run(group):
    cfg = Config(learning_rate=3e-3, weight_decay=0.2, warmup_steps=4)
    optimizer, schedule = build_optimizer(build_policy("tiny", group), cfg)
    [of_weights] = optimizer.param_groups
    assert of_weights["weight_decay"] == 0.2
    # The first of four steps of warm-up.
    assert of_weights["lr"] == pytest.approx(3e-3 / 4)
    assert schedule.get_last_lr() == [pytest.approx(3e-3 / 4)]


# The on-policy check looks at the right batches


def test_the_check_of_a_fresh_batch_sees_the_first_minibatch_before_its_update(
    update_of, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        train, "check_on_policy", lambda cfg, stats, *_: seen.append(stats["ess"])
    )
    updated = update_of(minibatches=2)
    assert seen == [updated.history[0]["ess"]]


def test_a_model_with_dropout_is_refused_as_its_ratios_would_be_random(tmp_path):
    # The trainer computes in training mode: at equal weights log rho would not be 0.
    shutil.copytree(ROOT / "tiny", tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"attention_dropout": 0.1}))
    with pytest.raises(
        Refused, match="has attention_dropout 0.1, by which every ratio"
    ):
        load_data(Config(model=str(tmp_path / "model")))


def test_a_model_whose_layers_cannot_be_sharded_is_refused_before_any_is_built(
    tmp_path,
):
    # GPT-2 keeps them in base_model.h.
    shutil.copytree(ROOT / "tiny", tmp_path / "model")
    dropouts = ["attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"]
    GPT2Config(**dict.fromkeys(dropouts, 0.0)).save_pretrained(tmp_path / "model")
    with pytest.raises(Refused, match="of type gpt2, which has no base_model.layers"):
        load_data(Config(model=str(tmp_path / "model")))


SMALL_MODEL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    "config, is_refused",
    [
        (LlamaConfig(**SMALL_MODEL), False),
        (PhiConfig(**SMALL_MODEL), True),  # adds a bias
        (GraniteConfig(**SMALL_MODEL, logits_scaling=8.0), True),  # divides by 8
        (
            Gemma2Config(**SMALL_MODEL, final_logit_softcapping=1.0),
            True,
        ),  # bounds by tanh
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_with_more_than_a_linear_head_is_refused(
    config: PretrainedConfig, is_refused: bool, group, tmp_path
):
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path)
    if is_refused:
        with pytest.raises(Refused, match="does not take its head's product for its"):
            build_policy(str(tmp_path), group)
    else:
        build_policy(str(tmp_path), group)
