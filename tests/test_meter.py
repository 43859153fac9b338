"""Test the numbers of tools/meter.py on batches that can be computed by hand."""

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
