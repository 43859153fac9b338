"""The trainer on real parts.

The gradient of the whole batch through FSDP2; short runs under torchrun, and what they
leave behind; the checks that stop a run; what it says of bad input.
"""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TORCHRUN, TWO_STEPS
from gradient_on_ranks import (
    CASES,
    GROUP_SIZE,
    OBJECTIVES_COMPARED,
    ROW,
    WHOLE,
    Gradient,
    gradient_of,
    objective_of,
)
from launch import read_metrics, torchrun, torchrun_on_nodes
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from loss import KL_ESTIMATORS, OBJECTIVES, Batch, effective_sample_size
from policy import Policy, build_policy
from reward import load_task
from rollout import Rollouts, noise_seeds
from support.checkpoints import share_of_rank
from support.checks import check_on_policy, check_out_dir, check_run
from support.flags import OneRankFailed, Refused
from train import (
    Config,
    accumulate_gradient,
    furthest_response,
    problem_numbers,
    ratio_statistics,
    update,
    weights_that_sample,
)

# The gradient


def full_distribution(
    model: torch.nn.Module, rollouts: Rollouts
) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi_theta of the sampled tokens [N, T] and of all tokens [N, T, V].

    By the plain forward pass, without Policy. The padding's entries mean nothing.
    """
    columns = rollouts.mask.shape[1]
    position = rollouts.prompt_length[:, None] + torch.arange(columns)  # [N, T]
    position = position.clamp(max=rollouts.tokens.shape[1] - 1)
    row = torch.arange(len(rollouts.text))[:, None]
    logits = model(rollouts.tokens).logits  # [N, L, V]
    log_pi = logits[row, position - 1].log_softmax(dim=-1)
    token = rollouts.tokens[row, position]
    return log_pi.gather(2, token[..., None])[..., 0], log_pi


def plain_gradient(
    model: torch.nn.Module, rollouts: Rollouts, objective_name: str
) -> Gradient:
    """The gradient on the whole batch at once, by autograd without the trainer.

    The KL of (12) is summed over the vocabulary: the engine has listed all of it.
    """
    objective = objective_of(objective_name)
    logp, log_pi = full_distribution(model, rollouts)
    log_pi = log_pi.gather(2, rollouts.top_tokens)  # [N, T, V], in the engine's order
    keywords = {}
    if objective.takes_kl:
        difference = log_pi - rollouts.top_logp_behavior
        keywords["kl"] = (log_pi.exp() * difference).sum(dim=-1)
    if objective.takes_logp_prox:
        keywords["logp_prox"] = rollouts.logp_prox
    loss, _ = objective.loss(
        logp, rollouts.logp_behavior, rollouts.advantage, rollouts.mask, **keywords
    )
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.fixture(scope="module")
def stale_batch(engine, prompts, tmp_path_factory) -> SimpleNamespace:
    """A policy that has moved away from the one that sampled a batch.

    Its `folder` has both, as gradient_on_ranks.py wants them; `plain` is the gradient
    of each objective on the whole batch, by autograd alone.
    """
    folder = tmp_path_factory.mktemp("gradients")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    engine.load_weights(model.state_dict().items(), version="0")
    seeds = [GROUP_SIZE * prompt for prompt in range(8)]
    rollouts = engine.sample(prompts[:8], GROUP_SIZE, seeds, max_tokens=64)
    generator = torch.Generator().manual_seed(0)
    rollouts.advantage = torch.randn(len(rollouts.text), generator=generator)
    noise = 0.1 * torch.randn(rollouts.mask.shape, generator=generator)
    rollouts.logp_prox = (rollouts.logp_behavior + noise) * rollouts.mask
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.03 * torch.randn(weight.shape, generator=generator))
    torch.save(rollouts, folder / "rollouts.pt")
    model.save_pretrained(folder / "model")
    plain = {
        name: plain_gradient(model, rollouts, name) for name in OBJECTIVES_COMPARED
    }
    return SimpleNamespace(folder=folder, model=model, rollouts=rollouts, plain=plain)


@pytest.fixture(scope="module")
def policy_here(stale_batch, group) -> Policy:
    """That policy under FSDP2, on one rank."""
    return build_policy(str(stale_batch.folder / "model"), group)


@pytest.fixture(scope="module")
def by_ranks(stale_batch, policy_here) -> dict[int, dict]:
    """What gradient_of says on 1 rank, this process, and on 2: {ranks: {case: ...}}."""
    folder = stale_batch.folder
    here = {case: gradient_of(policy_here, folder, *case) for case in CASES}
    torchrun(2, "tests/gradient_on_ranks.py", str(folder))
    on_two = torch.load(folder / "gradients-2.pt", weights_only=False)
    return {1: here, 2: on_two}


def relative_error(gradient: Gradient, expected: Gradient) -> float:
    """|gradient - expected| / |expected| of all weights as one vector."""
    squared_distance = 0.0
    squared_norm = 0.0
    for name, value in expected.items():
        squared_distance += float(((gradient[name] - value) ** 2).sum())
        squared_norm += float((value**2).sum())
    return math.sqrt(squared_distance / squared_norm)


def assert_gathered_whole(folder: Path, ranks: int) -> None:
    """An engine got each weight once, rounded to bfloat16, a tied head as well."""
    gathered = torch.load(folder / f"gathered-{ranks}.pt")
    weights = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert "lm_head.weight" in weights
    assert sorted(name for name, _ in gathered) == sorted(weights)
    for name, weight in gathered:
        assert torch.equal(weight, weights[name].bfloat16()), name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_is_that_of_the_whole_batch_for_any_micro_batches_and_ranks(
    case, ranks, by_ranks, stale_batch
):
    # Also where the four responses of a group share the sequence of their prompt.
    gradient, _ = by_ranks[ranks][case]
    name, *_ = case
    assert relative_error(gradient, stale_batch.plain[name]) < 1e-4


def test_a_rank_without_responses_takes_part_in_the_gradient_of_the_others(
    by_ranks, stale_batch
):
    # Under FSDP every rank has to make every forward and backward pass. Rank 0 has
    # several micro-batches, and rank 1 nothing.
    of_rank_0 = share_of_rank(stale_batch.rollouts, GROUP_SIZE, 0, 2)
    expected = plain_gradient(stale_batch.model, of_rank_0, "p3o")
    gradient, _ = torch.load(stale_batch.folder / "idle-2.pt", weights_only=False)
    assert relative_error(gradient, expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_gradient_is_that_of_the_whole_batch_on_4_ranks_of_1_and_of_2_nodes(
    nodes, stale_batch
):
    # On two nodes the weights are sharded within each and replicated across: HSDP.
    folder = stale_batch.folder
    torchrun_on_nodes(nodes, 4 // nodes, "tests/gradient_on_ranks.py", str(folder))
    results = torch.load(folder / "gradients-4.pt", weights_only=False)
    assert list(results) == CASES
    for (name, *_), (gradient, _) in results.items():
        assert relative_error(gradient, stale_batch.plain[name]) < 1e-4
    assert_gathered_whole(folder, ranks=4)


def test_the_gradients_of_the_objectives_differ_by_far_more_than_that(stale_batch):
    for name in OBJECTIVES_COMPARED:
        if name != "p3o":
            error = relative_error(stale_batch.plain[name], stale_batch.plain["p3o"])
            assert error > 0.1, name


def test_an_e_b_of_each_micro_batch_would_have_changed_the_gradient(
    stale_batch, policy_here
):
    # The authors' code takes it so. A micro-batch of 300 tokens has some six responses.
    name = "experiments.ablations:ess_of_micro_batch"
    gradient, _ = gradient_of(policy_here, stale_batch.folder, name, 300)
    assert relative_error(gradient, stale_batch.plain["p3o"]) > 0.01
    gradient, _ = gradient_of(policy_here, stale_batch.folder, name, WHOLE)
    assert relative_error(gradient, stale_batch.plain["p3o"]) < 1e-4


def test_the_logged_statistics_are_those_of_the_whole_batch_too(by_ranks):
    _, expected = by_ranks[1]["p3o", WHOLE, 1]
    # It is a stale batch, of which e_B cuts some weights and the KL counts.
    assert 0.1 < expected["ess"] < 0.98
    assert expected["capped"] > 0.05
    assert expected["kl"] > 0.01
    assert expected["kl"] == pytest.approx(expected["kl_loss"], rel=1e-6)
    for ranks in 1, 2:
        for case in itertools.product(["p3o"], (ROW, 300, WHOLE), (1, GROUP_SIZE)):
            _, stats = by_ranks[ranks][case]
            assert stats == pytest.approx(expected, rel=1e-4), (ranks, case)


def test_without_top_logprobs_the_kl_is_estimated_from_the_sampled_tokens(
    build_engine, prompts, group
):
    engine = build_engine(top_logprobs=0)
    seeds = [GROUP_SIZE * prompt for prompt in range(4)]
    rollouts = engine.sample(
        prompts[:4], GROUP_SIZE, seeds, max_tokens=64, temperature=1.4
    )
    assert rollouts.top_tokens.shape == (*rollouts.mask.shape, 0)
    rollouts.advantage = torch.zeros(len(rollouts.text))
    policy = build_policy("tiny", group)
    logp, top_logp = policy(rollouts)
    assert top_logp.shape == (*rollouts.mask.shape, 0)
    rows = list(range(len(rollouts.text)))
    cfg = Config(temperature=1.4, top_logprobs=0)
    stats = accumulate_gradient(policy, rollouts, rows, OBJECTIVES["p3o"], cfg, step=1)
    # The estimator named "is": the mean of rho log rho - rho + 1 over samples of pi_b.
    log_ratio = (logp.detach() - rollouts.logp_behavior)[rollouts.mask].double()
    ratio = log_ratio.exp()
    expected = (ratio * log_ratio - ratio + 1).mean().item()
    assert expected > 0.005
    assert stats["kl"] == pytest.approx(expected, rel=1e-4)
    assert stats["kl_loss"] == pytest.approx(expected, rel=1e-4)
    # With no advantage the loss is the second term of (12) alone.
    assert stats["loss"] == pytest.approx((1 - stats["ess"]) * expected, rel=1e-4)


def test_the_response_that_is_furthest_off_is_that_of_all_ranks(
    by_ranks, stale_batch, policy_here
):
    on_one = furthest_response(policy_here, stale_batch.rollouts, Config())
    assert torch.load(stale_batch.folder / "furthest-2.pt") == [on_one, on_one]


def test_two_ranks_save_the_whole_model(by_ranks, stale_batch):
    folder = stale_batch.folder
    expected = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved-2").state_dict()
    assert sorted(saved) == sorted(expected)
    for name, weight in expected.items():
        assert torch.equal(saved[name], weight), name


def test_an_engine_gets_the_weights_that_the_policy_computes_with_from_two_ranks(
    by_ranks, stale_batch
):
    assert_gathered_whole(stale_batch.folder, ranks=2)


def test_in_bfloat16_only_the_forward_pass_is_rounded(engine, policy, prompts, group):
    seeds = [2 * prompt for prompt in range(8)]
    rollouts = engine.sample(prompts[:8], 2, seeds, max_tokens=64)
    half = build_policy("tiny", group, dtype="bfloat16")
    for weight in half.parameters():
        assert weight.dtype == torch.float32  # the master weights
    logp_behavior = rollouts.logp_behavior.clone()
    logp, top_logp = half(rollouts)
    assert logp.dtype == top_logp.dtype == torch.float32
    assert rollouts.logp_behavior.dtype == torch.float32
    assert torch.equal(rollouts.logp_behavior, logp_behavior)
    with torch.no_grad():
        expected, _ = Policy(policy)(rollouts)
    error = (logp.detach() - expected).abs()[rollouts.mask]
    # bfloat16 has 8 bits: 0.4% of an activation.
    assert 1e-5 < error.mean() < 0.01


# Steps, their problems, their noise and their weights


def test_an_epoch_has_every_problem_once_and_the_next_one_another_order():
    cfg = Config(prompts_per_step=3, seed=5)
    order = []
    for step in range(1, 9):  # two epochs of 12 problems
        order += problem_numbers(cfg, step, 12)
    assert sorted(order[:12]) == sorted(order[12:]) == list(range(12))
    assert order[:12] != order[12:]
    # It needs no history, so a run can be resumed: step 6 has the places 15 to 17.
    assert problem_numbers(cfg, 6, 12) == order[15:18]


def test_noise_seeds_never_repeat_in_a_run_and_differ_between_runs():
    def seeds_of_run(seed: int) -> set[int]:
        # 50 steps of 32 prompts. The 8 responses to a prompt take s, ..., s + 7.
        used = set()
        for step in range(50):
            for s in noise_seeds(seed, first=step * 32, count=32, spacing=8):
                used.update(range(s, s + 8))
        return used

    runs = [seeds_of_run(seed) for seed in range(5)]
    for run_seeds in runs:
        assert len(run_seeds) == 50 * 32 * 8
    assert len(set.union(*runs)) == 5 * 50 * 32 * 8


def test_the_weights_that_sample_the_batch_of_step_7_at_lag_4_are_those_after_step_2():
    # On-policy they would be those after step 6, and 6 - 4 = 2.
    assert weights_that_sample(Config(lag=0), 7) == 6
    assert weights_that_sample(Config(lag=4), 7) == 2


def test_before_the_lag_has_passed_the_initial_weights_sample():
    cfg = Config(lag=4)
    sampled_by = [weights_that_sample(cfg, step) for step in range(1, 8)]
    assert sampled_by == [0, 0, 0, 0, 0, 1, 2]


# Runs


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """(out_dir, what was printed) of a short training run under torchrun.

    It has half the prompts and four times the learning rate of the default, and one
    update a step, so every batch B is fresh.
    """
    out = tmp_path_factory.mktemp("runs") / "short"
    flags = [
        "--steps=10",
        "--prompts_per_step=16",
        "--minibatches=1",
        "--learning_rate=8e-4",
        "--eval_every=0",
    ]
    command = [*TORCHRUN, "--standalone", "train.py", *flags, f"--out_dir={out}"]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    return out, ended.stdout


def test_a_short_run_raises_sampled_and_greedy_held_out_accuracy(run):
    rows = read_metrics(run[0])
    before, after = rows[0], rows[-1]
    # tiny/README.md: 110 of 512 greedily, and 0.44 of the samples, whose standard error
    # on 512 problems is sqrt(0.44 * 0.56 / 512) = 0.022. bfloat16 flips a few answers.
    assert before["heldout_greedy"] == pytest.approx(110 / 512, abs=0.01)
    assert before["heldout_pass@1"] == pytest.approx(0.44, abs=3 * 0.022)
    assert after["heldout_pass@1"] > before["heldout_pass@1"] + 0.1
    assert after["heldout_greedy"] > before["heldout_greedy"] + 0.1


def test_both_accuracies_stand_in_a_line_of_metrics_or_neither(run):
    for row in read_metrics(run[0]):
        # --eval_every=0: before step 1 and after step 10.
        evaluated = row["step"] in (0, 10)
        assert ("heldout_pass@1" in row) == evaluated
        assert ("heldout_greedy" in row) == evaluated


def test_steps_are_numbered_from_1_in_metrics_messages_and_samples(run):
    out, printed = run
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == list(range(11))  # 0 is before training
    # The batch of step n is sampled by the weights after step n - 1.
    sampled_by = [row["weight_version"] for row in rows[1:]]
    assert sampled_by == [str(step - 1) for step in range(1, 11)]
    step_lines = [line for line in printed.splitlines() if line.startswith("step")]
    assert [int(line.split()[1]) for line in step_lines] == list(range(11))
    samples = [json.loads(line) for line in open(out / "samples.jsonl")]
    expected = [step for step in range(1, 11) for _ in range(2)]
    assert [sample["step"] for sample in samples] == expected


def test_every_step_logs_what_a_reader_of_the_run_needs(run):
    names = """reward groups_with_signal response_tokens truncated entropy loss
        policy_loss kl_loss kl capped ratio ratio_central ess ess_central ess_min
        ratio_q1 ratio_q50 ratio_q99 mismatch_mean mismatch_max grad_norm learning_rate
        rollout_seconds reward_seconds update_seconds sync_seconds tokens_per_second
        peak_memory_gb""".split()
    for row in read_metrics(run[0])[1:]:
        for name in names:
            assert isinstance(row[name], float), name
        # These are fresh batches.
        assert 0.99 < row["ess"] <= 1
        assert abs(row["ratio"] - 1) < 0.01
        assert 0 < row["mismatch_mean"] < 0.01
        assert 0 < row["kl"] < 0.001
        # The embedded policy needs some 35 tokens for a sum.
        assert 20 < row["response_tokens"] < 60


def test_a_run_prints_a_line_a_step_and_a_table_and_nothing_of_the_libraries(run):
    lines = [line for line in run[1].splitlines() if line.strip()]
    assert sum(line.startswith("step") for line in lines) == 11
    # Below them: a head, two accuracies, the seconds of four phases, where it all is.
    assert len(lines) == 11 + 1 + 2 + 4 + 1, run[1]
    assert lines[11].split() == ["before", "after"]
    assert lines[13].startswith("held-out pass@1, greedy")
    assert lines[14].startswith("seconds in rollout")


def test_a_run_leaves_the_files_that_it_promises(run):
    out = run[0]
    config = json.loads((out / "config.json").read_text())
    assert config == Config(**config).model_dump()
    assert (config["steps"], config["objective"], config["seed"]) == (10, "p3o", 0)
    assert (out / "curves.png").stat().st_size > 10_000
    assert (out / "model" / "model.safetensors").exists()


def test_a_sample_has_the_whole_prompt_that_was_sent_special_tokens_included(run):
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    train_problems = load_task("tiny", "train")
    cfg = Config(prompts_per_step=16)
    samples = [json.loads(line) for line in open(run[0] / "samples.jsonl")]
    # The samples of a step are responses to its first two prompts.
    for step in range(1, 11):
        numbers = problem_numbers(cfg, step, len(train_problems))[:2]
        samples_of_step = samples[2 * step - 2 : 2 * step]
        for number, sample in zip(numbers, samples_of_step, strict=True):
            text = f"{tokenizer.bos_token}{train_problems[number]['prompt']}:"
            assert sample["prompt"] == text
            assert tokenizer.eos_token not in sample["response"]
            assert sample["reward"] in (0, 1)


def test_the_trained_model_says_the_same_in_transformers_and_in_vllm(
    run, build_engine, prompts
):
    folder = run[0] / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = build_engine(folder)
    greedy = engine.sample(prompts[:8], 1, [0] * 8, temperature=0, max_tokens=64)
    for prompt, text in zip(prompts[:8], greedy.text, strict=True):
        tokens = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64
        )
        response = tokens[0, len(prompt) :]
        assert tokenizer.decode(response, skip_special_tokens=True) == text


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[Path, str, subprocess.Popen]:
    """A run on two ranks that gets a Ctrl-C after its second step.

    (out_dir, what was printed, its launcher).
    """
    out = tmp_path_factory.mktemp("two-ranks") / "run"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / "train.py"]
    process = subprocess.Popen(
        [*command, *TWO_STEPS, "--steps=80", f"--out_dir={out}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith("step    2"):
            # What Ctrl-C does: the launcher and all ranks get it.
            os.killpg(process.pid, signal.SIGINT)
            break
    printed += process.stdout.readlines()
    process.wait()
    return out, "".join(printed), process


def test_an_interrupt_finishes_the_step_saves_it_and_leaves_no_process(interrupted):
    out, printed, process = interrupted
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    steps = [row["step"] for row in read_metrics(out)]
    last = steps[-1]
    assert steps == list(range(last + 1))
    assert last >= 2
    assert f"stopped by signal 2 after step {last}: --resume goes on" in printed
    # Half of it is torchrun's own traceback of the signal.
    assert len(printed.splitlines()) < 50, printed
    assert (out / "checkpoints" / f"step-{last:06d}" / ".metadata").exists()


def test_two_ranks_do_what_one_rank_does(interrupted, one_rank):
    two_ranks = read_metrics(interrupted[0])
    for name in "heldout_pass@1", "heldout_greedy":
        assert two_ranks[0][name] == one_rank[0][name]
    for one, two in zip(one_rank[1:], two_ranks[1:3], strict=True):
        for name in "reward", "response_tokens", "groups_with_signal":
            assert two[name] == pytest.approx(one[name], rel=1e-6)
        for name in "ess", "grad_norm", "entropy":
            assert two[name] == pytest.approx(one[name], rel=1e-3)


def test_a_batch_is_used_lag_steps_after_it_was_sampled(train_here):
    rows = train_here("--steps=4", "--prompts_per_step=4", "--lag=2")[1:]
    # Weights 0 sample the batches of steps 1, 2 and 3 before the first update.
    assert [row["weight_version"] for row in rows] == ["0", "0", "0", "1"]


# The checks that stop a run


def batch_of(log_ratio: torch.Tensor) -> Batch:
    """A batch B with these log rho, [|B|]."""
    log_ratio = log_ratio[None]
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    return Batch(
        log_ratio=log_ratio,
        advantage=torch.zeros_like(log_ratio),
        mask=mask,
        ess=effective_sample_size(log_ratio, mask),
        token_count=log_ratio.numel(),
    )


def rounding_noise() -> torch.Tensor:
    """log rho of 1,000 tokens as bfloat16's rounding leaves them: 0.01 nats off."""
    return 0.01 * torch.randn(1000, generator=torch.Generator().manual_seed(0))


def test_one_outlier_does_not_end_a_healthy_run():
    log_ratio = rounding_noise()
    log_ratio[0] = 8.0
    stats = ratio_statistics(batch_of(log_ratio))
    # One ratio of e^8 = 2981 among 999 of 1: e_B = (3.98)^2 / 8887 = 0.0018, and the
    # mean ratio is 3.98. With the outer 1% at each end drawn in both are near 1.
    assert stats["ess"] == pytest.approx(0.0018, rel=0.02)
    assert stats["ratio"] == pytest.approx(3.98, rel=0.01)
    assert stats["ess_central"] > 0.999
    assert stats["ratio_central"] == pytest.approx(1, abs=0.01)
    check_on_policy(Config(), stats, step=1, is_first=True, furthest_response=str)


@pytest.mark.parametrize(
    "log_ratio",
    [
        0.5 * torch.randn(1000, generator=torch.Generator().manual_seed(0)),
        # e_B is 1 if all ratios are equal, whatever they are: 0.02, as in trl 5312.
        torch.full([1000], math.log(0.02)),
        rounding_noise() + 0.2,
    ],
    ids=["scattered", "small", "shifted"],
)
def test_a_batch_that_should_be_on_policy_and_is_not_ends_a_run_in_its_first_step(
    log_ratio, group, capsys
):
    stats = ratio_statistics(batch_of(log_ratio))
    with pytest.raises(Refused, match="step 1: a batch that should be on-policy"):
        check_on_policy(Config(), stats, step=1, is_first=True, furthest_response=str)
    # Later there is something to lose.
    check_on_policy(
        Config(), stats, step=7, is_first=False, furthest_response=lambda: "1+1=3"
    )
    warning = capsys.readouterr().err
    assert warning.startswith("warning: step 7: a batch that should be on-policy")
    assert "weight sync" in warning
    assert warning.endswith("furthest off is the response '1+1=3'\n")


@pytest.mark.parametrize(
    "planned",
    [
        {"temperature": 1.2},
        {"top_p": 0.9},
        {"top_k": 5},
        {"lag": 1},
        {"rollout_quantization": "fp8_per_channel"},
    ],
)
def test_a_batch_that_should_be_off_policy_is_not_complained_of(planned, capsys):
    stats = ratio_statistics(batch_of(torch.full([1000], math.log(0.02))))
    check_on_policy(
        Config(**planned), stats, step=1, is_first=True, furthest_response=str
    )
    check_on_policy(
        Config(**planned), stats, step=7, is_first=False, furthest_response=str
    )
    assert capsys.readouterr().err == ""


@pytest.fixture
def four_responses(engine, policy, prompts) -> Rollouts:
    """Two responses to each of two prompts, rewarded."""
    rollouts = engine.sample(prompts[:2], 2, [0, 2], max_tokens=64)
    rollouts.advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    return rollouts


@pytest.mark.parametrize("name", ["logp_behavior", "advantage"])
def test_a_number_that_is_not_finite_stops_the_run_with_step_rank_and_response(
    name, four_responses, group
):
    getattr(four_responses, name)[2] = math.nan
    with pytest.raises(FloatingPointError) as error:
        update(
            build_policy("tiny", group),
            optimizer=None,
            schedule=None,
            rollouts=four_responses,
            objective=OBJECTIVES["p3o"],
            cfg=Config(prompts_per_step=2, group_size=2, minibatches=1),
            step=7,
            is_first=False,
        )
    assert str(error.value).startswith("step 7, rank 0: |log rho| is over 82.0 nats")
    assert repr(four_responses.text[2]) in str(error.value)


def test_the_response_that_is_furthest_off_is_that_of_the_largest_log_ratio(
    four_responses, group
):
    texts = [f"response {row}" for row in range(4)]
    four_responses.text = texts
    # The ratio of one token of the third is e^3, and of one of the second 1/e^2.
    four_responses.logp_behavior[2, 1] -= 3
    four_responses.logp_behavior[1, 0] += 2
    # Padding is no token.
    four_responses.logp_behavior[0] += 9 * ~four_responses.mask[0]
    policy = build_policy("tiny", group)
    assert furthest_response(policy, four_responses, Config()) == "response 2"


def test_a_kl_that_is_infinite_stops_the_run_with_its_step(four_responses, group):
    # As top-p leaves it, of which this run has not been told.
    four_responses.top_logp_behavior[2, 0, -1] = -torch.inf
    policy = build_policy("tiny", group)
    given = policy, four_responses, [0, 1, 2, 3], OBJECTIVES["p3o"]
    with pytest.raises(OneRankFailed) as error:
        accumulate_gradient(*given, Config(), step=7)
    assert str(error.value).startswith("step 7: the loss is not finite in response ")
    assert repr(four_responses.text[0]) in str(error.value)
    # Over the support it is finite.
    stats = accumulate_gradient(*given, Config(top_p=0.9), step=7)
    assert math.isfinite(stats["kl"])


# What the user can get wrong


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--objective=ppo", "objective is 'ppo': give p3o, reinforce, grpo, or module"),
        ("--objective=nowhere:ppo", "objective 'nowhere:ppo' cannot be imported"),
        ("--objective=grpo --objective_args epsilon=0.4", "grpo takes eps=0.2"),
        ("--objective=grpo --objective_args eps=wide", "grpo takes eps=0.2"),
        ("--objective_args eps=0.4", "p3o takes kl_estimator=is"),
        ("--objective_args kl_estimator=k3", "add --top_logprobs 0"),
        ("--objective=grpo --objective_args kl_estimator=k3", "grpo takes eps=0.2"),
        ("--top_logprobs=0 --top_p=0.9", "with top_p or top_k the KL is over the"),
        ("--top_logprobs=0 --top_k=8", "give --top_logprobs, as 20"),
        (
            "--objective_args kl_estimator=k4 --top_logprobs=0",
            "objective_args has kl_estimator=k4: give is or k3",
        ),
        ("--task=sums", "unknown task 'sums'"),
        ("--model=missing", "no model at 'missing'"),
        ("--group_size=1", "group_size is '1': input should be greater than or equal"),
        ("--minibatches=64", "give each of the 1 ranks and each of the 64 minibatches"),
        ("--max_response_tokens=128", "have over 0 tokens"),
        (
            "--max_prompt_tokens=5",
            "4096 of 4096 train prompts of tiny have over 5 tokens",
        ),
        ("--report_to=wandb", "pip install wandb"),
    ],
)
def test_bad_input_is_one_sentence_before_the_engine_is_built(
    arguments, sentence, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments.split()])
    monkeypatch.setattr(train, "init_distributed", lambda: pytest.fail("too late"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused) as refused:
        train.main()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "lines, sentence",
    [
        ("", "has no problems"),
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": 1+1}\n', "line 2"),
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2"}\n', "line 2"),
    ],
    ids=["empty", "no JSON", "no answer"],
)
def test_a_bad_task_file_is_named_with_its_line(lines, sentence, tmp_path, monkeypatch):
    task = tmp_path / "task.jsonl"
    task.write_text(lines)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--task={task}"])
    with pytest.raises(Refused, match=sentence):
        train.main()


def test_the_folder_of_another_run_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(Refused, match="holds another run"):
        check_out_dir(Config(out_dir=str(tmp_path)))
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_folder_with_a_config_that_no_run_has_written_is_refused(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')  # a model's
    with pytest.raises(Refused, match="config.json that no run has written"):
        check_out_dir(Config(out_dir=str(tmp_path)))
    # A run that failed before its first step has one, and can be started again.
    config.write_text(json.dumps(Config(out_dir=str(tmp_path)).model_dump()))
    check_out_dir(Config(out_dir=str(tmp_path)))


def test_another_objective_may_have_a_kl_estimator_of_its_own():
    p3o = OBJECTIVES["p3o"]
    cfg = Config(objective_args={"kl_estimator": "mine"})
    with pytest.raises(Refused, match="add --top_logprobs 0"):
        check_run(cfg, p3o, KL_ESTIMATORS)
    cfg.objective = "mine:objective"
    objective = replace(p3o, hyper_parameters={"kl_estimator": "mine"})
    check_run(cfg, objective, KL_ESTIMATORS)


def test_without_a_kl_rollouts_may_be_cut_to_their_support_and_list_no_tokens():
    cfg = Config(objective="grpo", top_p=0.9, top_logprobs=0)
    check_run(cfg, OBJECTIVES["grpo"], KL_ESTIMATORS)


def test_a_refused_run_or_evaluation_exits_with_one_line_and_status_1():
    processes = {}
    for script, flag in ("train.py", "--steps=0"), ("eval.py", "--chunk_responses=0"):
        processes[script] = subprocess.Popen(
            [sys.executable, ROOT / script, flag],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for script, field in ("train.py", "steps"), ("eval.py", "chunk_responses"):
        out, error = processes[script].communicate()
        assert out == ""
        assert error == f"{script}: {field} is '0': input should be greater than 0\n"
        assert processes[script].returncode == 1
