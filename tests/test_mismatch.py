"""Each source of mismatch, on real engines: it is there, it follows the weights, and
e_B sees it. Lag, passes and minibatches are in test_loop.py."""

import copy

import pytest
import torch

from loss import effective_sample_size, ratio_sums
from policy import Policy


def log_ratio(model, rollouts):
    """log rho [N, T] of the trainer's float32 forward pass at temperature 1."""
    with torch.no_grad():
        logp, _ = Policy(model)(rollouts)
    return logp - rollouts.logp_behavior


def mean_mismatch(model, rollouts):
    """The mean |log rho|, in nats a token."""
    return log_ratio(model, rollouts).abs()[rollouts.mask].mean().item()


def lost(model, rollouts):
    """1 - e_B: the share of the batch that the mismatch costs."""
    sums = ratio_sums(log_ratio(model, rollouts), rollouts.mask)
    return 1 - effective_sample_size(sums).item()


def sample(engine, prompts, **sampling):
    """Two responses to each of 32 prompts, always with the same noise."""
    return engine.sample(
        prompts[:32], 2, list(range(0, 64, 2)), max_tokens=64, **sampling
    )


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
    for version, model, other in ("1", policy, changed), ("2", changed, policy):
        for engine in bf16, fp8:
            engine.load_weights(model.state_dict().items(), version)
        quantized = sample(fp8, prompts)
        assert quantized.weight_version == version
        # Rounding to fp8 is there, and it is more than rounding to bfloat16 ...
        assert lost(model, quantized) > 1e-5
        assert lost(model, quantized) > 10 * lost(model, sample(bf16, prompts))
        # ... but little beside the noise: these are the weights of this sync.
        assert mean_mismatch(model, quantized) < 0.01
        assert mean_mismatch(other, quantized) > 0.05


def test_e_b_falls_with_the_distance_of_the_temperature_from_1(engine, policy, prompts):
    cost = {}
    for temperature in 0.6, 0.8, 1.0, 1.2, 1.4:
        rollouts = sample(engine, prompts, temperature=temperature)
        cost[temperature] = lost(policy, rollouts)
    # Engine and trainer are both in float32. Measured: 0.024, 0.0034, 1e-13, 0.0029 and
    # 0.0086.
    assert cost[1.0] < 1e-9
    assert 1e-3 < cost[0.8] < cost[0.6]
    assert 1e-3 < cost[1.2] < cost[1.4]


@pytest.mark.parametrize("sampling", [{"top_p": 0.8}, {"top_k": 2}], ids=str)
def test_top_p_and_top_k_cost_what_they_cut_off(engine, policy, prompts, sampling):
    """On what was sampled rho is the mass that was kept: not the same everywhere."""
    rollouts = sample(engine, prompts, **sampling)
    ratios = log_ratio(policy, rollouts)
    assert ratios[rollouts.mask].max() < 1e-4
    assert lost(policy, rollouts) > 1e-3  # measured: 0.0014 and 0.0036
