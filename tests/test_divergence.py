"""What loss.py's kl_divergence has beyond test_loss.py: the floor of the bucket of all
tokens that are not listed, the support of pi_b under top-p and top-k, and what the KL
does when rollouts are hotter than the policy.

A loss file for `pytest tests/test_loss.py --loss FILE` needs none of this.
"""

import math

import pytest
import torch
from loss_batches import F64, assert_close
from torch import Tensor

from loss import REST_FLOOR, kl_divergence, restrict_to_kept_tokens

# The floor. Two tokens are listed. pi_b has them equally likely, pi_theta the first one
# three times as likely as the second, and each has some probability for the rest.


def log(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=F64).log()


def policies(p_rest: float, b_rest: float) -> tuple[list[float], list[float]]:
    """pi_theta and pi_b of the two tokens, and of the rest."""
    p, b = 1 - p_rest, 1 - b_rest
    return [p * 3 / 4, p / 4, p_rest], [b / 2, b / 2, b_rest]


def divergence(p: list[float], b: list[float]) -> float:
    return math.fsum(p * math.log(p / b) - p + b for p, b in zip(p, b, strict=True))


@pytest.mark.parametrize(
    "p_share, b_share",
    [(1.1, 300), (300, 1.1), (0.1, 0.9), (0.9, 1e-7)]
    + [(0.9, 1.1), (1.1, 0.9), (1e-4, 10), (1e4, 1e-4)],
)
def test_a_rest_counts_as_what_it_is_and_below_the_floor_as_the_floor(p_share, b_share):
    p, b = policies(p_share * REST_FLOOR, b_share * REST_FLOOR)
    found = float(kl_divergence(log(p[:2]), log(b[:2])))
    floored = [[*each[:2], max(each[2], REST_FLOOR)] for each in (p, b)]
    assert_close(found, divergence(*floored), 1e-12)
    # That lowers the result, and by no more than what the rest really adds.
    lost = divergence(p, b) - found
    assert -1e-14 < lost <= divergence(p[2:], b[2:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("listed", [1, 6, 12])
def test_the_result_is_not_below_zero_for_policies_that_differ_by_rounding(
    listed, dtype
):
    # Rounded probabilities do not quite sum to one: sum p log(p / b) alone comes out
    # at -1e-7 as easily as at 1e-7. What may be left here is the rounding of float64.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 12, generator=generator, dtype=F64)
    noise = 1e-6 * torch.randn(20, 12, generator=generator, dtype=F64)
    behavior = logits.log_softmax(dim=-1).to(dtype)[:, :listed]
    logp = (logits + noise).log_softmax(dim=-1).to(dtype)[:, :listed]
    kl = kl_divergence(logp, behavior)
    assert (kl > -1e-15).all()
    assert (kl < 1e-10).all()


def test_rounding_in_the_listed_tokens_is_far_below_the_floor():
    # A vocabulary of 1000, all of it listed, in float32: two rests of nothing.
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20, 2, 1000, generator=generator)
    logp, behavior = logits.log_softmax(dim=-1).unbind(dim=1)
    rest = 1 - logp.double().exp().sum(dim=-1)
    assert rest.abs().max() < REST_FLOOR / 10
    exact = (logp.double().exp() * (logp - behavior).double()).sum(dim=-1)
    assert_close(kl_divergence(logp, behavior), exact, 1e-6)


# The support of pi_b, which samples from the first two of four tokens, as top-k = 2 has
# it.

LOGP = log([0.1, 0.3, 0.4, 0.2])
LOG_BEHAVIOR = log([3 / 4, 1 / 4, 0, 0])


def test_the_divergence_on_the_support_is_finite_by_hand():
    # pi_theta's (0.1, 0.3) becomes (1/4, 3/4). KL((1/4, 3/4) || (3/4, 1/4)) is
    # 1/4 log 1/3 + 3/4 log 3 = 1/2 log 3. Without restriction it is infinite.
    assert kl_divergence(LOGP, LOG_BEHAVIOR) == math.inf
    logp, behavior = restrict_to_kept_tokens(LOGP, LOG_BEHAVIOR)
    assert_close(logp.exp(), [1 / 4, 3 / 4, 0, 0], 1e-12)
    assert_close(behavior.exp(), [3 / 4, 1 / 4, 0, 0], 1e-12)
    assert_close(kl_divergence(logp, behavior), math.log(3) / 2, 1e-12)


def test_a_support_beyond_the_list_is_renormalized_to_the_list():
    # pi_b has 0.2 for tokens that are not listed: of the listed (0.6, 0.2) it keeps
    # (3/4, 1/4), and so does pi_theta of (0.1, 0.3).
    logp, behavior = restrict_to_kept_tokens(log([0.1, 0.3]), log([0.6, 0.2]))
    assert_close(logp.exp(), [1 / 4, 3 / 4], 1e-12)
    assert_close(behavior.exp(), [3 / 4, 1 / 4], 1e-12)


def test_a_support_of_one_token_has_no_divergence():
    # As greedy sampling has it: both policies are sure of that token.
    logp = LOGP.clone().requires_grad_()
    kl = kl_divergence(*restrict_to_kept_tokens(logp, log([1.0, 0, 0, 0])))
    assert kl == 0
    (gradient,) = torch.autograd.grad(kl, logp)
    assert not gradient.any()


# Heat


@pytest.mark.parametrize("temperature", [0.6, 1.2, 1.6])
def test_a_pull_to_ones_own_hotter_copy_is_a_push_to_more_entropy(
    temperature,
):
    # Where pi_b is pi_theta at temperature T, log pi_b is log pi_theta / T up to a
    # constant: grad KL(pi_theta || pi_b) = -(1 - 1/T) grad H(pi_theta). So at T > 1 the
    # KL is an entropy bonus, and at T < 1 an entropy penalty.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, generator=generator, dtype=F64).requires_grad_()
    logp = logits.log_softmax(dim=0)
    behavior = (logits.detach() / temperature).log_softmax(dim=0)
    kl = kl_divergence(logp, behavior)
    entropy = -(logp.exp() * logp).sum()
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (entropy_gradient,) = torch.autograd.grad(entropy, logits)
    assert_close(kl_gradient, -(1 - 1 / temperature) * entropy_gradient, 1e-9)
