"""fp8 and the temperature, on real engines: there is a mismatch, and e_B sees it.

Lag, passes and minibatches are in test_loop.py, top-p and top-k in test_rollout.py, and
that fp8 follows the weights in test_sync.py. Without oneDNN fp8 is not slow.
"""

import torch
import vllm

from loss import effective_sample_size, ratio_sums
from policy import Policy


def lost(model, rollouts):
    """1 - e_B of the trainer's float32 policy: what the mismatch costs of the batch."""
    with torch.no_grad():
        logp, _ = Policy(model)(rollouts)
    sums = ratio_sums(logp - rollouts.logp_behavior, rollouts.mask)
    return 1 - effective_sample_size(sums).item()


def sample(engine, prompts, **sampling):
    """Two responses to each of 32 prompts, always with the same noise."""
    return engine.sample(
        prompts[:32], 2, list(range(0, 64, 2)), max_tokens=64, **sampling
    )


def test_e_b_sees_the_rounding_of_fp8(build_engine, policy, prompts):
    # fp8_per_channel computes in bfloat16, and so does what it is compared with.
    cost = {}
    for quantization in "none", "fp8_per_channel":
        engine = build_engine(dtype="bfloat16", quantization=quantization)
        engine.load_weights(policy.state_dict().items(), version="1")
        cost[quantization] = lost(policy, sample(engine, prompts))
    assert cost["fp8_per_channel"] > 1e-5
    assert cost["fp8_per_channel"] > 10 * cost["none"]


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


def test_an_engine_in_fp8_samples_without_onednn_and_no_other_does(
    build_engine, policy, prompts, monkeypatch
):
    # On some CPUs oneDNN is 60 times slower in fp8: a rollout of 58 s instead of 0.9.
    used = []

    class Watched(vllm.LLM):
        def generate(self, *args, **options):
            used.append(torch.backends.mkldnn.enabled)
            return super().generate(*args, **options)

    monkeypatch.setattr("vllm.LLM", Watched)
    for quantization in "none", "fp8_per_channel":
        engine = build_engine(dtype="bfloat16", quantization=quantization)
        engine.load_weights(policy.state_dict().items(), version="1")
        sample(engine, prompts)
    assert used == [True, False]
    assert torch.backends.mkldnn.enabled  # for the trainer
