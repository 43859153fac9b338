"""Test the loop of train.py: what each phase hands to the next, and whole short runs.

A wrong loop may still learn, only less well, and none of the numbers that it prints
shows it. Each test is about a line of the loop in which such a fault could hide.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ENGINES, NONE_COMPLETE, ROOT, SOME_COMPLETE, refusal_of
from launch import read_metrics, run_command
from test_eval import evaluate_here

import train
from eval import EvalConfig, evaluate, heldout_accuracy, load_benchmarks
from reward import compute_rewards, score
from rollout import Rollouts
from support.command import Refused
from support.log import PHASES, Log
from support.tasks import Dataset, load_task
from tools.objectives import dapo
from train import (
    Config,
    build_engines,
    load_data,
    problem_indices,
    sample_batch,
    save_and_evaluate,
)

# The problems


def test_each_epoch_of_each_seed_has_every_problem_once_in_an_order_of_its_own():
    orders = set()
    for seed in range(5):
        order = problem_indices(seed, 12, range(24))  # two epochs
        for epoch in order[:12], order[12:]:
            assert sorted(epoch) == list(range(12))
            orders.add(tuple(epoch))
    assert len(orders) == 5 * 2


@pytest.fixture
def sums(tmp_path) -> str:
    """Return a task with a verifier, an instruction and longer held-out problems."""
    rows = '{"prompt": "1+2", "answer": "3"}\n{"prompt": "10+2", "answer": "12"}\n'
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "heldout.jsonl").write_text(rows.replace("10+2", "100+20"))
    (tmp_path / "task.json").write_text('{"verifier": "gsm8k", "instruction": "0123"}')
    return str(tmp_path)


def test_longer_prompts_are_dropped_if_a_limit_is_given_and_refused_otherwise(sums):
    _, trained, heldout, _ = load_data(Config(task=sums, eval_problems=1))
    assert (len(trained.prompts), len(heldout.prompts)) == (2, 1)
    # The other problem has one more digit, and the longest held-out one has three more.
    limit = len(trained.prompts[0])
    assert load_data(Config(task=sums))[-1] == limit + 3 + 64  # max_response_tokens
    _, kept, _, _ = load_data(Config(task=sums, max_prompt_tokens=limit))
    assert kept.prompts == trained.prompts[:1]
    # The context of tiny has 128 tokens.
    with pytest.raises(Refused, match=f"1 of 2 train prompts .* over {limit} tokens"):
        load_data(Config(task=sums, max_response_tokens=128 - limit))


# 1 Rollout


@pytest.fixture(scope="session")
def few(heldout) -> Dataset:
    """Return the first held-out problems."""
    return heldout._replace(problems=heldout.problems[:9], prompts=heldout.prompts[:9])


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """Return the training problems of the embedded task and a log for sample_batch."""
    tokenizer, problems, _, _ = load_data(Config())
    return SimpleNamespace(train=problems, log=Log(Path(), tokenizer, 4, problems, {}))


def batch_of(engine, tiny, step: int = 1, **settings: Any) -> Rollouts:
    """Sample a rollout batch of tiny: by default 4 prompts with 4 responses each."""
    cfg = Config(**{"prompts_per_step": 4, "group_size": 4} | settings)
    return sample_batch(engine, cfg, step, tiny.train, tiny.log)


def test_a_step_samples_its_own_problems_with_the_settings_of_the_run(
    engine, policy, tiny, asked
):
    settings = {"temperature": 1.4, "top_p": 0.9, "top_k": 7}
    batch_of(engine, tiny, 2, max_response_tokens=5, seed=3, **settings)
    [call] = asked
    # Step 2 has the groups 4 to 7 of the run.
    indices = problem_indices(3, len(tiny.train.prompts), range(4, 8))
    assert call.pop("prompts") == [tiny.train.prompts[index] for index in indices]
    assert len(call.pop("seeds")) == 4
    assert call == {"n": 4, "max_tokens": 5, **settings}


def test_no_two_responses_of_a_run_and_its_evaluations_share_noise(
    engine, policy, tiny, few, asked
):
    for seed in 0, 1:
        asked.clear()
        for step in 1, 2, 3:
            batch_of(engine, tiny, step, seed=seed, max_response_tokens=1)
        evaluate(engine, few, samples=4, max_tokens=1)
        # Response j to a prompt has the noise of its seed + j.
        noise = [seed + j for call in asked for seed in call["seeds"] for j in range(4)]
        # 3 steps of 4 prompts, and 9 problems, with 4 responses each.
        assert len(set(noise)) == len(noise) == (3 * 4 + 9) * 4


def test_a_step_has_the_same_samples_on_two_ranks_as_on_one(
    engine, policy, tiny, monkeypatch
):
    alone = batch_of(engine, tiny, 3)
    for rank in 0, 1:
        monkeypatch.setattr(
            train, "prompts_of_rank", lambda count, rank=rank: range(rank, count, 2)
        )
        share = batch_of(engine, tiny, 3)
        # Rank 0 has groups 0 and 2 of the step, rank 1 has groups 1 and 3.
        groups = [alone.text[4 * group : 4 * group + 4] for group in (rank, rank + 2)]
        assert share.text == groups[0] + groups[1]


# 2 Reward


def test_a_response_is_rewarded_for_the_answer_to_its_own_prompt(engine, policy, tiny):
    rollouts = batch_of(engine, tiny, prompts_per_step=32)
    rewards = []
    for row, text in enumerate(rollouts.text):
        prompt = engine.tokenizer.decode(
            rollouts.tokens[row, : rollouts.prompt_length[row]]
        )
        a, b = prompt.removeprefix("<bos>").removesuffix(":").split("+")
        rewards.append(float(text.split()[-1:] == [str(int(a) + int(b))]))
    assert rollouts.reward.tolist() == rewards
    assert 0.2 < sum(rewards) / len(rewards) < 0.8


@pytest.mark.parametrize("scale", [True, False])
def test_every_token_has_the_advantage_of_its_response_in_its_group(
    scale, engine, policy, tiny
):
    rollouts = batch_of(engine, tiny, prompts_per_step=8, scale_advantage=scale)
    pairs = zip(rollouts.tokens.tolist(), rollouts.prompt_length, strict=True)
    prompts = [row[:length] for row, length in pairs]
    assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
    reward = rollouts.reward.view(8, 4)
    expected = reward - reward.mean(dim=1, keepdim=True)
    if scale:
        expected = expected / (reward.std(dim=1, keepdim=True) + 1e-6)
    assert expected.any()
    expected = expected.view(32, 1) * rollouts.mask
    torch.testing.assert_close(rollouts.advantage, expected)


def test_train_and_eval_use_the_verifier_and_the_instruction_of_the_task(sums):
    tokenizer, trained, heldout, _ = load_data(Config(task=sums))
    benchmarks = load_benchmarks(EvalConfig(task=[sums]))
    for split in trained, heldout, benchmarks[sums]:
        # tiny ends with only the sum, but gsm8k requires "#### 3".
        assert compute_rewards(split, [0], ["3", "#### 3"]) == [0.0, 1.0]
        text = tokenizer.decode(split.prompts[0])
        assert text.startswith("<bos>0123")
        assert text.endswith("1+2:")


# The loop


@pytest.fixture
def record(train_here, monkeypatch) -> Any:
    """Run train.py in this process; return what its functions received and returned.

    The result has the `metrics`, the `updates` with their arguments and statistics, and
    the `batches` by the step for which they were sampled. By default no response is
    complete and no group has a signal.
    """

    def run(*flags: str) -> SimpleNamespace:
        seen = SimpleNamespace(updates=[], batches={})

        def recording_update(*given):
            arguments = inspect.signature(update).bind(*given).arguments
            updated = SimpleNamespace(**arguments)
            # AdamW's options change from update to update.
            updated.options = dict(updated.optimizer.param_groups[0])
            updated.asleep = ENGINES[-1].asleep
            updated.stats = update(*given)
            seen.updates.append(updated)
            return updated.stats

        def recording_sample(engine, cfg, step, *more):
            seen.batches[step] = sample_batch(engine, cfg, step, *more)
            return seen.batches[step]

        update = train.update
        with monkeypatch.context() as patch:
            patch.setattr(train, "update", recording_update)
            patch.setattr(train, "sample_batch", recording_sample)
            before, *seen.metrics = train_here(
                # In step 1 of seed 0 no group would have a signal at SOME_COMPLETE.
                *("--prompts_per_step=4", "--group_size=4", "--seed=1"),
                *("--learning_rate=2e-3", "--warmup_updates=0"),
                *("--rollout_dtype=float32", NONE_COMPLETE),
                *flags,
            )
        return seen

    return run


@pytest.mark.parametrize("lag", [0, 2])
def test_a_batch_is_used_lag_steps_after_it_was_sampled_and_e_b_falls(lag, record):
    # pi_theta is tiny at T = 1.2, in the trainer and in the engine. If one of them had
    # T = 1, even fresh data would be off-policy.
    run = record(
        *("--steps=5", f"--lag={lag}", "--minibatches=1", SOME_COMPLETE),
        *("--temperature=1.2", "--policy_temperature=1.2"),
    )
    # The weights are those after step - 1 - lag, or the initial ones, because step 1
    # fills the queue.
    versions = [row["weight_version"] for row in run.metrics]
    assert versions == [str(max(0, step - 1 - lag)) for step in range(1, 6)]
    # Every batch is used in the step for which it was sampled, and none is left over.
    assert list(run.batches) == [1, 2, 3, 4, 5]
    for updated in run.updates:
        assert updated.rollouts is run.batches[updated.step]
        assert updated.asleep  # The engine lends its memory.
        assert updated.options["lr"] == 2e-3  # There is no warm-up.
    ess = [row["ess"] for row in run.metrics]
    assert ess[0] > 0.9999  # The first update follows its sampling.
    if lag:
        assert max(ess[2:]) < 0.99
    else:
        assert min(ess) > 0.9999
        assert max(row["logprob_abs_diff"] for row in run.metrics) < 1e-6


def test_each_pass_goes_through_all_groups_with_the_settings_of_the_run(record):
    run = record(
        *("--steps=2", "--prompts_per_step=6", "--minibatches=3", "--passes=2"),
        *("--learning_rate=0.1", "--warmup_updates=8", "--weight_decay=0.3"),
        *("--objective=tools.objectives:dapo", "--objective_args=eps_high=0.4"),
    )
    # Minibatch i has the groups 2 i and 2 i + 1, of 4 rows each. It has the same groups
    # on two ranks: rank r has r, 2 + r and 4 + r, and the i-th of them is 2 i + r.
    rows = [updated.rows.tolist() for updated in run.updates]
    assert rows == 4 * [list(range(8 * i, 8 * i + 8)) for i in range(3)]
    # A step has six updates, so the eighth is the second one of step 2.
    rates = [updated.options["lr"] for updated in run.updates]
    assert rates == pytest.approx([min(n, 8) / 80 for n in range(1, 13)])
    for updated in run.updates:
        assert updated.options["weight_decay"] == 0.3
        assert updated.objective.func is dapo
        assert updated.objective.keywords == {"eps_high": 0.4}


def test_a_step_logs_the_means_of_its_batch_and_updates_and_the_least_e_b(record):
    run = record(
        *("--steps=2", "--passes=2", "--minibatches=2", "--micro_batch_tokens=200"),
        SOME_COMPLETE,
    )
    assert [updated.step for updated in run.updates] == [1] * 4 + [2] * 4
    for row in run.metrics:
        step_stats = [up.stats for up in run.updates if up.step == row["step"]]
        for name in "loss", "mismatch_kl", "ess", "ratio", "above_ess", "grad_norm":
            mean = sum(stats[name] for stats in step_stats) / 4
            assert row[name] == pytest.approx(mean, rel=1e-6), name
        assert row["ess_min"] == min(stats["ess"] for stats in step_stats)
        # Before the first update the policy has not moved yet.
        assert row["logprob_abs_diff"] == step_stats[0]["logprob_abs_diff"] < 1e-4
        assert row["ess_min"] < 0.999 < step_stats[0]["ess"]
        batch = run.batches[row["step"]]
        groups = batch.reward.view(-1, 4)
        for name, values in {
            "entropy": -batch.logp_behavior[batch.mask],
            "response_tokens": batch.mask.sum(dim=1),
            "truncated": batch.truncated,
            "reward": batch.reward,
            "groups_with_signal": (groups != groups[:, :1]).any(dim=1),
        }.items():
            mean = values.double().mean().item()
            assert row[name] == pytest.approx(mean, rel=1e-5), name
        assert 0 < row["truncated"] < 1


def test_the_policy_has_the_settings_of_the_run(train_here, monkeypatch):
    def build(model, mesh, *settings):
        raise LookupError(model, *settings)

    monkeypatch.setattr(train, "build_policy", build)
    flags = "--dtype=bfloat16", "--policy_temperature=0.7", "--gradient_checkpointing"
    with pytest.raises(LookupError) as given:
        train_here(*flags)
    assert given.value.args == ("tiny", "bfloat16", 0.7, True)


# 5 Evaluate


def test_the_policy_is_evaluated_sampled_and_greedy(engine, policy, few, asked):
    # Neither depends on the settings of the rollouts.
    cfg = Config(temperature=1.4, top_p=0.5, policy_temperature=0.8)
    run = SimpleNamespace(engine=engine, evaluator=engine, policy=policy, heldout=few)
    save_and_evaluate(step=0, run=run, cfg=cfg)
    assert [call.pop("temperature") for call in asked] == [0.8, 0.0]
    for call in asked:
        assert call.pop("prompts") == few.prompts
        assert len(call.pop("seeds")) == 9
        assert call == {"n": 1, "max_tokens": cfg.max_response_tokens}


def full_reward_for_even_sums(responses: list[str], golds: list[str]) -> list[float]:
    """Return 1 for each even gold answer and 0.5 for each odd one."""
    return [0.5 if int(gold) % 2 else 1.0 for gold in golds]


def test_a_partial_reward_is_not_a_solved_problem(
    engine, policy, few, run_here, tmp_path
):
    verifier = "test_loop:full_reward_for_even_sums"
    solved = [1 - int(problem["answer"]) % 2 for problem in few.problems]
    assert fmean(solved) not in (0, 1 / 2, 1)
    partial = few._replace(verifier=verifier)
    assert heldout_accuracy(engine, partial, 1.0, max_tokens=1) == {
        "heldout_pass@1": fmean(solved),
        "heldout_greedy": fmean(solved),
    }
    flags = "--limit=9", f"--verifier={verifier}"
    result = evaluate_here(run_here, tmp_path / "out", *flags)
    assert result["correct"]["tiny"] == solved


ENGINE_FIELDS = {
    "rollout_tp": 2,
    "rollout_dtype": "bfloat16",
    "rollout_quantization": "fp8_per_channel",
    "top_logprobs": 3,
    "kv_cache_gb": 0.7,
    "max_num_seqs": 9,
    "verbose": True,
}


def test_the_engines_have_the_settings_of_the_run_and_the_evaluator_no_fp8(monkeypatch):
    monkeypatch.setattr(train, "Engine", lambda *given, **options: (given, options))
    engine, evaluator = build_engines(Config(model="m", **ENGINE_FIELDS), 100)
    options = {
        key.removeprefix("rollout_"): ENGINE_FIELDS[key] for key in ENGINE_FIELDS
    }
    options["load_format"] = "dummy"
    assert engine == (("m", 100), options | {"can_sleep": True})
    # The evaluator samples in bfloat16, and needs no top tokens.
    del options["quantization"], options["top_logprobs"]
    assert evaluator == (("m", 100), options)


# Whole runs


SHORT_RUN = [
    *("--prompts_per_step=16", "--learning_rate=8e-4", "--warmup_updates=2"),
    *("--eval_every=0", "--eval_problems=31"),
    "--rollout_dtype=float32",
    "--max_response_tokens=64",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """Run train.py as a user starts it; return its folder, metrics and output."""
    out = tmp_path_factory.mktemp("runs") / "short"
    command = [sys.executable, "train.py", "--steps=2", f"--out_dir={out}"]
    done = run_command(command + SHORT_RUN)
    assert done.returncode == 0, done.stdout
    return SimpleNamespace(out=out, metrics=read_metrics(out), printed=done.stdout)


def test_a_short_run_raises_sampled_and_greedy_held_out_accuracy(run):
    before, after = run.metrics[0], run.metrics[-1]
    for name in "heldout_greedy", "heldout_pass@1":
        # They rise from about 0.25 and 0.4 to 1.0 and 0.8.
        assert after[name] > before[name] + 0.15
        # With --eval_every=0 these are before step 1 and after the last step.
        assert [row["step"] for row in run.metrics if name in row] == [0, 2]


def test_a_run_prints_a_line_per_step_but_no_output_of_libraries(run):
    assert run.printed.startswith(f"{run.out}: trains in float32")
    lines = list(filter(str.strip, run.printed.splitlines()))
    steps = re.findall(r"^step +(\d+) ", run.printed, re.MULTILINE)
    assert steps == ["0", "1", "2"]  # 0 is before training
    # The other lines are the folder, the columns, and the files of the run.
    assert len(lines) == 2 + 3 + 1, run.printed
    before, _, last = run.metrics
    assert f"  e_B {last['ess']:.4f}  KL {last['mismatch_kl']:.1e}  " in lines[4]
    assert re.search(r" \d+\.\d s  held-out pass@1 ", lines[4])
    for line, row in (lines[2], before), (lines[4], last):
        accuracy = f"{row['heldout_pass@1']:.3f} sampled,  {row['heldout_greedy']:.3f}"
        assert line.endswith(f"held-out pass@1 {accuracy} greedy")


def test_a_run_leaves_the_files_that_it_promises(run):
    config = json.loads((run.out / "config.json").read_text())
    assert (config.pop("ranks"), config.pop("commits")) == (1, {})
    assert config == Config(**config).model_dump()
    assert config["steps"] == 2
    assert (run.out / "curves.png").stat().st_size > 10_000
    for row in run.metrics[1:]:
        assert min(row[f"{phase}_seconds"] for phase in PHASES) > 0
        assert 0.5 < row["peak_memory_gb"] < 50
    assert not (run.out / "checkpoints").exists()  # without --save_every


def test_the_committed_runs_have_the_metrics_that_a_run_writes_today(run):
    # A line before training, of a step, and of a step with an evaluation.
    names = {frozenset(row) for row in run.metrics}
    for name in "make_train", "smollm2_recipe":
        rows = read_metrics(ROOT / "study/results" / name)
        assert {frozenset(row) for row in rows} == names


def test_eval_and_train_take_a_run_as_a_model_with_the_accuracy_that_it_logged(
    run, run_here, tmp_path
):
    flags = f"--model={run.out}", "--temperature=0", "--limit=31"
    correct = evaluate_here(run_here, tmp_path / "out", *flags)["correct"]["tiny"]
    assert fmean(correct) == run.metrics[-1]["heldout_greedy"]
    # train.py has found the model if it can count its attention heads.
    refused = refusal_of(train, f"--model={run.out}", "--rollout_tp=3")
    assert refused.startswith("rollout_tp is 3: ")


def test_a_saved_sample_has_the_whole_prompt_and_the_reward_of_its_response(run):
    samples = [json.loads(line) for line in open(run.out / "samples.jsonl")]
    assert [sample["step"] for sample in samples] == [1, 1, 2, 2]
    problems = load_task("tiny", "train")
    # They are the first two of the 16 prompts of each step.
    indices = problem_indices(0, len(problems), [0, 1, 16, 17])
    for index, sample in zip(indices, samples, strict=True):
        prompt, answer = problems[index].values()
        assert sample["prompt"] == f"<bos>{prompt}:"
        assert sample["answer"] == answer
        assert [sample["reward"]] == score([sample["response"]], [answer], "exact")
