"""What loss.py's kl_divergence has beyond test_loss.py: the floor of the bucket of all
tokens that are not listed, and the support of pi_b under top-p and top-k.

A loss file for `pytest tests/test_loss.py --loss FILE` needs neither.
"""

import math

import pytest
import torch
from loss_batches import F64, assert_close
from loss_oracle import divergence_gradient
from torch import Tensor

from loss import REST_FLOOR, kl_divergence, restrict_to_support

# The floor


def two_listed(rest: float) -> list[float]:
    """Two listed tokens, equally likely, with the probability `rest` for others."""
    return [(1 - rest) / 2, (1 - rest) / 2]


def tilted(rest: float) -> list[float]:
    """The same, one token three times as likely as the other."""
    return [(1 - rest) * 3 / 4, (1 - rest) / 4]


def log(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=F64).log()


def term(p: float, b: float) -> float:
    """What an outcome of probabilities p and b adds, as kl_divergence writes it."""
    return p * math.log(p / b) - p + b


def listed_terms(p_rest: float, b_rest: float) -> float:
    return sum(map(term, tilted(p_rest), two_listed(b_rest)))


def measured(p_rest: float, b_rest: float) -> float:
    return float(kl_divergence(log(tilted(p_rest)), log(two_listed(b_rest))))


def test_above_the_floor_the_rest_counts_as_what_it_is() -> None:
    p_rest = 1.1 * REST_FLOOR
    b_rest = 300 * REST_FLOOR
    right = listed_terms(p_rest, b_rest) + term(p_rest, b_rest)
    assert_close(measured(p_rest, b_rest), right, 1e-12)


@pytest.mark.parametrize("p_rest, b_rest", [(0.1, 0.9), (0.9, 0.1), (1e-7, 0.5)])
def test_two_rests_below_the_floor_add_nothing(p_rest: float, b_rest: float) -> None:
    p_rest *= REST_FLOOR
    b_rest *= REST_FLOOR
    assert_close(measured(p_rest, b_rest), listed_terms(p_rest, b_rest), 1e-12)


@pytest.mark.parametrize("small", [0.9, 0.1, 1e-4])
@pytest.mark.parametrize("large", [1.1, 10.0, 1e4])
@pytest.mark.parametrize("whose", ["pi_theta", "pi_b"])
def test_one_rest_below_the_floor_counts_as_the_floor(
    whose: str, large: float, small: float
) -> None:
    p_rest = (small if whose == "pi_theta" else large) * REST_FLOOR
    b_rest = (large if whose == "pi_theta" else small) * REST_FLOOR
    floored = term(max(p_rest, REST_FLOOR), max(b_rest, REST_FLOOR))
    found = measured(p_rest, b_rest)
    assert_close(found, listed_terms(p_rest, b_rest) + floored, 1e-12)
    # That lowers the result, and by no more than what the rest really adds.
    true_rest = term(p_rest, b_rest)
    lost = listed_terms(p_rest, b_rest) + true_rest - found
    assert 0 < lost <= true_rest


def test_the_result_has_no_jump_at_the_floor() -> None:
    below = REST_FLOOR * (1 - 1e-9)
    above = REST_FLOOR * (1 + 1e-9)
    for other in (0.1 * REST_FLOOR, 100 * REST_FLOOR):
        assert abs(measured(below, other) - measured(above, other)) < 1e-12
        assert abs(measured(other, below) - measured(other, above)) < 1e-12


def gradients(p_rest: float, b_rest: float) -> tuple[Tensor, Tensor]:
    """Of kl_divergence and of the oracle, to the logits of three tokens, two listed."""
    logits = log([*tilted(p_rest), p_rest]).requires_grad_()
    listed = logits.log_softmax(dim=0)[:2]
    kl = kl_divergence(listed, log(two_listed(b_rest)))
    (gradient,) = torch.autograd.grad(kl, logits)
    p = [*tilted(p_rest), p_rest]
    b = [*two_listed(b_rest), b_rest]
    right = divergence_gradient(p, b, listed=2)
    return gradient, torch.tensor(right, dtype=F64)


def test_above_the_floor_the_gradient_is_the_oracles() -> None:
    gradient, right = gradients(1.1 * REST_FLOOR, 300 * REST_FLOOR)
    assert_close(gradient, right, 1e-9)


@pytest.mark.parametrize("share", [0.9, 0.1, 1e-3])
def test_a_rest_of_pi_theta_below_the_floor_has_no_gradient(share: float) -> None:
    # What is missing is p log(p / b) times the score of the rest: to the logits of the
    # two listed tokens that is -p_1 and -p_2, and to that of the rest itself 1 - p.
    p_rest = share * REST_FLOOR
    b_rest = 100 * REST_FLOOR
    gradient, right = gradients(p_rest, b_rest)
    p_1, p_2 = tilted(p_rest)
    score = torch.tensor([-p_1, -p_2, 1 - p_rest], dtype=F64)
    missing = p_rest * math.log(p_rest / b_rest) * score
    assert_close(right - gradient, missing, 1e-6)
    largest = REST_FLOOR * abs(math.log(p_rest / b_rest)) * score.abs()
    assert ((right - gradient).abs() < largest).all()


def test_a_rest_of_pi_b_below_the_floor_pulls_as_if_it_were_the_floor() -> None:
    # p log(p / b) times the score of the rest becomes p log(p / REST_FLOOR) times it.
    p_rest = 100 * REST_FLOOR
    b_rest = 0.1 * REST_FLOOR
    gradient, right = gradients(p_rest, b_rest)
    p_1, p_2 = tilted(p_rest)
    score = torch.tensor([-p_1, -p_2, 1 - p_rest], dtype=F64)
    assert_close(right - gradient, p_rest * math.log(10) * score, 1e-6)


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


# The support of pi_b

# pi_b samples from the first two of four tokens, as top-k = 2 has it.
LOG_BEHAVIOR = log([3 / 4, 1 / 4, 0, 0])


def test_restricted_pi_theta_is_renormalized_to_the_support_by_hand() -> None:
    # (0.1, 0.3, 0.4, 0.2) becomes (1/4, 3/4) on the first two tokens.
    logp, behavior = restrict_to_support(log([0.1, 0.3, 0.4, 0.2]), LOG_BEHAVIOR)
    assert_close(logp.exp(), [1 / 4, 3 / 4, 0, 0], 1e-12)
    assert_close(behavior.exp(), [3 / 4, 1 / 4, 0, 0], 1e-12)


def test_the_divergence_on_the_support_is_finite_by_hand() -> None:
    # Without restriction it is infinite. KL((1/4, 3/4) || (3/4, 1/4)) is
    # 1/4 log 1/3 + 3/4 log 3 = 1/2 log 3.
    logp = log([0.1, 0.3, 0.4, 0.2])
    assert kl_divergence(logp, LOG_BEHAVIOR) == math.inf
    kl = kl_divergence(*restrict_to_support(logp, LOG_BEHAVIOR))
    assert_close(kl, math.log(3) / 2, 1e-12)


def test_the_gradient_on_the_support_is_that_of_the_renormalized_policy() -> None:
    # p = (1/4, 3/4): p_v (log(p_v / b_v) - KL) with the logarithms -log 3 and log 3 and
    # the KL 1/2 log 3 is -3/8 log 3 and 3/8 log 3. Tokens outside are not moved.
    logits = log([0.1, 0.3, 0.4, 0.2]).requires_grad_()
    logp = logits.log_softmax(dim=0)
    kl = kl_divergence(*restrict_to_support(logp, LOG_BEHAVIOR))
    (gradient,) = torch.autograd.grad(kl, logits)
    share = 3 / 8 * math.log(3)
    assert_close(gradient, [-share, share, 0, 0], 1e-12)


def test_a_full_support_changes_no_distribution() -> None:
    logp = log([0.1, 0.3, 0.4, 0.2])
    behavior = log([0.4, 0.3, 0.2, 0.1])
    same_logp, same_behavior = restrict_to_support(logp, behavior)
    assert_close(same_logp, logp, 1e-12)
    assert_close(same_behavior, behavior, 1e-12)


def test_a_support_beyond_the_list_is_renormalized_to_the_list() -> None:
    # pi_b has 0.2 for tokens that are not listed: of the listed (0.6, 0.2) it keeps
    # (3/4, 1/4), and so does pi_theta of (0.1, 0.3).
    logp, behavior = restrict_to_support(log([0.1, 0.3]), log([0.6, 0.2]))
    assert_close(logp.exp(), [1 / 4, 3 / 4], 1e-12)
    assert_close(behavior.exp(), [3 / 4, 1 / 4], 1e-12)


def test_each_position_has_its_own_support() -> None:
    logp = log([0.1, 0.3, 0.4, 0.2]).expand(2, 1, 4)
    behavior = torch.stack([LOG_BEHAVIOR, LOG_BEHAVIOR.flip(0)])[:, None]
    kl = kl_divergence(*restrict_to_support(logp, behavior))
    # On the last two (0.4, 0.2) is (2/3, 1/3), and pi_b (1/4, 3/4):
    # 2/3 log 8/3 + 1/3 log 4/9.
    right = 2 / 3 * math.log(8 / 3) + 1 / 3 * math.log(4 / 9)
    assert_close(kl, [[math.log(3) / 2], [right]], 1e-12)


def test_a_support_of_one_token_has_no_divergence() -> None:
    # As greedy sampling has it: both policies are sure of that token.
    logp = log([0.1, 0.3, 0.4, 0.2]).requires_grad_()
    kl = kl_divergence(*restrict_to_support(logp, log([1.0, 0, 0, 0])))
    assert kl == 0
    (gradient,) = torch.autograd.grad(kl, logp)
    assert not gradient.any()
