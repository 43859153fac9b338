"""The loss of P3O: against numbers by hand, an oracle in plain Python (loss_oracle.py),
the identities of the method, other splits of the batch, extreme inputs.

    pytest tests/test_loss.py --loss path/to/another_loss.py

runs it on another file. That needs four functions with the signatures of loss.py and
nothing else: group_advantage, effective_sample_size, kl_divergence, p3o_loss. In the
tests `loss` is the module under test. Equation numbers are those of arXiv 2605.12380.
test_wrong_losses.py has losses with one mistake each, which the tests have to reject.
"""

import math
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import (
    F64,
    TOLERANCE,
    Outcome,
    Responses,
    assert_close,
    assert_same_outcome,
    expected,
    make_responses,
    one_token_each,
    run,
    two_fresh_responses,
)
from loss_on_ranks import SIZES, batches, run_ranks
from loss_oracle import divergence, divergence_gradient, effective_sample_size
from torch import Tensor

torch.set_num_threads(1)
LOG2 = math.log(2)
BOTH_DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))
BOTH_ESTIMATORS = pytest.mark.parametrize("estimator", ["is", "k3"])


def examples(count: int) -> settings:
    """So many examples a test, and one failure, whatever hypothesis finds."""
    return settings(max_examples=count, deadline=None, report_multiple_bugs=False)


def names_response(row: int) -> str:
    """A pattern: the number of this response, and not a digit of another number."""
    return rf"(?<![\d.]){row}(?!\.?\d)"


# (3) The group advantage


def test_group_advantage_by_hand(loss: ModuleType) -> None:
    # 1, 0, 0, 1 has the mean 1/2 and four squares of 1/4 each. Over n - 1 = 3 the
    # deviation is sqrt(1/3) = 0.577; the population's would be 0.5.
    reward = torch.tensor([[1, 0, 0, 1], [2, 2, 2, 2]], dtype=F64)
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert_close(loss.group_advantage(reward), [[a, -a, -a, a], [0, 0, 0, 0]], 1e-9)


def test_group_advantage_without_scale_is_the_distance_from_the_mean(
    loss: ModuleType,
) -> None:
    # 1, 0, 0, 0 has the mean 1/4.
    reward = torch.tensor([[1.0, 0, 0, 0]])
    advantage = loss.group_advantage(reward, scale=False)
    assert_close(advantage, [[0.75, -0.25, -0.25, -0.25]])


@examples(30)
@given(reward=st.floats(-10, 10), size=st.integers(2, 9))
def test_a_group_of_equal_rewards_has_advantage_zero(
    loss: ModuleType, reward: float, size: int
) -> None:
    for dtype in TOLERANCE:
        equal = torch.full((2, size), reward, dtype=dtype)
        assert not loss.group_advantage(equal).any()


def test_a_group_of_one_is_refused(loss: ModuleType) -> None:
    with pytest.raises(ValueError):
        loss.group_advantage(torch.ones(4, 1))


# (11) The effective sample size


def e_b(loss: ModuleType, log_ratios: list[float]) -> float:
    """e_B of a batch of one response with these log rho."""
    log_ratio = torch.tensor([log_ratios], dtype=F64)
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool)
    return float(loss.effective_sample_size(log_ratio, mask))


def log_ratios(largest: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(-largest, largest), min_size=1, max_size=12)


def test_e_b_by_hand(loss: ModuleType) -> None:
    # rho = 1 and 3: (4/2)^2 / (10/2) = 0.8. With the padding as tokens of rho = 1 it
    # would be (6/4)^2 / (12/4) = 0.75.
    log_ratio = torch.tensor([[0.0, math.log(3), math.nan, math.inf]], dtype=F64)
    mask = torch.tensor([[True, True, False, False]])
    ess = loss.effective_sample_size(log_ratio, mask)
    assert ess.dtype == F64
    assert_close(ess, 0.8, 1e-9)
    padded_with_ones = torch.tensor([[0.0, math.log(3), 0.0, 0.0]], dtype=F64)
    assert_close(loss.effective_sample_size(padded_with_ones, mask), 0.8, 1e-9)


def test_e_b_carries_no_gradient(loss: ModuleType) -> None:
    log_ratio = torch.tensor([[0.0, math.log(3)]], dtype=F64, requires_grad=True)
    ess = loss.effective_sample_size(log_ratio, torch.tensor([[True, True]]))
    assert not ess.requires_grad


@examples(50)
@given(x=log_ratios(3.0))
def test_e_b_is_one_over_one_plus_squared_variation(
    loss: ModuleType, x: list[float]
) -> None:
    ratio = [math.exp(value) for value in x]
    mean = math.fsum(ratio) / len(ratio)
    variance = math.fsum((r - mean) ** 2 for r in ratio) / len(ratio)
    assert_close(e_b(loss, x), 1 / (1 + variance / mean**2), 1e-9)


@examples(50)
@given(x=log_ratios(20.0), factor=st.floats(-30, 30))
def test_e_b_does_not_see_a_common_factor(
    loss: ModuleType, x: list[float], factor: float
) -> None:
    moved = [value + factor for value in x]
    assert_close(e_b(loss, moved), e_b(loss, x), 1e-9)


@examples(100)
@given(x=log_ratios(80.0))
def test_e_b_is_between_one_over_the_token_count_and_one(
    loss: ModuleType, x: list[float]
) -> None:
    assert 1 / len(x) * (1 - 1e-12) <= e_b(loss, x) <= 1


@examples(50)
@given(x=st.floats(-80, 80), tokens=st.integers(1, 1000))
def test_e_b_of_equal_ratios_is_exactly_one(
    loss: ModuleType, x: float, tokens: int
) -> None:
    assert e_b(loss, [x] * tokens) == 1


@examples(30)
@given(tokens=st.integers(2, 1000))
def test_e_b_of_one_dominant_token_is_one_over_the_token_count(
    loss: ModuleType, tokens: int
) -> None:
    assert_close(e_b(loss, [80.0] + [0.0] * (tokens - 1)), 1 / tokens, 1e-9)


@BOTH_DTYPES
def test_e_b_at_80_nats(loss: ModuleType, dtype: torch.dtype) -> None:
    log_ratio = torch.tensor([[80, 0, 0, 0], [-80, 0, 0, 0]], dtype=dtype)
    mask = torch.ones(2, 4, dtype=torch.bool)
    ess = loss.effective_sample_size
    # One of eight tokens dominates, whichever direction is up.
    assert_close(ess(log_ratio, mask), 1 / 8, 1e-9)
    assert_close(ess(-log_ratio, mask), 1 / 8, 1e-9)
    # Three of four tokens are alike, and the fourth adds nothing.
    assert_close(ess(log_ratio[1:], mask[1:]), 3 / 4, 1e-9)
    # The square of e^45 is more than float32 has. In the authors' code e_B is 1 from
    # there on.
    assert_close(ess(log_ratio * 45 / 80, mask), 1 / 8, 1e-9)


# pi_b = (1, 2, 3, 4) / 10, and a batch of ten tokens in just these shares: a mean over
# the batch is an expectation under pi_b.
SHARES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64)
IN_SHARES = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
TILTS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)


@examples(30)
@given(tilt=TILTS)
def test_e_b_estimates_one_over_one_plus_chi_squared(
    loss: ModuleType, tilt: list[float]
) -> None:
    policy = (SHARES.log() + torch.tensor(tilt, dtype=F64)).softmax(dim=0)
    chi_squared = float((policy**2 / SHARES).sum() - 1)
    renyi_2 = math.log1p(chi_squared)
    ess = e_b(loss, (policy / SHARES).log()[IN_SHARES].tolist())
    assert_close(ess, 1 / (1 + chi_squared), 1e-9)
    assert_close(ess, math.exp(-renyi_2), 1e-9)


@examples(30)
@given(tilt=TILTS)
def test_minus_log_e_b_bounds_the_divergence_that_it_weighs(
    loss: ModuleType, tilt: list[float]
) -> None:
    # KL <= log(1 + chi^2), by Jensen's inequality.
    policy = (SHARES.log() + torch.tensor(tilt, dtype=F64)).softmax(dim=0)
    kl = loss.kl_divergence(policy.log(), SHARES.log())
    ess = e_b(loss, (policy / SHARES).log()[IN_SHARES].tolist())
    assert kl <= -math.log(ess) + 1e-12


# The divergence of (12)


def policies(seed: int, vocabulary: int = 12) -> tuple[Tensor, Tensor]:
    """Logits of pi_theta, and log pi_b with its tokens from the likeliest down: [V]."""
    generator = torch.Generator().manual_seed(seed)
    behavior_logits = torch.randn(vocabulary, generator=generator, dtype=F64)
    behavior = behavior_logits.sort(descending=True).values.log_softmax(dim=0)
    logits = behavior + torch.randn(vocabulary, generator=generator, dtype=F64)
    return logits.requires_grad_(), behavior


def divergence_of(
    loss: ModuleType, logits: Tensor, behavior: Tensor, listed: int
) -> tuple[float, Tensor]:
    """kl_divergence over the first `listed` tokens, and its gradient to the logits."""
    logp = logits.log_softmax(dim=-1)
    kl = loss.kl_divergence(logp[..., :listed], behavior[..., :listed])
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    return kl.detach(), gradient


def test_divergence_by_hand(loss: ModuleType) -> None:
    # pi_theta = (1/2, 1/4, 1/4), pi_b = (1/4, 1/4, 1/2). The whole vocabulary:
    #     1/2 log 2 + 1/4 log 1 + 1/4 log 1/2 = 1/4 log 2 = 0.173
    # The first token, and a bucket of probability 1/2 and 3/4:
    #     1/2 log 2 + 1/2 log 2/3 = 1/2 log 4/3 = 0.144
    logits = torch.tensor([2.0, 1, 1], dtype=F64).log().requires_grad_()
    behavior = torch.tensor([1 / 4, 1 / 4, 1 / 2], dtype=F64).log()
    whole, gradient = divergence_of(loss, logits, behavior, listed=3)
    bucket, bucket_gradient = divergence_of(loss, logits, behavior, listed=1)
    assert_close(whole, LOG2 / 4)
    assert_close(bucket, math.log(4 / 3) / 2)
    # To the logits it is p_v (log(p_v / b_v) - KL). The whole vocabulary:
    #     1/2 (log 2 - 1/4 log 2), 1/4 (0 - 1/4 log 2), 1/4 (-log 2 - 1/4 log 2)
    assert_close(gradient, [3 / 8 * LOG2, -LOG2 / 16, -5 / 16 * LOG2])
    # With the bucket both of its tokens have its ratio, 2/3:
    #     1/2 (log 2 - 1/2 log 4/3) = 1/4 log 3, and half of that from each
    log3 = math.log(3)
    assert_close(bucket_gradient, [log3 / 4, -log3 / 8, -log3 / 8])


@pytest.mark.parametrize("listed", [1, 2, 5, 11, 12])
def test_divergence_and_its_gradient_equal_the_oracle(
    loss: ModuleType, listed: int
) -> None:
    for seed in range(10):
        logits, behavior = policies(seed)
        kl, gradient = divergence_of(loss, logits, behavior, listed)
        p = logits.softmax(dim=0).tolist()
        b = behavior.exp().tolist()
        assert_close(kl, divergence(p, b, listed), 1e-9)
        assert_close(gradient, divergence_gradient(p, b, listed), 1e-9)


@examples(30)
@given(seed=st.integers(0, 10**6))
def test_divergence_grows_with_the_list_up_to_the_sum_over_the_vocabulary(
    loss: ModuleType, seed: int
) -> None:
    logits, behavior = policies(seed)
    policy = logits.detach().log_softmax(dim=0)
    bounds = [
        float(loss.kl_divergence(policy[:listed], behavior[:listed]))
        for listed in range(1, 13)
    ]
    for fewer, more in zip(bounds, bounds[1:], strict=False):
        assert fewer <= more + 1e-12
    assert bounds[0] < bounds[-1] - 1e-6
    full_sum = divergence(policy.exp().tolist(), behavior.exp().tolist(), listed=12)
    assert_close(bounds[-1], full_sum, 1e-9)


def test_divergence_is_from_pi_theta_to_pi_b(loss: ModuleType) -> None:
    # KL((1/2, 1/2) || (3/4, 1/4)) = 1/2 log 2/3 + 1/2 log 2 = 1/2 log 4/3 = 0.144
    # KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 log 3/2 + 1/4 log 1/2        = 0.131
    half = torch.tensor([1 / 2, 1 / 2], dtype=F64).log()
    uneven = torch.tensor([3 / 4, 1 / 4], dtype=F64).log()
    one_way = math.log(4 / 3) / 2
    other_way = 3 / 4 * math.log(3 / 2) - LOG2 / 4
    assert_close(loss.kl_divergence(half, uneven), one_way)
    assert_close(loss.kl_divergence(uneven, half), other_way)


@BOTH_DTYPES
@pytest.mark.parametrize("listed", [1, 6, 12])
def test_divergence_of_equal_policies_is_exactly_zero(
    loss: ModuleType, listed: int, dtype: torch.dtype
) -> None:
    for seed in range(10):
        _, behavior = policies(seed)
        behavior = behavior[:listed].to(dtype)
        assert loss.kl_divergence(behavior, behavior) == 0


def test_divergence_keeps_all_dimensions_but_the_last(loss: ModuleType) -> None:
    pairs = [policies(seed) for seed in range(6)]
    logp = torch.stack([logits.detach().log_softmax(dim=0) for logits, _ in pairs])
    behavior = torch.stack([behavior for _, behavior in pairs])
    kl = loss.kl_divergence(
        logp.view(2, 3, 12)[..., :5], behavior.view(2, 3, 12)[..., :5]
    )
    one_by_one = [
        float(loss.kl_divergence(logp[i, :5], behavior[i, :5])) for i in range(6)
    ]
    assert_close(kl, torch.tensor(one_by_one).view(2, 3))


def test_divergence_of_float32_is_that_of_its_digits(loss: ModuleType) -> None:
    for seed in range(20):
        logits, behavior = policies(seed)
        rounded = logits.detach().float().requires_grad_()
        kl, gradient = divergence_of(loss, rounded, behavior.float(), listed=5)
        p = logits.softmax(dim=0).tolist()
        b = behavior.exp().tolist()
        assert_close(kl, divergence(p, b, listed=5), 1e-5)
        assert_close(gradient, divergence_gradient(p, b, listed=5), 1e-5)


def test_divergence_of_float32_where_nearly_all_is_listed(loss: ModuleType) -> None:
    # Where all tokens are listed nothing is left for the others but rounding, 1e-7,
    # which is as often negative as not.
    for seed in range(20):
        logits, behavior = policies(seed)
        rounded = logits.detach().float().requires_grad_()
        kl, gradient = divergence_of(loss, rounded, behavior.float(), listed=12)
        p = logits.softmax(dim=0).tolist()
        b = behavior.exp().tolist()
        assert_close(kl, divergence(p, b, listed=12), 1e-5)
        assert_close(gradient, divergence_gradient(p, b, listed=12), 1e-4)


def test_divergence_does_not_move_pi_b(loss: ModuleType) -> None:
    logits, behavior = policies(0)
    behavior.requires_grad_()
    kl = loss.kl_divergence(logits.log_softmax(dim=0)[:5], behavior[:5])
    (gradient,) = torch.autograd.grad(kl, behavior, allow_unused=True)
    assert gradient is None or not gradient.any()


def test_a_token_that_neither_policy_samples_adds_nothing(loss: ModuleType) -> None:
    # The second of three tokens is impossible: 1/2 log 2 + 1/2 log 2/3 = 1/2 log 4/3.
    logp = torch.tensor([1 / 2, 0, 1 / 2], dtype=F64).log().requires_grad_()
    behavior = torch.tensor([1 / 4, 0, 3 / 4], dtype=F64).log()
    kl = loss.kl_divergence(logp, behavior)
    assert_close(kl.detach(), math.log(4 / 3) / 2)
    (gradient,) = torch.autograd.grad(kl, logp)
    assert torch.isfinite(gradient).all()
    assert gradient[1] == 0


def test_a_token_that_pi_theta_never_samples_costs_nothing_itself(
    loss: ModuleType,
) -> None:
    # KL((1, 0) || (1/4, 3/4)) = log 4: the term of the second token is 0 log 0 = 0.
    logp = torch.tensor([1.0, 0], dtype=F64).log().requires_grad_()
    behavior = torch.tensor([1 / 4, 3 / 4], dtype=F64).log()
    kl = loss.kl_divergence(logp, behavior)
    assert_close(kl.detach(), math.log(4))
    (gradient,) = torch.autograd.grad(kl, logp)
    assert torch.isfinite(gradient).all()


def test_a_token_that_only_pi_theta_samples_costs_infinitely_much(
    loss: ModuleType,
) -> None:
    logp = torch.tensor([1 / 2, 1 / 2], dtype=F64).log()
    behavior = torch.tensor([1.0, 0], dtype=F64).log()
    assert loss.kl_divergence(logp, behavior) == math.inf


# (12) The objective: values and gradients


@BOTH_DTYPES
def test_loss_equals_the_oracle(loss: ModuleType, dtype: torch.dtype) -> None:
    for seed, spread in enumerate((0.02, 0.3, 0.6, 1.5)):  # from nearly fresh to stale
        responses = make_responses(seed, spread=spread, dtype=dtype)
        outcome = run(loss.p3o_loss, responses)
        assert_same_outcome(outcome, expected("p3o", responses), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "keywords",
    [
        {"kl_estimator": "is"},
        {"kl_estimator": "k3"},
        {"ess": 0.3},
        {"ess": 0.3, "kl_estimator": "k3"},
        {"ess": 1.0},
    ],
)
def test_keywords_equal_the_oracle(loss: ModuleType, keywords: dict[str, Any]) -> None:
    responses = make_responses(5)
    outcome = run(loss.p3o_loss, responses, **keywords)
    assert_same_outcome(outcome, expected("p3o", responses, **keywords))


def test_left_out_the_kl_is_estimated_by_is(loss: ModuleType) -> None:
    responses = make_responses(5)
    by_default = run(loss.p3o_loss, responses)
    by_name = run(loss.p3o_loss, responses, kl_estimator="is")
    assert_same_outcome(by_default, by_name, 0.0)


def test_an_advantage_per_token_is_taken_as_it_is(loss: ModuleType) -> None:
    responses = make_responses(6)
    advantage = torch.linspace(-2, 2, 56, dtype=F64).view(8, 7)
    advantage = advantage.masked_fill(~responses.mask, math.nan)
    responses = responses._replace(advantage=advantage)
    assert_same_outcome(run(loss.p3o_loss, responses), expected("p3o", responses))


def test_every_token_has_its_responses_advantage(loss: ModuleType) -> None:
    responses = make_responses(7)
    spread_out = responses.advantage[:, None].expand(responses.mask.shape)
    one_each = run(loss.p3o_loss, responses)
    one_a_token = run(loss.p3o_loss, responses._replace(advantage=spread_out))
    assert_same_outcome(one_each, one_a_token, 1e-12)


def test_every_token_has_its_responses_advantage_by_hand(loss: ModuleType) -> None:
    # Two fresh responses of 1 and 3 tokens, A = 3 and -2: the gradient is -A / 4 on
    # every token.
    gradient = run(loss.p3o_loss, two_fresh_responses([3.0, -2.0])).gradient
    assert_close(gradient, [[-0.75, 0, 0], [0.5, 0.5, 0.5]])


@pytest.mark.parametrize(
    "keywords, positive, negative",
    [
        # min(rho, e_B) A - (1 - e_B) rho log rho, for A = 1 and A = -1
        ({"ess": 0.5}, 0.5 - 5 * math.log(10), -0.5 - 5 * math.log(10)),
        # min(rho, e_B) A - (1 - e_B) (1 - 1/rho)
        ({"ess": 0.5, "kl_estimator": "k3"}, 0.5 - 0.45, -0.5 - 0.45),
        # On a batch that is fresh otherwise the cap is 1, and the KL does not count.
        ({"ess": 1.0}, 1.0, -1.0),
    ],
)
def test_a_high_ratio_token_weighs_what_the_table_says(
    loss: ModuleType, keywords: dict[str, Any], positive: float, negative: float
) -> None:
    # The weight on grad log pi_theta of a token with rho = 10.
    for advantage, weight in ((1.0, positive), (-1.0, negative)):
        responses = one_token_each([10.0], advantage)
        gradient = run(loss.p3o_loss, responses, **keywords).gradient
        assert_close(-gradient, [[weight]])


def test_gradient_is_a_sum_of_weighted_scores(loss: ModuleType) -> None:
    # rho = 1/2, 1, 2, 4: e_B = (7.5/4)^2 / (21.25/4) = 225/340. A = 2. Each of the four
    # tokens has a quarter of the weight min(rho, e_B) A - (1 - e_B) rho log rho.
    responses = one_token_each([0.5, 1.0, 2.0, 4.0], advantage=2.0)
    e = 225 / 340
    weights = [
        [2 * 0.5 + (1 - e) * 0.5 * LOG2],  # log 1/2 = -log 2
        [2 * e],
        [2 * e - (1 - e) * 2 * LOG2],
        [2 * e - (1 - e) * 8 * LOG2],
    ]
    assert_close(-4 * run(loss.p3o_loss, responses).gradient, weights)
    # By k3 it is min(rho, e_B) A - (1 - e_B) (1 - 1/rho).
    weights = [
        [2 * 0.5 + (1 - e)],
        [2 * e],
        [2 * e - (1 - e) / 2],
        [2 * e - (1 - e) * 3 / 4],
    ]
    gradient = run(loss.p3o_loss, responses, kl_estimator="k3").gradient
    assert_close(-4 * gradient, weights)


def test_every_token_counts_the_same(loss: ModuleType) -> None:
    # Fresh responses of 1 and 3 tokens of log-probability -1, A = 1 and 0: one token of
    # four has the loss 1. A mean of the responses' means would be 1/2.
    assert_close(run(loss.p3o_loss, two_fresh_responses([1.0, 0.0])).value, 0.25)


def test_kl_pulls_back_to_the_behavior_policy(loss: ModuleType) -> None:
    # A = 0, e_B = 0.25, rho = 2. "is": the KL counts as rho log rho - rho + 1, with the
    # derivative rho log rho: above 0, so that descent makes the token rarer.
    responses = one_token_each([2.0], advantage=0.0)
    value, gradient, stats = run(loss.p3o_loss, responses, ess=0.25)
    assert_close(value, 0.75 * (2 * LOG2 - 1))
    assert_close(gradient, [[0.75 * 2 * LOG2]])
    assert_close(stats["kl_loss"], 2 * LOG2 - 1)
    # "k3": log rho + 1/rho - 1, with the derivative 1 - 1/rho.
    value, gradient, stats = run(loss.p3o_loss, responses, ess=0.25, kl_estimator="k3")
    assert_close(value, 0.75 * (LOG2 - 0.5))
    assert_close(gradient, [[0.75 * 0.5]])
    assert_close(stats["kl_loss"], LOG2 - 0.5)


@pytest.mark.parametrize("x", [-12.0, 12.0])
def test_estimated_kl_is_not_clamped(loss: ModuleType, x: float) -> None:
    # A = 0, e_B = 0. log rho = -12: by k3 the weight is e^12 - 1, back up with all its
    # might, and by "is" 12 e^-12. log rho = 12: 1 - e^-12, and 12 e^12.
    responses = one_token_each([math.exp(x)], advantage=0.0)
    value, gradient, _ = run(loss.p3o_loss, responses, ess=0.0, kl_estimator="k3")
    assert_close(value, x + math.exp(-x) - 1)
    assert_close(gradient, [[1 - math.exp(-x)]])
    value, gradient, _ = run(loss.p3o_loss, responses, ess=0.0, kl_estimator="is")
    assert_close(value, math.exp(x) * x - math.exp(x) + 1)
    assert_close(gradient, [[math.exp(x) * x]])


@examples(30)
@given(tilt=TILTS)
def test_is_gives_the_kl_and_its_gradient_and_k3_gives_neither(
    loss: ModuleType, tilt: list[float]
) -> None:
    logits = (SHARES.log() + torch.tensor(tilt, dtype=F64)).requires_grad_()
    policy = logits.softmax(dim=0)
    kl = (policy * (policy / SHARES).log()).sum()
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    tokens = [
        logits.log_softmax(dim=0)[IN_SHARES][:, None],
        SHARES.log()[IN_SHARES][:, None],
        torch.zeros(10, dtype=F64),
        torch.ones(10, 1, dtype=torch.bool),
    ]
    # e_B = 0 and A = 0 leave the KL alone.
    value, _ = loss.p3o_loss(*tokens, ess=0.0, kl_estimator="is")
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    assert abs(value - kl) < 1e-9
    assert (gradient - kl_gradient).abs().max() < 1e-9
    # The mean of k3 is chi^2(pi_b || pi_theta) - KL(pi_b || pi_theta).
    value, _ = loss.p3o_loss(*tokens, ess=0.0, kl_estimator="k3")
    chi_squared = (SHARES**2 / policy).sum() - 1
    reversed_kl = (SHARES * (SHARES / policy).log()).sum()
    assert abs(value - (chi_squared - reversed_kl)) < 1e-9


# (12) with the KL at each position


def kl_of_positions(responses: Responses) -> Tensor:
    """Some KL [N, T] that has nothing to do with the ratios; NaN in the padding."""
    kl = torch.linspace(0.1, 0.9, responses.mask.numel(), dtype=F64)
    kl = kl.view(responses.mask.shape)
    return kl.masked_fill(~responses.mask, math.nan)


def test_a_given_kl_takes_the_place_of_the_estimate(loss: ModuleType) -> None:
    for seed, spread in enumerate((0.02, 0.6, 1.5)):
        responses = make_responses(seed, spread=spread)
        kl = kl_of_positions(responses)
        outcome = run(loss.p3o_loss, responses, kl=kl)
        right = expected("p3o", responses, kl=kl.tolist())
        assert_same_outcome(outcome, right)
        ignored = run(loss.p3o_loss, responses, kl=kl, kl_estimator="k3")
        assert_same_outcome(ignored, right)


def test_a_given_kl_has_the_weight_one_less_e_b_by_hand(loss: ModuleType) -> None:
    # rho = 1 and 3: e_B = 0.8. A = 0 and KL = 1/2, 1/4: (1 - 0.8) (1/2 + 1/4) / 2.
    responses = one_token_each([1.0, 3.0], advantage=0.0)
    kl = torch.tensor([[1 / 2], [1 / 4]], dtype=F64)
    value, gradient, stats = run(loss.p3o_loss, responses, kl=kl)
    assert_close(value, 0.2 * 3 / 8)
    assert_close(gradient, [[0.0], [0.0]])
    assert_close(stats["kl_loss"], 3 / 8)


def test_the_gradient_of_a_given_kl_flows(loss: ModuleType) -> None:
    # Each of |B| tokens has (1 - e_B) / |B| of it, and padding has nothing.
    responses = make_responses(6)
    kl = kl_of_positions(responses).requires_grad_()
    value, _ = loss.p3o_loss(
        responses.logp,
        responses.logp_behavior,
        responses.advantage,
        responses.mask,
        kl=kl,
        ess=0.3,
    )
    (gradient,) = torch.autograd.grad(value, kl)
    share = 0.7 / responses.mask.sum()
    assert_close(gradient, torch.where(responses.mask, share, 0.0))


def test_policy_and_kl_share_one_gradient_by_hand(loss: ModuleType) -> None:
    # The policies of test_divergence_by_hand, one token sampled, the first: rho = 2.
    # A = 1, e_B = 0.25. To the logits the score is (1/2, -1/4, -1/4), and the KL has
    # log 2 times (3/8, -1/16, -5/16).
    logits = torch.tensor([2.0, 1, 1], dtype=F64).log().requires_grad_()
    logp = logits.log_softmax(dim=0)  # [V]
    behavior = torch.tensor([1 / 4, 1 / 4, 1 / 2], dtype=F64).log()
    value, _ = loss.p3o_loss(
        logp[None, :1],
        behavior[None, :1],
        torch.ones(1, dtype=F64),
        torch.tensor([[True]]),
        kl=loss.kl_divergence(logp[None, None], behavior[None, None]),
        ess=0.25,
    )
    assert_close(value.detach(), 0.25 * LOG2 + 0.75 * LOG2 / 4)
    (gradient,) = torch.autograd.grad(value, logits)
    score = torch.tensor([1 / 2, -1 / 4, -1 / 4], dtype=F64)
    kl_gradient = LOG2 * torch.tensor([3 / 8, -1 / 16, -5 / 16], dtype=F64)
    assert_close(gradient, -0.25 * score + 0.75 * kl_gradient)


def test_an_infinite_kl_stops_with_its_response(loss: ModuleType) -> None:
    responses = make_responses(15)
    kl = kl_of_positions(responses)
    kl[5, 0] = math.inf
    with pytest.raises((FloatingPointError, ValueError), match=names_response(5)):
        run(loss.p3o_loss, responses, kl=kl)


# What is a constant in the gradient, and what belongs to the whole batch


def test_advantage_is_a_constant(loss: ModuleType) -> None:
    responses = make_responses(8)
    advantage = responses.advantage.requires_grad_()
    logp = responses.logp.clone().requires_grad_()
    value, _ = loss.p3o_loss(logp, responses.logp_behavior, advantage, responses.mask)
    (gradient,) = torch.autograd.grad(value, advantage, allow_unused=True)
    assert gradient is None or not gradient.any()


@BOTH_ESTIMATORS
def test_e_b_is_a_constant_in_the_gradient(loss: ModuleType, estimator: str) -> None:
    responses = make_responses(9, spread=1.0)
    ess = effective_sample_size(responses.log_ratio[responses.mask].tolist())
    assert 0.05 < ess < 0.9  # There is something to lose.
    own = run(loss.p3o_loss, responses, kl_estimator=estimator)
    for same_ess in (ess, torch.tensor(ess, dtype=F64)):
        outcome = run(loss.p3o_loss, responses, kl_estimator=estimator, ess=same_ess)
        assert_same_outcome(own, outcome, 1e-9)


def test_a_given_e_b_is_used(loss: ModuleType) -> None:
    # rho = 10, A = 1, e_B of the batch 0.2: min(rho, e_B) - (1 - e_B) rho log rho. Its
    # own e_B would be 1.
    gradient = run(loss.p3o_loss, one_token_each([10.0]), ess=0.2).gradient
    assert_close(-gradient, [[0.2 - 0.8 * 10 * math.log(10)]])


def whole_batch(loss: ModuleType, responses: Responses) -> dict[str, Any]:
    """The keywords of p3o_loss that only the whole batch can tell."""
    return {
        "ess": loss.effective_sample_size(responses.log_ratio, responses.mask),
        "token_count": int(responses.mask.sum()),
    }


def test_twice_the_tokens_in_the_batch_is_half_the_weight(loss: ModuleType) -> None:
    responses = make_responses(10)
    quantities = whole_batch(loss, responses)
    once = run(loss.p3o_loss, responses, **quantities)
    quantities["token_count"] *= 2
    twice = run(loss.p3o_loss, responses, **quantities)
    assert_close(2 * twice.value, once.value)
    assert_close(2 * twice.gradient, once.gradient)
    for name, stat in once.stats.items():
        assert_close(2 * twice.stats[name], stat)


# What the loss says of itself


@pytest.mark.parametrize("given_kl", [False, True], ids=["estimated", "given"])
def test_loss_is_policy_loss_and_one_less_e_b_times_kl_loss(
    loss: ModuleType, given_kl: bool
) -> None:
    responses = make_responses(4)
    kl = kl_of_positions(responses) if given_kl else None
    value, _, stats = run(loss.p3o_loss, responses, kl=kl, ess=0.3)
    assert_close(stats["loss"], value, 1e-12)
    assert_close(stats["policy_loss"] + 0.7 * stats["kl_loss"], value, 1e-12)
    # At e_B = 0.3: the mean of -min(rho, 0.3) A log pi_theta, and the mean of the KL.
    ratio = responses.log_ratio.exp()
    policy_loss = -ratio.clamp(max=0.3) * responses.advantage[:, None] * responses.logp
    assert_close(stats["policy_loss"], policy_loss[responses.mask].mean())
    if kl is None:
        kl = ratio * ratio.log() - ratio + 1
    assert_close(stats["kl_loss"], kl[responses.mask].mean())


def test_statistics_are_numbers_without_gradient(loss: ModuleType) -> None:
    _, _, stats = run(loss.p3o_loss, make_responses(4))
    assert {"loss", "policy_loss", "kl_loss", "capped"} <= set(stats)
    for stat in stats.values():
        assert torch.as_tensor(stat).shape == ()
        assert not torch.as_tensor(stat).requires_grad


def test_capped_counts_the_tokens_above_e_b(loss: ModuleType) -> None:
    # All but the first of eight are above 0.5.
    responses = one_token_each([0.1, 0.9, 1.1, 1.25, 1.5, 3.0, 9.0, 1.0])
    assert float(run(loss.p3o_loss, responses, ess=0.5).stats["capped"]) == 7 / 8
    # At rho = e_B = 1 nothing is cut.
    assert float(run(loss.p3o_loss, one_token_each([1.0])).stats["capped"]) == 0


@examples(30)
@given(seed=st.integers(0, 10**6))
def test_on_policy_it_is_reinforce(loss: ModuleType, seed: int) -> None:
    # rho = 1: -A log pi_theta, with the gradient -A / |B|, and no KL.
    responses = make_responses(seed)
    fresh = responses._replace(logp=responses.logp_behavior)
    value, gradient, _ = run(loss.p3o_loss, fresh)
    advantage = fresh.advantage[:, None].expand(fresh.mask.shape)
    assert_close(value, (-advantage * fresh.logp)[fresh.mask].mean(), 1e-12)
    score_weight = -advantage / fresh.mask.sum()
    assert_close(gradient, torch.where(fresh.mask, score_weight, 0.0), 1e-12)
    assert gradient.abs().max() > 0.01  # It is not a comparison of zeros.


# Splits of the batch


def add_up(loss: ModuleType, whole: Responses, size: int, kl: Tensor | None) -> Outcome:
    """The sum over micro-batches of `size` responses each."""
    quantities = whole_batch(loss, whole)
    outcomes = []
    for first in range(0, len(whole.mask), size):
        chosen = slice(first, first + size)
        micro_kl = None if kl is None else kl[chosen]
        outcome = run(loss.p3o_loss, whole.select(chosen), kl=micro_kl, **quantities)
        outcomes.append(outcome)
    stats = {
        name: sum(float(outcome.stats[name]) for outcome in outcomes)
        for name in outcomes[0].stats
    }
    return Outcome(
        value=torch.stack([outcome.value for outcome in outcomes]).sum(),
        gradient=torch.cat([outcome.gradient for outcome in outcomes]),
        stats=stats,
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("given_kl", [False, True], ids=["estimated", "given"])
def test_sum_over_micro_batches_is_the_batch(
    loss: ModuleType, given_kl: bool, size: int
) -> None:
    responses = make_responses(11, spread=0.8)
    kl = kl_of_positions(responses) if given_kl else None
    whole = run(loss.p3o_loss, responses, kl=kl)
    micro_batches = add_up(loss, responses, size, kl)
    assert_same_outcome(micro_batches, whole, 1e-9)
    for name, stat in whole.stats.items():
        assert_close(micro_batches.stats[name], stat, 1e-9)


def test_rounding_in_a_micro_batch_changes_nothing_much(loss: ModuleType) -> None:
    # log-probabilities of another shape of micro-batch differ in the last bits.
    responses = make_responses(12)
    quantities = whole_batch(loss, responses)
    outcome = run(loss.p3o_loss, responses, **quantities)
    for factor in (1 - 1e-12, 1 + 1e-12):
        rounded = responses._replace(logp=responses.logp * factor)
        other = run(loss.p3o_loss, rounded, **quantities)
        assert_same_outcome(other, outcome, 1e-9)


@pytest.fixture(scope="session")
def results_of_ranks(loss: ModuleType, tmp_path_factory: Any) -> dict:
    return run_ranks(tmp_path_factory.mktemp("ranks"), loss.__file__)


@pytest.mark.parametrize("batch", ["all ranks", "half of them"])
@pytest.mark.parametrize("size", SIZES)
def test_sum_over_gloo_ranks_is_the_batch(
    results_of_ranks: dict, size: int, batch: str
) -> None:
    value, gradient = results_of_ranks[size, batch, "p3o"]
    right = expected("p3o", batches()[batch])
    assert_same_outcome(Outcome(value, gradient, stats={}), right)


# Extreme and broken inputs


@BOTH_DTYPES
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logp, behavior", [(-1.0, -81.0), (-81.0, -1.0)])
def test_80_nats_give_the_right_answer_or_a_clear_error(
    loss: ModuleType,
    logp: float,
    behavior: float,
    advantage: float,
    dtype: torch.dtype,
) -> None:
    responses = make_responses(14, dtype=dtype)
    responses.logp[2, 0] = logp
    responses.logp_behavior[2, 0] = behavior
    responses.advantage[2] = advantage
    try:
        outcome = run(loss.p3o_loss, responses)
    except (FloatingPointError, OverflowError, ValueError) as error:
        assert re.search(names_response(2), str(error)), "which response?"
        return
    assert_same_outcome(outcome, expected("p3o", responses), TOLERANCE[dtype])
    assert all(math.isfinite(stat) for stat in outcome.stats.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_log_ratio_stops_with_its_response(
    loss: ModuleType, bad: float
) -> None:
    responses = make_responses(15)
    log_ratio = responses.log_ratio
    log_ratio[5, 0] = bad
    with pytest.raises((FloatingPointError, ValueError), match=names_response(5)):
        loss.effective_sample_size(log_ratio, responses.mask)
    responses.logp[5, 0] = bad
    with pytest.raises((FloatingPointError, ValueError), match=names_response(5)):
        run(loss.p3o_loss, responses)


@pytest.mark.parametrize("logp, behavior", [(-1.0, -501.0), (-501.0, -1.0)])
def test_a_ratio_that_float32_cannot_hold_never_gives_a_nan(
    loss: ModuleType, logp: float, behavior: float
) -> None:
    responses = make_responses(16, dtype=torch.float32)
    responses.logp[3, 0] = logp
    responses.logp_behavior[3, 0] = behavior
    try:
        outcome = run(loss.p3o_loss, responses)
    except (FloatingPointError, OverflowError, ValueError) as error:
        assert re.search(names_response(3), str(error)), "which response?"
        return
    assert torch.isfinite(outcome.value)
    assert torch.isfinite(outcome.gradient).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_advantage_stops_with_its_response(
    loss: ModuleType, bad: float
) -> None:
    responses = make_responses(17)
    responses.advantage[4] = bad
    with pytest.raises((FloatingPointError, ValueError), match=names_response(4)):
        run(loss.p3o_loss, responses)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_padding_changes_nothing(loss: ModuleType, junk: float) -> None:
    responses = make_responses(18)
    padding = ~responses.mask
    clean = responses._replace(
        logp=responses.logp.masked_fill(padding, -0.7),
        logp_behavior=responses.logp_behavior.masked_fill(padding, -0.7),
    )
    dirty = responses._replace(
        logp=responses.logp.masked_fill(padding, junk),
        logp_behavior=responses.logp_behavior.masked_fill(padding, junk),
    )
    right = run(loss.p3o_loss, clean)
    outcome = run(loss.p3o_loss, dirty)
    assert_same_outcome(outcome, right, 1e-12)
    assert not outcome.gradient[padding].any()
    assert all(math.isfinite(stat) for stat in outcome.stats.values())
    # So it is where the KL is given, too.
    kl = kl_of_positions(responses)
    right = run(loss.p3o_loss, clean, kl=kl.masked_fill(padding, 0.0))
    outcome = run(loss.p3o_loss, dirty, kl=kl.masked_fill(padding, junk))
    assert_same_outcome(outcome, right, 1e-12)
    assert not outcome.gradient[padding].any()


def test_more_padding_changes_nothing(loss: ModuleType) -> None:
    responses = make_responses(18)
    pad = torch.nn.functional.pad
    wider = responses._replace(
        logp=pad(responses.logp, (0, 2), value=-2.0),
        logp_behavior=pad(responses.logp_behavior, (0, 2), value=-0.1),
        mask=pad(responses.mask, (0, 2), value=False),
    )
    right = run(loss.p3o_loss, responses)
    value, gradient, _ = run(loss.p3o_loss, wider)
    assert_close(value, right.value, 1e-12)
    assert_close(gradient[:, :-2], right.gradient, 1e-12)


@pytest.mark.parametrize(
    "keywords", [{"token_count": 30}, {"token_count": 30, "ess": 0.5}]
)
def test_a_micro_batch_without_tokens_adds_exactly_zero(
    loss: ModuleType, keywords: dict[str, Any]
) -> None:
    responses = make_responses(19)
    empty = responses._replace(mask=torch.zeros_like(responses.mask))
    value, gradient, stats = run(loss.p3o_loss, empty, **keywords)
    assert value == 0
    assert not gradient.any()
    assert all(float(stat) == 0 for stat in stats.values())


def test_a_batch_without_tokens_is_refused(loss: ModuleType) -> None:
    responses = make_responses(20)
    empty = responses._replace(mask=torch.zeros_like(responses.mask))
    with pytest.raises(ValueError):
        loss.effective_sample_size(empty.log_ratio, empty.mask)
    with pytest.raises(ValueError):
        run(loss.p3o_loss, empty)


def test_one_token_is_a_batch(loss: ModuleType) -> None:
    responses = one_token_each([3.0], advantage=-0.5)
    assert_same_outcome(run(loss.p3o_loss, responses), expected("p3o", responses))


def test_bfloat16_log_probabilities_are_not_subtracted_in_bfloat16(
    loss: ModuleType,
) -> None:
    responses = make_responses(21, dtype=torch.bfloat16)
    outcome = run(loss.p3o_loss, responses)
    right = expected("p3o", responses)
    assert_close(outcome.value, right.value, 1e-4)
    # The gradient is handed back in bfloat16, which has 3 digits.
    assert_close(outcome.gradient, right.gradient, 1e-2)
