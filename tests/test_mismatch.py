"""fp8 and the temperature on real engines: they make a mismatch, which e_B measures.

test_loop.py tests lag, passes and minibatches, test_rollout.py top-p and top-k, and
test_sync.py that fp8 weights are renewed at every sync.
"""

import torch
import vllm

from loss import effective_sample_size, ratio_sums
from policy import Policy


def lost(model, rollouts):
    """1 - e_B for the trainer's policy in float32."""
    with torch.no_grad():
        logp, _ = Policy(model)(rollouts)
    sums = ratio_sums(logp - rollouts.logp_behavior, rollouts.mask)
    return 1 - effective_sample_size(sums).item()


def sample(engine, prompts, **sampling):
    """Two responses to each of 32 prompts, always with the same sampling noise."""
    return engine.sample(
        prompts[:32], 2, list(range(0, 64, 2)), max_tokens=64, **sampling
    )


def test_fp8_lowers_e_b_more_than_bfloat16_does(build_engine, policy, prompts):
    # Both engines compute in bfloat16, so only the quantization differs.
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
    # Engine and trainer compute in float32. We measured 0.024, 0.0034, 1e-13, 0.0029
    # and 0.0086.
    assert cost[1.0] < 1e-9
    assert 1e-3 < cost[0.8] < cost[0.6]
    assert 1e-3 < cost[1.2] < cost[1.4]


def test_only_an_fp8_engine_samples_without_onednn(
    build_engine, policy, prompts, monkeypatch
):
    # On some CPUs oneDNN makes fp8 60 times slower: a rollout takes 58 s, not 0.9 s.
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
