"""What loss.py's kl_divergence has beyond test_loss.py: the floor of the bucket of all
tokens that are not listed, the support of pi_b under top-p and top-k, and what the KL
does when rollouts are hotter than the policy.

A loss file for `pytest tests/test_loss.py --loss FILE` needs none of this.
"""

import math

import pytest
import torch
from loss_batches import F64, assert_close
from loss_oracle import divergence_gradient
from torch import Tensor

from loss import REST_FLOOR, kl_divergence, restrict_to_support

# The floor. Two tokens are listed. pi_b has them equally likely, pi_theta the first one
# three times as likely as the second, and each has some probability for the rest.


def log(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=F64).log()


def tilted(rest: float) -> list[float]:
    return [(1 - rest) * 3 / 4, (1 - rest) / 4]


def even(rest: float) -> list[float]:
    return [(1 - rest) / 2, (1 - rest) / 2]


def measured(p_rest: float, b_rest: float) -> float:
    return float(kl_divergence(log(tilted(p_rest)), log(even(b_rest))))


def term(p: float, b: float) -> float:
    """What an outcome of probabilities p and b adds, as kl_divergence writes it."""
    return p * math.log(p / b) - p + b


def listed_terms(p_rest: float, b_rest: float) -> float:
    return sum(map(term, tilted(p_rest), even(b_rest)))


def test_above_the_floor_the_rest_counts_as_what_it_is() -> None:
    p_rest, b_rest = 1.1 * REST_FLOOR, 300 * REST_FLOOR
    right = listed_terms(p_rest, b_rest) + term(p_rest, b_rest)
    assert_close(measured(p_rest, b_rest), right, 1e-12)


@pytest.mark.parametrize("p_share, b_share", [(0.1, 0.9), (0.9, 0.1), (1e-7, 0.5)])
def test_two_rests_below_the_floor_add_nothing(p_share: float, b_share: float) -> None:
    p_rest, b_rest = p_share * REST_FLOOR, b_share * REST_FLOOR
    assert_close(measured(p_rest, b_rest), listed_terms(p_rest, b_rest), 1e-12)


@pytest.mark.parametrize("small", [0.9, 0.1, 1e-4])
@pytest.mark.parametrize("large", [1.1, 10.0, 1e4])
def test_one_rest_below_the_floor_counts_as_the_floor(
    large: float, small: float
) -> None:
    below, above = small * REST_FLOOR, large * REST_FLOOR
    for p_rest, b_rest in ((below, above), (above, below)):
        floored = term(max(p_rest, REST_FLOOR), max(b_rest, REST_FLOOR))
        found = measured(p_rest, b_rest)
        assert_close(found, listed_terms(p_rest, b_rest) + floored, 1e-12)
        # That lowers the result, and by no more than what the rest really adds.
        rest = term(p_rest, b_rest)
        lost = listed_terms(p_rest, b_rest) + rest - found
        assert 0 < lost <= rest


def missing_gradient(p_rest: float, b_rest: float) -> tuple[Tensor, Tensor]:
    """The oracle's gradient to the logits of three tokens, two of them listed, less
    that of kl_divergence; and the score of the rest, by which it can be missing.

    d log p_rest / d logit is -p_1 and -p_2 for the listed, and 1 - p_rest for the rest.
    """
    p = [*tilted(p_rest), p_rest]
    b = [*even(b_rest), b_rest]
    logits = log(p).requires_grad_()
    kl = kl_divergence(logits.log_softmax(dim=0)[:2], log(b[:2]))
    (gradient,) = torch.autograd.grad(kl, logits)
    right = torch.tensor(divergence_gradient(p, b, listed=2), dtype=F64)
    return right - gradient, torch.tensor([-p[0], -p[1], 1 - p_rest], dtype=F64)


def test_above_the_floor_the_gradient_is_the_oracles() -> None:
    missing, _ = missing_gradient(1.1 * REST_FLOOR, 300 * REST_FLOOR)
    assert missing.abs().max() < 1e-12


@pytest.mark.parametrize("share", [0.9, 0.1, 1e-3])
def test_a_rest_of_pi_theta_below_the_floor_has_no_gradient(share: float) -> None:
    # What is missing is p log(p / b) times the score of the rest.
    p_rest, b_rest = share * REST_FLOOR, 100 * REST_FLOOR
    missing, score = missing_gradient(p_rest, b_rest)
    assert_close(missing, p_rest * math.log(p_rest / b_rest) * score, 1e-6)


def test_a_rest_of_pi_b_below_the_floor_pulls_as_if_it_were_the_floor() -> None:
    # p log(p / REST_FLOOR) in place of p log(p / b): p log(REST_FLOOR / b) is missing.
    p_rest, b_rest = 100 * REST_FLOOR, 0.1 * REST_FLOOR
    missing, score = missing_gradient(p_rest, b_rest)
    assert_close(missing, p_rest * math.log(10) * score, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("listed", [1, 6, 12])
def test_the_result_is_not_below_zero_for_policies_that_differ_by_rounding(
    listed: int, dtype: torch.dtype
) -> None:
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


def test_rounding_in_the_listed_tokens_is_far_below_the_floor() -> None:
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


def test_the_divergence_on_the_support_is_finite_by_hand() -> None:
    # pi_theta's (0.1, 0.3) becomes (1/4, 3/4). KL((1/4, 3/4) || (3/4, 1/4)) is
    # 1/4 log 1/3 + 3/4 log 3 = 1/2 log 3. Without restriction it is infinite.
    assert kl_divergence(LOGP, LOG_BEHAVIOR) == math.inf
    logp, behavior = restrict_to_support(LOGP, LOG_BEHAVIOR)
    assert_close(logp.exp(), [1 / 4, 3 / 4, 0, 0], 1e-12)
    assert_close(behavior.exp(), [3 / 4, 1 / 4, 0, 0], 1e-12)
    assert_close(kl_divergence(logp, behavior), math.log(3) / 2, 1e-12)


def test_the_gradient_on_the_support_is_that_of_the_renormalized_policy() -> None:
    # p = (1/4, 3/4): p_v (log(p_v / b_v) - KL) with the logarithms -log 3 and log 3 and
    # the KL 1/2 log 3 is -3/8 log 3 and 3/8 log 3. Tokens outside are not moved.
    logits = LOGP.clone().requires_grad_()
    logp = logits.log_softmax(dim=0)
    kl = kl_divergence(*restrict_to_support(logp, LOG_BEHAVIOR))
    (gradient,) = torch.autograd.grad(kl, logits)
    share = 3 / 8 * math.log(3)
    assert_close(gradient, [-share, share, 0, 0], 1e-12)


def test_a_support_beyond_the_list_is_renormalized_to_the_list() -> None:
    # pi_b has 0.2 for tokens that are not listed: of the listed (0.6, 0.2) it keeps
    # (3/4, 1/4), and so does pi_theta of (0.1, 0.3).
    logp, behavior = restrict_to_support(log([0.1, 0.3]), log([0.6, 0.2]))
    assert_close(logp.exp(), [1 / 4, 3 / 4], 1e-12)
    assert_close(behavior.exp(), [3 / 4, 1 / 4], 1e-12)


def test_each_position_has_its_own_support() -> None:
    logp = LOGP.expand(2, 1, 4)
    behavior = torch.stack([LOG_BEHAVIOR, LOG_BEHAVIOR.flip(0)])[:, None]
    kl = kl_divergence(*restrict_to_support(logp, behavior))
    # On the last two (0.4, 0.2) is (2/3, 1/3), and pi_b (1/4, 3/4):
    # 2/3 log 8/3 + 1/3 log 4/9.
    right = 2 / 3 * math.log(8 / 3) + 1 / 3 * math.log(4 / 9)
    assert_close(kl, [[math.log(3) / 2], [right]], 1e-12)


def test_a_support_of_one_token_has_no_divergence() -> None:
    # As greedy sampling has it: both policies are sure of that token.
    logp = LOGP.clone().requires_grad_()
    kl = kl_divergence(*restrict_to_support(logp, log([1.0, 0, 0, 0])))
    assert kl == 0
    (gradient,) = torch.autograd.grad(kl, logp)
    assert not gradient.any()


# Heat


@pytest.mark.parametrize("temperature", [0.6, 1.2, 1.6])
def test_a_pull_to_ones_own_hotter_copy_is_a_push_to_more_entropy(
    temperature: float,
) -> None:
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
