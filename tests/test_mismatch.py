"""Each source of mismatch, on real engines: it is there, it follows the weights, e_B sees it."""

import functools
import runpy
from pathlib import Path

import pytest
import torch
from conftest import KEPT

from experiments import meter
from experiments.meter import measure, most_off
from loss import effective_sample_size
from policy import Policy
from rollout import fp8_round

ROOT = Path(__file__).parents[1]


def log_ratio(model, rollouts):
    """log rho [N, T] of the trainer's float32 forward pass at temperature 1."""
    with torch.no_grad():
        return Policy(model)(rollouts) - rollouts.logp_behavior


def lost(model, rollouts):
    """1 - e_B: the share of the batch that the mismatch costs."""
    return 1 - effective_sample_size(log_ratio(model, rollouts), rollouts.mask).item()


def sample(engine, prompts, **sampling):
    seeds = [2 * i for i in range(len(prompts))]
    return engine.sample(prompts, 2, seeds, max_tokens=64, **sampling)


@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8_emulated"])
def test_behavior_log_probabilities_are_those_of_the_fp8_engine_and_follow_a_sync(
    quantization, build_engine, engine, policy, prompts
):
    # "fp8_per_channel" computes in bfloat16: so does the engine that it is compared with.
    dtype = "bfloat16" if quantization == "fp8_per_channel" else "float32"
    plain, fp8 = build_engine(dtype=dtype), build_engine(dtype=dtype, quantization=quantization)
    for version in "1", "2":
        for either in plain, fp8:
            either.load_weights(policy.state_dict().items(), version)
        unquantized, quantized = sample(plain, prompts[:32]), sample(fp8, prompts[:32])
        assert quantized.weight_version == version
        # Measured: 5e-5 beside 3e-6 of bfloat16, emulated 1e-5 beside 1e-13 of float32; with the
        # noise below, 7e-4 beside 3e-5, and 4e-4 beside 5e-13 ...
        assert lost(policy, quantized) > 10 * lost(policy, unquantized)
        assert lost(policy, quantized) > 1e-5
        # ... and |log rho| 0.001 to 0.005, little beside the noise: these are the synced weights.
        assert log_ratio(policy, quantized).abs()[quantized.mask].mean() < 0.01
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for p in policy.parameters():
                p.add_(0.02 * torch.randn(p.shape, generator=generator))
        assert log_ratio(policy, quantized).abs()[quantized.mask].mean() > 0.05


def test_the_fp8_emulated_engine_is_the_policy_with_its_linear_layers_rounded(
    build_engine, policy, prompts
):
    fp8 = build_engine(quantization="fp8_emulated")
    fp8.load_weights(policy.state_dict().items(), version="1")
    rollouts = sample(fp8, prompts[:32])
    before = log_ratio(policy, rollouts).abs()[rollouts.mask].max()
    for layer in policy.model.layers.modules():  # neither the embedding nor the head
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = fp8_round(layer.weight.data)
    assert log_ratio(policy, rollouts).abs()[rollouts.mask].max() < 1e-4 < 1e-2 < before


def test_e_b_falls_with_the_distance_of_the_temperature_from_1(engine, policy, prompts):
    cost = {
        t: lost(policy, sample(engine, prompts[:32], temperature=t))
        for t in (0.6, 0.8, 1.0, 1.2, 1.4)
    }
    # Measured: 0.25, 0.022, 1e-13, 0.008, 0.025
    assert cost[1.0] < 1e-6 < 1e-3 < cost[0.8] < cost[0.6]
    assert 1e-3 < cost[1.2] < cost[1.4]


def test_raw_log_probabilities_would_leave_e_b_blind_to_the_temperature(engine, policy, prompts):
    # What vLLM records by default: the log-probabilities before the temperature.
    from vllm import LLM, SamplingParams

    raw = LLM("tiny", dtype="float32", distributed_executor_backend="external_launcher",
              max_model_len=128, kv_cache_memory_bytes=2**28, enforce_eager=True,
              max_num_batched_tokens=8192)  # fmt: skip
    KEPT.append(raw)
    seen = sample(engine, prompts[:32], temperature=1.4)
    outputs = raw.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts[:32]],
        [SamplingParams(n=2, temperature=1.4, max_tokens=64, logprobs=0, flat_logprobs=True,
                        seed=2 * i) for i in range(32)],
        use_tqdm=False,
    )  # fmt: skip
    recorded = [r.logprobs.logprobs for output in outputs for r in output.outputs]
    blind = torch.zeros_like(seen.logp_behavior)
    for row, logps in enumerate(recorded):
        assert len(logps) == seen.mask[row].sum()  # the very same samples
        blind[row, : len(logps)] = torch.tensor(logps)
    true_cost = lost(policy, seen)
    seen.logp_behavior = blind
    assert true_cost > 0.005 and lost(policy, seen) < 1e-6


def test_top_p_and_top_k_cost_what_they_cut_off(engine, policy, prompts):
    # On what was sampled rho = S, the mass that was kept: below 1, and not the same everywhere.
    for sampling in {"top_p": 0.8}, {"top_k": 2}:
        rollouts = sample(engine, prompts[:32], **sampling)
        ratio = log_ratio(policy, rollouts)
        assert ratio[rollouts.mask].max() < 1e-4
        assert lost(policy, rollouts) > 1e-3  # 0.003 and 0.002; without them 1e-13


def test_lag_uses_a_batch_exactly_so_many_steps_after_it_was_sampled_and_e_b_sees_it(train_here):
    flags = "--lag=2 --steps=5 --prompts_per_step=8 --learning_rate=2e-3 --warmup_steps=0"
    rows = train_here(*flags.split())[1:]
    # Step s uses the weights of max(0, s - 1 - 2): two batches are sampled before the first update.
    assert [row["weight_version"] for row in rows] == ["0", "0", "0", "1", "2"]
    assert rows[0]["ess"] > 0.9999  # sampled before any update, used for the first
    assert all(row["ess"] < 0.99 for row in rows[2:])  # 0.983 after one update


@pytest.mark.parametrize("passes, minibatches", [(3, 1), (1, 3), (2, 2)])
def test_passes_and_minibatches_make_a_batch_stale_while_it_is_used(
    train_here, passes, minibatches
):
    flags = f"--passes={passes} --minibatches={minibatches} --steps=2 --prompts_per_step=9"
    rows = train_here(*flags.split(), "--learning_rate=2e-3", "--warmup_steps=0")
    for row in rows[1:]:
        assert row["mismatch_mean"] < 0.01  # before the first update
        assert row["ess_min"] < 0.99  # at the last; measured: 3 passes 0.94, 3 minibatches 0.19


def test_held_out_accuracy_is_that_of_the_policy_not_of_its_fp8_copy(train_here):
    # Before training the policy is the same, and so are its samples.
    flags = "--steps=1", "--prompts_per_step=4", "--rollout_dtype=float32"
    plain, fp8 = train_here(*flags), train_here(*flags, "--rollout_quantization=fp8_emulated")
    assert fp8[0]["heldout_pass@1"] == plain[0]["heldout_pass@1"]
    assert fp8[1]["mismatch_mean"] > 10 * plain[1]["mismatch_mean"]  # the samples it learns from


def test_the_meter_gives_the_numbers_of_a_batch_that_can_be_done_by_hand():
    ratio = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])  # 9 is padding
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = measure(ratio.log(), mask)
    # e_B = mean(1, 2, 3)^2 / mean(1, 4, 9) = 4 / (14/3) = 6/7
    assert found["e_B"] == pytest.approx(6 / 7)
    assert found["rho q50"] == pytest.approx(2)
    assert found["max |log rho|"] == pytest.approx(1.0986123)  # log 3


def test_the_meter_names_the_tokens_that_are_off_most(engine, policy, prompts):
    rollouts = sample(engine, prompts[:64], temperature=1.4)
    worst = most_off(rollouts, log_ratio(policy, rollouts))
    assert worst == sorted(worst, reverse=True)
    assert all(count >= 10 for _, count, _ in worst)
    # ';' is written with probability 0.3: it depends on the temperature; '=' is certain.
    by_token = {engine.tokenizer.decode([token]): off for off, _, token in worst}
    assert by_token[";"] > 0.1 > by_token["="]


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--model=nowhere", "no model at 'nowhere'"),
        ("--prompts=nowhere.jsonl", "No such file or directory: 'nowhere.jsonl'"),
        ("--prompts=tiny/config.json", "tiny/config.json"),
        ("--temperature=3", "a temperature of 0.01 to 2"),
        ("--top_p=1.5", "a top_p of at most 1"),
        ("--top_k=-1", "top_k is -1: it has to be 0 or more"),
        ("--responses=0", "responses and max_response_tokens have to be positive"),
        ("--max_response_tokens=1000", "of at most 128 tokens"),
    ],
)
def test_the_meter_says_in_a_sentence_what_it_cannot_do(flags, reason, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["rollout.py", flags])
    with pytest.raises(SystemExit, match="2"):
        meter.main()
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_rollout_py_is_the_meter_and_prints_e_b_quantiles_kl_and_tokens(run_here, capsys):
    rollout_py = functools.partial(runpy.run_path, str(ROOT / "rollout.py"), run_name="__main__")
    run_here(meter, "--responses=32", "--temperature=1.2", main=rollout_py)
    printed = capsys.readouterr().out
    for name in "e_B", "mean |log rho|", "KL", "rho q99", "most off":
        assert name in printed
    assert 0.9 < float(printed.split("e_B")[1].split()[0]) < 0.999
