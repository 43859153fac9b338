"""Test the details of the KL in loss.py: the floor of the bucket, the restriction to
the tokens that top-p and top-k keep, and the effect of rollouts that are hotter than
the policy.

A file for `pytest tests/test_loss.py --loss FILE` need not pass these tests.
"""

import math

import pytest
import torch
from loss_batches import F64, assert_close
from torch import Tensor

from loss import REST_FLOOR, kl_divergence, restrict_to_kept_tokens


def log(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=F64).log()


# The bucket


def term(p: float, b: float) -> float:
    """Return what a token, or the bucket, adds to the KL."""
    return p * math.log(p / b) - p + b


@pytest.mark.parametrize(
    "p_share, b_share", [(1.1, 300), (0.9, 1e-7), (1e-4, 10), (1e4, 1e-4)]
)
def test_the_bucket_counts_as_its_probability_but_at_least_as_the_floor(
    p_share, b_share
):
    # One token is listed, and the bucket has the rest.
    p_rest, b_rest = p_share * REST_FLOOR, b_share * REST_FLOOR
    listed = term(1 - p_rest, 1 - b_rest)
    rest = term(max(p_rest, REST_FLOOR), max(b_rest, REST_FLOOR))
    found = kl_divergence(log([1 - p_rest]), log([1 - b_rest]))
    assert found.item() == pytest.approx(listed + rest, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("listed", [1, 6, 12])
def test_the_kl_is_not_negative_if_policies_differ_only_by_rounding(listed, dtype):
    # Rounded probabilities do not quite sum to 1, so sum p log(p / b) by itself can be
    # -1e-7. kl_divergence may be off only by the rounding error of float64.
    generator = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(2, 20, 12, generator=generator, dtype=F64)
    both = torch.stack([logits + 1e-6 * noise, logits]).log_softmax(dim=-1)
    kl = kl_divergence(*both[..., :listed].to(dtype))
    assert (kl > -1e-15).all()
    assert (kl < 1e-10).all()


def test_rounding_in_the_listed_tokens_is_far_below_the_floor():
    # All 1000 tokens of a vocabulary are listed, in float32, so the bucket is empty.
    logits = 3 * torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
    rest = 1 - logits.log_softmax(dim=-1).double().exp().sum(dim=-1)
    assert rest.abs().max() < REST_FLOOR / 10


# Top-p and top-k


@pytest.mark.parametrize(
    "p, b, kl",
    [
        # With top-k = 2, pi_b samples from the first two of four tokens, of which
        # pi_theta's (0.1, 0.3) becomes (1/4, 3/4). KL((1/4, 3/4) || (3/4, 1/4)) is
        # 1/4 log 1/3 + 3/4 log 3 = 1/2 log 3.
        ([0.1, 0.3, 0.4, 0.2], [3 / 4, 1 / 4, 0, 0], math.log(3) / 2),
        # pi_b keeps tokens that are not listed, and its listed ones become the same.
        ([0.1, 0.3], [0.6, 0.2], math.log(3) / 2),
        # In greedy sampling both policies are certain of the only token that is kept.
        ([0.1, 0.3], [1, 0], 0),
    ],
)
def test_the_kl_compares_both_policies_on_the_listed_tokens_that_pi_b_can_sample(
    p, b, kl
):
    logp = log(p).requires_grad_()
    found = kl_divergence(*restrict_to_kept_tokens(logp, log(b)))
    assert_close(found, kl, 1e-12)
    (gradient,) = torch.autograd.grad(found, logp)
    assert torch.isfinite(gradient).all()


# Temperature


@pytest.mark.parametrize("temperature", [0.6, 1.2, 1.6])
def test_the_kl_to_a_hotter_copy_of_the_policy_is_an_entropy_bonus(temperature):
    # If pi_b is pi_theta at temperature T, log pi_b is log pi_theta / T up to a
    # constant, so grad KL(pi_theta || pi_b) = -(1 - 1/T) grad H(pi_theta). At T > 1 the
    # KL is an entropy bonus, and at T < 1 it is an entropy penalty.
    logits = log([0.1, 0.6, 0.3]).requires_grad_()
    logp = logits.log_softmax(dim=0)
    kl = kl_divergence(logp, (logits.detach() / temperature).log_softmax(dim=0))
    entropy = -(logp.exp() * logp).sum()
    (gradient,) = torch.autograd.grad(kl + (1 - 1 / temperature) * entropy, logits)
    assert gradient.abs().max() < 1e-12
