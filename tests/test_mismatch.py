"""Test that fp8 and the temperature make a mismatch on real engines, seen in e_B.

test_loop.py tests the lag, passes and minibatches, test_rollout.py tests top-p and
top-k, and test_sync.py tests that fp8 weights are renewed at every sync.
"""

import torch
import vllm

from loss import effective_sample_size, ratio_sums
from policy import Policy


def lost_by(engine, model, prompts, temperature=1.0):
    """Return 1 - e_B of two responses to each of 32 prompts, with fixed noise.

    pi_theta is the model at T = 1, in float32.
    """
    seeds = list(range(0, 64, 2))
    sampling = {"max_tokens": 64, "temperature": temperature}
    rollouts = engine.sample(prompts[:32], 2, seeds, **sampling)
    with torch.no_grad():
        logp, _ = Policy(model)(rollouts)
    sums = ratio_sums(logp - rollouts.logp_behavior, rollouts.mask)
    return 1 - effective_sample_size(sums).item()


def test_fp8_lowers_e_b_more_than_bfloat16_does_and_samples_without_onednn(
    build_engine, policy, prompts, monkeypatch
):
    # On some CPUs oneDNN makes fp8 60 times slower: a rollout takes 58 s, not 0.9 s.
    onednn = []

    class Watched(vllm.LLM):
        def generate(self, *args, **options):
            onednn.append(torch.backends.mkldnn.enabled)
            return super().generate(*args, **options)

    monkeypatch.setattr(vllm, "LLM", Watched)
    lost = []
    # Both engines compute in bfloat16, so they differ only in the quantization.
    for quantization in "none", "fp8_per_channel":
        engine = build_engine(dtype="bfloat16", quantization=quantization)
        engine.load_weights(policy.state_dict().items(), version="1")
        lost.append(lost_by(engine, policy, prompts))
    assert lost[1] > 1e-5
    assert lost[1] > 10 * lost[0]
    assert onednn == [True, False]
    assert torch.backends.mkldnn.enabled  # It is on again for the trainer.


def test_e_b_falls_with_the_distance_of_the_temperature_from_1(engine, policy, prompts):
    lost = {t: lost_by(engine, policy, prompts, t) for t in (0.6, 0.8, 1, 1.2, 1.4)}
    # We measured 0.024, 0.0034, 1e-13, 0.0029 and 0.0086.
    assert lost[1] < 1e-9
    assert 1e-3 < lost[0.8] < lost[0.6]
    assert 1e-3 < lost[1.2] < lost[1.4]
