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

# The floor of the bucket. Two tokens are listed. They are equally likely under pi_b,
# and the first is three times as likely under pi_theta. The bucket has the rest.


def log(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=F64).log()


def policies(p_rest: float, b_rest: float) -> tuple[list[float], list[float]]:
    """Return pi_theta and pi_b of the two tokens and of the rest."""
    p, b = 1 - p_rest, 1 - b_rest
    return [p * 3 / 4, p / 4, p_rest], [b / 2, b / 2, b_rest]


def divergence(p: list[float], b: list[float]) -> float:
    return math.fsum(p * math.log(p / b) - p + b for p, b in zip(p, b, strict=True))


@pytest.mark.parametrize(
    "p_share, b_share",
    [(1.1, 300), (300, 1.1), (0.1, 0.9), (0.9, 1e-7)]
    + [(0.9, 1.1), (1.1, 0.9), (1e-4, 10), (1e4, 1e-4)],
)
def test_the_bucket_counts_as_its_probability_but_at_least_as_the_floor(
    p_share, b_share
):
    p, b = policies(p_share * REST_FLOOR, b_share * REST_FLOOR)
    found = float(kl_divergence(log(p[:2]), log(b[:2])))
    floored = [[*each[:2], max(each[2], REST_FLOOR)] for each in (p, b)]
    assert_close(found, divergence(*floored), 1e-12)
    # The floor lowers the result by at most what the rest really adds.
    lost = divergence(p, b) - found
    assert -1e-14 < lost <= divergence(p[2:], b[2:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("listed", [1, 6, 12])
def test_the_kl_is_not_negative_if_policies_differ_only_by_rounding(listed, dtype):
    # Rounded probabilities do not quite sum to 1, so sum p log(p / b) by itself can be
    # -1e-7. kl_divergence may be off only by the rounding error of float64.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 12, generator=generator, dtype=F64)
    noise = 1e-6 * torch.randn(20, 12, generator=generator, dtype=F64)
    behavior = logits.log_softmax(dim=-1).to(dtype)[:, :listed]
    logp = (logits + noise).log_softmax(dim=-1).to(dtype)[:, :listed]
    kl = kl_divergence(logp, behavior)
    assert (kl > -1e-15).all()
    assert (kl < 1e-10).all()


def test_rounding_in_the_listed_tokens_is_far_below_the_floor():
    # All 1000 tokens of a vocabulary are listed, in float32, so the bucket is empty.
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20, 2, 1000, generator=generator)
    logp, behavior = logits.log_softmax(dim=-1).unbind(dim=1)
    rest = 1 - logp.double().exp().sum(dim=-1)
    assert rest.abs().max() < REST_FLOOR / 10
    exact = (logp.double().exp() * (logp - behavior).double()).sum(dim=-1)
    assert_close(kl_divergence(logp, behavior), exact, 1e-6)


# Top-p and top-k. With top-k = 2, pi_b samples from the first two of four tokens.

LOGP = log([0.1, 0.3, 0.4, 0.2])
LOG_BEHAVIOR = log([3 / 4, 1 / 4, 0, 0])


def test_the_kl_over_the_kept_tokens_is_finite_by_hand():
    # pi_theta's (0.1, 0.3) becomes (1/4, 3/4). KL((1/4, 3/4) || (3/4, 1/4)) is
    # 1/4 log 1/3 + 3/4 log 3 = 1/2 log 3. Without the restriction it is infinite.
    assert kl_divergence(LOGP, LOG_BEHAVIOR) == math.inf
    logp, behavior = restrict_to_kept_tokens(LOGP, LOG_BEHAVIOR)
    assert_close(logp.exp(), [1 / 4, 3 / 4, 0, 0], 1e-12)
    assert_close(behavior.exp(), [3 / 4, 1 / 4, 0, 0], 1e-12)
    assert_close(kl_divergence(logp, behavior), math.log(3) / 2, 1e-12)


def test_kept_tokens_that_are_not_listed_are_left_out():
    # pi_b keeps tokens with a probability of 0.2 that are not listed. Its listed
    # (0.6, 0.2) become (3/4, 1/4), and (0.1, 0.3) of pi_theta become (1/4, 3/4).
    logp, behavior = restrict_to_kept_tokens(log([0.1, 0.3]), log([0.6, 0.2]))
    assert_close(logp.exp(), [1 / 4, 3 / 4], 1e-12)
    assert_close(behavior.exp(), [3 / 4, 1 / 4], 1e-12)


def test_the_kl_is_zero_if_only_one_token_is_kept():
    # In greedy sampling both policies are certain of that token.
    logp = LOGP.clone().requires_grad_()
    kl = kl_divergence(*restrict_to_kept_tokens(logp, log([1.0, 0, 0, 0])))
    assert kl == 0
    (gradient,) = torch.autograd.grad(kl, logp)
    assert not gradient.any()


# Temperature


@pytest.mark.parametrize("temperature", [0.6, 1.2, 1.6])
def test_the_kl_to_a_hotter_copy_of_the_policy_is_an_entropy_bonus(temperature):
    # If pi_b is pi_theta at temperature T, log pi_b is log pi_theta / T up to a
    # constant, so grad KL(pi_theta || pi_b) = -(1 - 1/T) grad H(pi_theta). At T > 1 the
    # KL is an entropy bonus, and at T < 1 it is an entropy penalty.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, generator=generator, dtype=F64).requires_grad_()
    logp = logits.log_softmax(dim=0)
    behavior = (logits.detach() / temperature).log_softmax(dim=0)
    kl = kl_divergence(logp, behavior)
    entropy = -(logp.exp() * logp).sum()
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (entropy_gradient,) = torch.autograd.grad(entropy, logits)
    assert_close(kl_gradient, -(1 - 1 / temperature) * entropy_gradient, 1e-9)
