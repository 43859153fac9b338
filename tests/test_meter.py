"""tools/meter.py: its numbers for batches that can be computed by hand."""

import pytest
import torch

from tools import meter


def test_the_meter_gives_e_b_and_quantiles_of_the_tokens_without_the_padding():
    ratio = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])  # 9 is padding
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = meter.measure(ratio.log(), mask)
    # e_B = mean(1, 2, 3)^2 / mean(1, 4, 9) = 4 / (14/3) = 6/7
    assert found["e_B"] == pytest.approx(6 / 7)
    assert found["rho q50"] == pytest.approx(2)
    assert found["mean |log rho|"] == pytest.approx(0.5972532)  # (log 2 + log 3) / 3
    assert found["max |log rho|"] == pytest.approx(1.0986123)  # log 3
    # The mean of rho log rho - rho + 1 is (0 + 0.386294 + 1.295837) / 3.
    assert found["KL, sampled token"] == pytest.approx(0.560710, rel=1e-5)


@pytest.mark.parametrize(
    "pi, pi_b, restrict, expected",
    [
        # By the K that the engine lists, in nats: 1/2 log 2 + 1/2 log(2/3), and
        # 1/2 log 2 + 1/4 log(1/2).
        ([8, 4, 2, 1, 1], [4, 8, 2, 1, 1], False, {1: 0.143841, 5: 0.173287}),
        # With top-k 2, pi_theta on the two tokens is (3/4, 1/4): 3/4 log(3/2) + 1/4
        # log(1/2). A single token leaves no distribution to compare.
        ([12, 4, 2, 1, 1], [1, 1, 0, 0, 0], True, {1: 0.0, 5: 0.130812}),
    ],
)
def test_the_meter_gives_the_kl_over_the_k_likeliest_tokens(
    pi, pi_b, restrict, expected
):
    logp, logp_behavior = [
        (torch.tensor([each]) / sum(each)).log() for each in (pi, pi_b)
    ]
    found = meter.kl_by_listed_tokens(logp, logp_behavior, restrict)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
