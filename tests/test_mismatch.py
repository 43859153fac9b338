"""Each source of mismatch, on real engines: it is there, it follows the weights, and
e_B sees it. And experiments/meter.py, which measures it."""

import copy

import pytest
import torch
from conftest import KEPT

import train
from experiments import meter
from experiments.kl_tightness import TightnessConfig, kl_and_gradient, tightness
from experiments.meter import (
    kl_by_listed_tokens,
    measure,
    most_off,
    score_rollouts,
)
from loss import effective_sample_size
from policy import Policy
from rollout import Engine
from support.flags import Refused
from support.probe import SyncProbe


def log_ratio(model, rollouts):
    """log rho [N, T] of the trainer's float32 forward pass at temperature 1."""
    logp, _ = score_rollouts(Policy(model), rollouts)
    return logp - rollouts.logp_behavior


def mean_mismatch(model, rollouts):
    """The mean |log rho|, in nats a token."""
    return log_ratio(model, rollouts).abs()[rollouts.mask].mean().item()


def lost(model, rollouts):
    """1 - e_B: the share of the batch that the mismatch costs."""
    ratios = log_ratio(model, rollouts)
    return 1 - effective_sample_size(ratios, rollouts.mask).item()


def sample(engine, prompts, **sampling):
    """Two responses to each prompt, always with the same noise."""
    seeds = [2 * prompt for prompt in range(len(prompts))]
    return engine.sample(prompts, 2, seeds, max_tokens=64, **sampling)


def with_noise(model):
    """A copy of the policy, with normal noise of 0.02 on each weight."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return model


def test_log_pi_b_is_that_of_the_fp8_engine_and_follows_a_sync(
    build_engine, policy, prompts
):
    # fp8_per_channel computes in bfloat16, and so does what it is compared with.
    bf16 = build_engine(dtype="bfloat16")
    fp8 = build_engine(dtype="bfloat16", quantization="fp8_per_channel")
    changed = with_noise(policy)
    for version, model in (("1", policy), ("2", changed)):
        for engine in (bf16, fp8):
            engine.load_weights(model.state_dict().items(), version)
        unquantized = sample(bf16, prompts[:32])
        quantized = sample(fp8, prompts[:32])
        assert quantized.weight_version == version
        # Rounding to fp8 is there, and it is more than rounding to bfloat16 ...
        assert lost(model, quantized) > 1e-5
        assert lost(model, quantized) > 10 * lost(model, unquantized)
        # ... but little beside the noise: these are the weights of this sync.
        other = changed if model is policy else policy
        assert mean_mismatch(model, quantized) < 0.01
        assert mean_mismatch(other, quantized) > 0.05


def test_e_b_falls_with_the_distance_of_the_temperature_from_1(engine, policy, prompts):
    cost = {}
    for temperature in (0.6, 0.8, 1.0, 1.2, 1.4):
        rollouts = sample(engine, prompts[:32], temperature=temperature)
        cost[temperature] = lost(policy, rollouts)
    # Engine and trainer are both in float32. Measured: 0.024, 0.0034, 1e-13, 0.0029 and
    # 0.0086.
    assert cost[1.0] < 1e-9
    assert 1e-3 < cost[0.8] < cost[0.6]
    assert 1e-3 < cost[1.2] < cost[1.4]


def test_raw_log_probabilities_would_leave_e_b_blind_to_the_temperature(
    engine, policy, prompts, monkeypatch
):
    # vLLM's default: the log-probabilities before the temperature.
    import vllm

    def raw_llm(model, **options):
        return LLM(model, **options | {"logprobs_mode": "raw_logprobs"})

    LLM = vllm.LLM
    monkeypatch.setattr(vllm, "LLM", raw_llm)
    raw = Engine("tiny", 128, dtype="float32")
    KEPT.append(raw)
    seen = sample(engine, prompts[:32], temperature=1.4)
    blind = sample(raw, prompts[:32], temperature=1.4)
    assert torch.equal(blind.tokens, seen.tokens)  # the very same samples
    assert lost(policy, seen) > 1e-3
    assert lost(policy, blind) < 1e-9


@pytest.mark.parametrize("sampling", [{"top_p": 0.8}, {"top_k": 2}], ids=str)
def test_top_p_and_top_k_cost_what_they_cut_off(engine, policy, prompts, sampling):
    """On what was sampled rho is the mass that was kept: not the same everywhere."""
    rollouts = sample(engine, prompts[:32], **sampling)
    ratios = log_ratio(policy, rollouts)
    assert ratios[rollouts.mask].max() < 1e-4
    assert lost(policy, rollouts) > 1e-3  # measured: 0.0014 and 0.0036


def test_lag_uses_a_batch_so_many_steps_after_it_was_sampled_and_e_b_sees_it(
    train_here,
):
    before, *steps = train_here(
        *("--lag=2", "--steps=5", "--prompts_per_step=8", "--minibatches=1"),
        *("--learning_rate=2e-3", "--warmup_steps=0"),
    )
    # Step s uses the weights after step s - 1 - 2, or the first ones.
    assert [row["weight_version"] for row in steps] == ["0", "0", "0", "1", "2"]
    assert steps[0]["ess"] > 0.9999  # the first update follows its sampling
    assert all(row["ess"] < 0.99 for row in steps[2:])


@pytest.mark.parametrize("passes, minibatches", [(3, 1), (1, 3), (2, 2)])
def test_passes_and_minibatches_make_a_batch_stale_while_it_is_used(
    train_here, passes, minibatches
):
    before, *steps = train_here(
        *(f"--passes={passes}", f"--minibatches={minibatches}"),
        *("--steps=2", "--prompts_per_step=9"),
        *("--learning_rate=2e-3", "--warmup_steps=0"),
    )
    for row in steps:
        assert row["mismatch_mean"] < 0.01  # before its first update
        assert row["ess_min"] < 0.99  # at its last


def test_held_out_accuracy_is_that_of_the_policy_not_of_its_fp8_copy(train_here):
    # Before training the policy is the same, and so are its samples in bfloat16.
    flags = ("--steps=1", "--prompts_per_step=4")
    plain = train_here(*flags)
    fp8 = train_here(*flags, "--rollout_quantization=fp8_per_channel")
    for accuracy in ("heldout_pass@1", "heldout_greedy"):
        assert fp8[0][accuracy] == plain[0][accuracy]
    # What it learns from is the copy's.
    assert fp8[1]["mismatch_mean"] > 2 * plain[1]["mismatch_mean"]


def test_every_evaluation_of_an_fp8_run_is_of_the_policy_as_it_is_by_then(
    train_here, monkeypatch
):
    evaluate = train.Run.evaluate
    probes = []
    moved = []

    def compared(run):
        accuracy = evaluate(run)
        probes.append(SyncProbe(run.evaluator, run.policy, run.data.train.prompts))
        first = probes[0]
        moved.append(
            first.mean_difference(first.score(run.policy), first.logp_at_start)
        )
        return accuracy

    monkeypatch.setattr(train.Run, "evaluate", compared)
    train_here(
        *("--steps=1", "--prompts_per_step=4", "--learning_rate=3e-3"),
        *("--warmup_steps=0", "--rollout_quantization=fp8_per_channel"),
    )
    before, after = probes
    # Rounding to bfloat16 is all that is between the engine that evaluates and the
    # policy, and the policy has moved by far more.
    assert before.at_start < 0.01
    assert after.at_start < 0.01
    assert moved[-1] > 10 * after.at_start


def test_the_meter_gives_the_numbers_of_a_batch_that_can_be_done_by_hand():
    ratio = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])  # 9 is padding
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = measure(ratio.log(), mask)
    # e_B = mean(1, 2, 3)^2 / mean(1, 4, 9) = 4 / (14/3) = 6/7
    assert found["e_B"] == pytest.approx(6 / 7)
    assert found["rho q50"] == pytest.approx(2)
    assert found["max |log rho|"] == pytest.approx(1.0986123)  # log 3
    # mean of rho log rho - rho + 1 = (0 + 0.386294 + 1.295837) / 3
    assert found["KL, sampled token"] == pytest.approx(0.560710, rel=1e-5)


def test_the_meter_gives_the_kl_by_hand_for_each_k_that_the_engine_lists():
    """pi = (1/2, 1/4, 1/8, 1/16, 1/16), pi_b has 1/4 and 1/2 first: K = 1 and 5."""
    pi = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]])
    pi_b = torch.tensor([[0.25, 0.5, 0.125, 0.0625, 0.0625]])
    found = kl_by_listed_tokens(pi.log(), pi_b.log(), restrict=False)
    assert list(found) == [1, 5]  # not 20
    # 1/2 log 2 + 1/2 log(2/3) and 1/2 log 2 + 1/4 log(1/2), in nats
    assert found[1] == pytest.approx(0.143841, rel=1e-4)
    assert found[5] == pytest.approx(0.173287, rel=1e-4)


def test_the_meter_restricts_the_kl_to_the_support_of_top_k():
    """pi_b = (1/2, 1/2) after top-k 2; pi_theta on these tokens is (3/4, 1/4)."""
    pi = torch.tensor([[0.6, 0.2, 0.1, 0.05, 0.05]])
    pi_b = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]])
    found = kl_by_listed_tokens(pi.log(), pi_b.log(), restrict=True)
    # 3/4 log(3/2) + 1/4 log(1/2)
    assert found[5] == pytest.approx(0.130812, rel=1e-4)


def test_the_meter_names_the_tokens_that_are_off_most(engine, policy, prompts):
    rollouts = sample(engine, prompts[:64], temperature=1.4)
    worst = most_off(rollouts, log_ratio(policy, rollouts))
    assert worst == sorted(worst, reverse=True)
    assert all(samples >= 10 for _, samples, _ in worst)
    by_token = {
        engine.tokenizer.decode([token]): mismatch for mismatch, _, token in worst
    }
    # ';' is a rare choice, which depends on the temperature; '=' is certain.
    assert by_token[";"] > 0.1 > by_token["="]


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--model=nowhere"], "no model at 'nowhere'"),
        (["--task=nowhere.jsonl"], "nowhere.jsonl"),
        (["--temperature=3"], "temperature is '3'"),
        (["--top_p=1.5"], "top_p is '1.5'"),
        (["--top_k=-1"], "top_k is '-1'"),
        (["--responses=0"], "responses is '0'"),
        (["--max_response_tokens=1000"], "no room for a response"),
    ],
)
def test_the_meter_says_in_a_sentence_what_it_cannot_do(flags, reason, monkeypatch):
    monkeypatch.setattr("sys.argv", ["meter.py", *flags])
    with pytest.raises(Refused, match=reason) as refusal:
        meter.main()
    assert "\n" not in str(refusal.value)


def test_the_meter_prints_e_b_quantiles_kl_and_tokens(run_here, capsys):
    run_here(meter, "--responses=32", "--temperature=1.2")
    printed = capsys.readouterr().out
    values = {}
    for line in printed.splitlines()[1:]:
        if not line.startswith(("most off", "  ")):
            values[line[:20].strip()] = float(line[20:])
    assert 0.9 < values["e_B"] < 0.9999
    assert values["rho q1"] < values["rho q50"] < values["rho q99"]
    # The bound grows with K, and K = 20 is the whole vocabulary of tiny.
    assert 0 < values["KL, K = 1"] < values["KL, K = 5"] < values["KL, K = 20"]
    assert "most off" in printed


def test_the_kl_and_its_gradient_are_those_of_a_softmax():
    """d KL / d logit v = pi(v) (log(pi(v) / pi_b(v)) - KL)."""
    generator = torch.Generator().manual_seed(0)
    logp, logp_behavior = (
        torch.randn(3, 7, generator=generator).double().log_softmax(dim=-1)
        for _ in range(2)
    )
    kl, gradient = kl_and_gradient(logp, logp_behavior, listed=7)
    log_ratio = logp - logp_behavior
    expected = (logp.exp() * log_ratio).sum(dim=-1)
    torch.testing.assert_close(kl, expected)
    torch.testing.assert_close(gradient, logp.exp() * (log_ratio - expected[:, None]))


def test_the_bound_is_tighter_with_more_tokens_and_exact_with_all_of_tiny(
    engine, policy, prompts
):
    cfg = TightnessConfig(model="tiny", task="tiny", prompts=16, max_response_tokens=48)
    found = tightness(engine, Policy(policy), prompts[:16], 1.4, cfg)
    shares = [found["K"][listed]["share of the KL"] for listed in (1, 5, 20)]
    assert 0 < shares[0] < shares[1] < shares[2]
    assert shares[2] == pytest.approx(1, abs=1e-6)
    errors = [found["K"][listed]["error of the gradient"] for listed in (1, 5, 20)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6
    # The sampled tokens tell the same, within four standard errors.
    difference = found["KL from the sampled token"] - found["KL"]
    assert abs(difference) < 4 * found["its standard error"]
