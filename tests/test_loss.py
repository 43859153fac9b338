"""The loss of P3O: against numbers by hand, an oracle in plain Python (loss_oracle.py),
the identities of the method, other splits of the batch, extreme inputs.

    pytest tests/test_loss.py --loss path/to/another_loss.py

runs it on another file. That needs five functions with the signatures of loss.py, and
nothing else: group_advantage, ratio_sums, effective_sample_size, kl_divergence, p3o. In
the tests `loss` is the module under test. Equation numbers are those of arXiv
2605.12380. test_wrong_losses.py has losses with one mistake each, which these tests
have to reject.
"""

import math
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import (
    F64,
    IN_SHARES,
    SHARES,
    TOLERANCE,
    Batch,
    Outcome,
    assert_close,
    assert_same_outcome,
    expected,
    make_batch,
    one_token_each,
    run,
)
from loss_oracle import divergence, divergence_gradient, effective_sample_size
from torch import Tensor

torch.set_num_threads(1)
LOG2 = math.log(2)
LOG3 = math.log(3)
BOTH_DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))


def examples(count: int) -> settings:
    """So many examples a test, the same ones each time, and one failure at most."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        report_multiple_bugs=False,
    )


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
    advantage = loss.group_advantage(torch.tensor([[1.0, 0, 0, 0]]), scale=False)
    assert_close(advantage, [[0.75, -0.25, -0.25, -0.25]])


@examples(30)
@given(reward=st.floats(-10, 10), size=st.integers(2, 9))
def test_a_group_of_equal_rewards_has_advantage_zero(
    loss: ModuleType, reward: float, size: int
) -> None:
    for dtype in TOLERANCE:
        equal = torch.full((2, size), reward, dtype=dtype)
        assert not loss.group_advantage(equal).any()


# (11) The effective sample size


def e_b_of(loss: ModuleType, log_ratios: list[float]) -> float:
    """e_B of a batch of one response with these log rho."""
    log_ratio = torch.tensor([log_ratios], dtype=F64)
    return ess_of_tokens(loss, log_ratio, torch.ones_like(log_ratio, dtype=torch.bool))


def ess_of_tokens(loss: ModuleType, log_ratio: Tensor, mask: Tensor) -> float:
    return float(loss.effective_sample_size(loss.ratio_sums(log_ratio, mask)))


def log_ratios(largest: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(-largest, largest), min_size=1, max_size=12)


@pytest.mark.parametrize("padding", [0.0, math.nan, math.inf])
def test_e_b_by_hand(loss: ModuleType, padding: float) -> None:
    # rho = 1 and 3: (4/2)^2 / (10/2) = 0.8. With padding of log rho = 0 as tokens it
    # would be (6/4)^2 / (12/4) = 0.75.
    log_ratio = torch.tensor([[0.0, LOG3, padding, padding]])
    mask = torch.tensor([[True, True, False, False]])
    sums = loss.ratio_sums(log_ratio, mask)
    assert_close(sums, [2, 4, 10])
    ess = loss.effective_sample_size(sums)
    assert sums.dtype == ess.dtype == F64
    assert_close(ess, 0.8)


def test_e_b_is_a_constant_in_the_gradient(loss: ModuleType) -> None:
    log_ratio = torch.tensor([[0.0, LOG3]], requires_grad=True)
    sums = loss.ratio_sums(log_ratio, torch.tensor([[True, True]]))
    assert not loss.effective_sample_size(sums).requires_grad


@examples(50)
@given(x=log_ratios(3.0))
def test_e_b_is_one_over_one_plus_squared_variation(
    loss: ModuleType, x: list[float]
) -> None:
    ratio = [math.exp(value) for value in x]
    mean = math.fsum(ratio) / len(ratio)
    variance = math.fsum((r - mean) ** 2 for r in ratio) / len(ratio)
    assert_close(e_b_of(loss, x), 1 / (1 + variance / mean**2), 1e-9)


@examples(50)
@given(x=log_ratios(20.0), factor=st.floats(-30, 30))
def test_e_b_does_not_see_a_common_factor(
    loss: ModuleType, x: list[float], factor: float
) -> None:
    moved = [value + factor for value in x]
    assert_close(e_b_of(loss, moved), e_b_of(loss, x), 1e-9)


@examples(50)
@given(x=log_ratios(80.0))
def test_e_b_is_between_one_over_the_token_count_and_one(
    loss: ModuleType, x: list[float]
) -> None:
    assert 1 / len(x) * (1 - 1e-12) <= e_b_of(loss, x) <= 1


@examples(30)
@given(x=st.floats(-80, 80), tokens=st.integers(2, 1000))
def test_equal_ratios_have_e_b_one_and_one_dominant_token_has_one_over_the_count(
    loss: ModuleType, x: float, tokens: int
) -> None:
    assert e_b_of(loss, [0.0] * tokens) == 1
    assert_close(e_b_of(loss, [x] * tokens), 1.0, 1e-12)
    assert_close(e_b_of(loss, [80.0] + [0.0] * (tokens - 1)), 1 / tokens, 1e-9)


@BOTH_DTYPES
def test_e_b_at_80_nats(loss: ModuleType, dtype: torch.dtype) -> None:
    log_ratio = torch.tensor([[80, 0, 0, 0], [-80, 0, 0, 0]], dtype=dtype)
    mask = torch.ones(2, 4, dtype=torch.bool)
    # One of eight tokens dominates, whichever direction is up.
    assert_close(ess_of_tokens(loss, log_ratio, mask), 1 / 8, 1e-9)
    assert_close(ess_of_tokens(loss, -log_ratio, mask), 1 / 8, 1e-9)
    # Three of four tokens are alike, and the fourth adds nothing.
    assert_close(ess_of_tokens(loss, log_ratio[1:], mask[1:]), 3 / 4, 1e-9)
    # The square of e^45 is more than float32 has. In the authors' code e_B is 1 from
    # there on.
    assert_close(ess_of_tokens(loss, log_ratio * 45 / 80, mask), 1 / 8, 1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 400.0])
def test_e_b_is_nan_and_not_one_where_a_ratio_is_not_finite(
    loss: ModuleType, bad: float
) -> None:
    # The square of e^400 is more than float64 has.
    assert math.isnan(e_b_of(loss, [0.0, bad, 0.0]))


@examples(30)
@given(tilt=st.lists(st.floats(-2, 2), min_size=4, max_size=4))
def test_e_b_estimates_chi_squared_and_bounds_the_divergence_that_it_weighs(
    loss: ModuleType, tilt: list[float]
) -> None:
    policy = (SHARES.log() + torch.tensor(tilt, dtype=F64)).softmax(dim=0)
    chi_squared = float((policy**2 / SHARES).sum() - 1)
    ess = e_b_of(loss, (policy / SHARES).log()[IN_SHARES].tolist())
    assert_close(ess, 1 / (1 + chi_squared), 1e-9)
    # KL <= log(1 + chi^2), by Jensen's inequality.
    assert loss.kl_divergence(policy.log(), SHARES.log()) <= -math.log(ess) + 1e-12


# The divergence of (12)


def policies(seed: int) -> tuple[Tensor, Tensor]:
    """12 logits of pi_theta, and log pi_b with its tokens from the likeliest down."""
    generator = torch.Generator().manual_seed(seed)
    behavior_logits = torch.randn(12, generator=generator, dtype=F64)
    behavior = behavior_logits.sort(descending=True).values.log_softmax(dim=0)
    logits = behavior + torch.randn(12, generator=generator, dtype=F64)
    return logits.requires_grad_(), behavior


def divergence_of(
    loss: ModuleType, logits: Tensor, behavior: Tensor, listed: int
) -> tuple[Tensor, Tensor]:
    """kl_divergence over the first `listed` tokens, and its gradient to the logits."""
    logp = logits.log_softmax(dim=-1)
    kl = loss.kl_divergence(logp[..., :listed], behavior[..., :listed])
    (gradient,) = torch.autograd.grad(kl, logits)
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
    assert_close(bucket_gradient, [LOG3 / 4, -LOG3 / 8, -LOG3 / 8])


def test_divergence_is_from_pi_theta_to_pi_b(loss: ModuleType) -> None:
    # KL((1/2, 1/2) || (3/4, 1/4)) = 1/2 log 2/3 + 1/2 log 2 = 1/2 log 4/3 = 0.144
    # KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 log 3/2 + 1/4 log 1/2 = 0.131
    half = torch.tensor([1 / 2, 1 / 2], dtype=F64).log()
    uneven = torch.tensor([3 / 4, 1 / 4], dtype=F64).log()
    one_way = math.log(4 / 3) / 2
    other_way = 3 / 4 * math.log(3 / 2) - LOG2 / 4
    assert_close(loss.kl_divergence(half, uneven), one_way)
    assert_close(loss.kl_divergence(uneven, half), other_way)


@pytest.mark.parametrize("listed", [1, 2, 5, 11, 12])
def test_divergence_and_its_gradient_equal_the_oracle(
    loss: ModuleType, listed: int
) -> None:
    for seed in range(10):
        logits, behavior = policies(seed)
        p, b = logits.softmax(dim=0).tolist(), behavior.exp().tolist()
        kl, gradient = divergence_of(loss, logits, behavior, listed)
        assert_close(kl, divergence(p, b, listed), 1e-9)
        assert_close(gradient, divergence_gradient(p, b, listed), 1e-9)


def test_divergence_of_float32_where_nearly_all_is_listed(loss: ModuleType) -> None:
    # Where all 12 tokens are listed nothing is left for the others but rounding, 1e-7,
    # which is as often negative as not.
    for seed in range(20):
        logits, behavior = policies(seed)
        p, b = logits.softmax(dim=0).tolist(), behavior.exp().tolist()
        logits = logits.detach().float().requires_grad_()
        kl, gradient = divergence_of(loss, logits, behavior.float(), listed=12)
        assert_close(kl, divergence(p, b, listed=12), 1e-5)
        assert_close(gradient, divergence_gradient(p, b, listed=12), 1e-4)


@examples(30)
@given(seed=st.integers(0, 10**6))
def test_divergence_grows_with_the_list_up_to_the_sum_over_the_vocabulary(
    loss: ModuleType, seed: int
) -> None:
    logits, behavior = policies(seed)
    logp = logits.detach().log_softmax(dim=0)
    bounds = [float(loss.kl_divergence(logp[:k], behavior[:k])) for k in range(1, 13)]
    for fewer, more in zip(bounds, bounds[1:], strict=False):
        assert fewer <= more + 1e-12
    assert bounds[0] < bounds[-1] - 1e-6
    assert_close(bounds[-1], (logp.exp() * (logp - behavior)).sum(), 1e-9)


def test_divergence_of_equal_policies_is_exactly_zero(loss: ModuleType) -> None:
    for seed in range(10):
        _, behavior = policies(seed)
        for some in (behavior[:1], behavior[:6].float(), behavior, behavior.float()):
            assert loss.kl_divergence(some, some) == 0


def test_divergence_keeps_all_dimensions_but_the_last(loss: ModuleType) -> None:
    logits = torch.stack([policies(seed)[0].detach() for seed in range(6)])
    logp = logits.log_softmax(dim=-1).view(2, 3, 12)[..., :5]
    behavior = logp.flip(0)
    kl = loss.kl_divergence(logp, behavior)
    right = [
        [loss.kl_divergence(logp[i, j], behavior[i, j]) for j in range(3)]
        for i in range(2)
    ]
    assert_close(kl, right)


def test_divergence_does_not_move_pi_b(loss: ModuleType) -> None:
    logits, behavior = policies(0)
    behavior.requires_grad_()
    kl = loss.kl_divergence(logits.log_softmax(dim=0)[:5], behavior[:5])
    (gradient,) = torch.autograd.grad(kl, behavior, allow_unused=True)
    assert gradient is None or not gradient.any()


@pytest.mark.parametrize(
    "p, b, right",
    [
        # The second of three tokens is impossible for both: 1/2 log 2 + 1/2 log 2/3.
        ([1 / 2, 0, 1 / 2], [1 / 4, 0, 3 / 4], math.log(4 / 3) / 2),
        # pi_theta never samples the second token: 1 log 4 + 0 log 0.
        ([1.0, 0], [1 / 4, 3 / 4], math.log(4)),
    ],
)
def test_a_token_that_pi_theta_never_samples_adds_nothing(
    loss: ModuleType, p: list[float], b: list[float], right: float
) -> None:
    logp = torch.tensor(p, dtype=F64).log().requires_grad_()
    kl = loss.kl_divergence(logp, torch.tensor(b, dtype=F64).log())
    assert_close(kl.detach(), right)
    (gradient,) = torch.autograd.grad(kl, logp)
    assert torch.isfinite(gradient).all()


def test_a_token_that_only_pi_theta_samples_costs_infinitely_much(
    loss: ModuleType,
) -> None:
    logp = torch.tensor([1 / 2, 1 / 2], dtype=F64).log()
    behavior = torch.tensor([1.0, 0], dtype=F64).log()
    assert loss.kl_divergence(logp, behavior) == math.inf


# (12) The objective


def true_e_b(batch: Batch) -> float:
    """e_B of a batch, by the oracle."""
    return effective_sample_size(batch.log_ratio[batch.mask].tolist())


@BOTH_DTYPES
def test_loss_equals_the_oracle(loss: ModuleType, dtype: torch.dtype) -> None:
    for seed, spread in enumerate((0.02, 0.3, 0.6, 1.5)):  # from nearly fresh to stale
        batch = make_batch(seed, spread=spread, dtype=dtype)
        for e_b in (true_e_b(batch), 0.3, 1.0):
            outcome = run(loss.p3o, batch, e_b)
            assert_same_outcome(outcome, expected("p3o", batch, e_b), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "ratio, e_b, weight",
    [
        (10.0, 0.5, 0.5),  # capped at e_B, not at 1 or at 1 / e_B = 2
        (10.0, 1.0, 1.0),  # on a batch that is fresh otherwise the cap is 1
        (0.1, 0.5, 0.1),  # below the cap it is the ratio itself
    ],
)
def test_a_high_ratio_token_weighs_what_the_table_says(
    loss: ModuleType, ratio: float, e_b: float, weight: float
) -> None:
    # The weight on grad log pi_theta is min(rho, e_B) A.
    for advantage in (1.0, -1.0):
        outcome = run(loss.p3o, one_token_each([ratio], advantage), e_b)
        assert_close(-outcome.to_logp, [[weight * advantage]])


def test_gradient_is_a_sum_of_weighted_scores(loss: ModuleType) -> None:
    # rho = 1/2, 1, 2, 4: e_B = (7.5/4)^2 / (21.25/4) = 225/340. A = 2. Each of the four
    # tokens has a quarter of the weight min(rho, e_B) A.
    e = 225 / 340
    outcome = run(loss.p3o, one_token_each([0.5, 1.0, 2.0, 4.0], advantage=2.0), e)
    assert_close(-4 * outcome.to_logp, [[2 * 0.5], [2 * e], [2 * e], [2 * e]])


def test_the_kl_has_the_weight_one_less_e_b_by_hand(loss: ModuleType) -> None:
    # A = 0, KL = 1/2 and 1/4, e_B = 0.8: (1 - 0.8) (1/2 + 1/4) / 2. The gradient to
    # each KL is (1 - 0.8) / 2, above 0: descent makes the KL smaller.
    batch = one_token_each([1.0, 3.0], advantage=0.0)
    batch = batch._replace(kl=torch.tensor([[1 / 2], [1 / 4]], dtype=F64))
    value, to_logp, to_kl = run(loss.p3o, batch, 0.8)
    assert_close(value, 0.2 * 3 / 8)
    assert_close(to_kl, [[0.1], [0.1]])
    assert not to_logp.any()


def test_policy_and_kl_share_one_gradient_by_hand(loss: ModuleType) -> None:
    # The policies of test_divergence_by_hand, one token sampled, the first: rho = 2.
    # A = 1, e_B = 0.25. To the logits the score is (1/2, -1/4, -1/4), and the KL has
    # log 2 times (3/8, -1/16, -5/16).
    logits = torch.tensor([2.0, 1, 1], dtype=F64).log().requires_grad_()
    logp = logits.log_softmax(dim=0)  # [V]
    behavior = torch.tensor([1 / 4, 1 / 4, 1 / 2], dtype=F64).log()
    kl = loss.kl_divergence(logp, behavior)
    value = loss.p3o(logp[0], behavior[0], torch.tensor(1.0), kl, 0.25)
    assert_close(value.detach(), 0.25 * LOG2 + 0.75 * LOG2 / 4)
    (gradient,) = torch.autograd.grad(value, logits)
    score = torch.tensor([1 / 2, -1 / 4, -1 / 4], dtype=F64)
    kl_gradient = LOG2 * torch.tensor([3 / 8, -1 / 16, -5 / 16], dtype=F64)
    assert_close(gradient, -0.25 * score + 0.75 * kl_gradient)


@examples(30)
@given(seed=st.integers(0, 10**6))
def test_on_policy_it_is_reinforce(loss: ModuleType, seed: int) -> None:
    # rho = 1 everywhere gives e_B = 1: -A log pi_theta, with the gradient -A / |B|, and
    # no KL.
    batch = make_batch(seed)
    batch = batch._replace(logp=batch.logp_behavior)
    e_b = ess_of_tokens(loss, batch.log_ratio, batch.mask)
    value, to_logp, to_kl = run(loss.p3o, batch, e_b)
    count = batch.mask.sum()
    assert_close(value, (-batch.advantage * batch.logp).sum() / count, 1e-12)
    assert_close(to_logp, -batch.advantage / count, 1e-12)
    assert not to_kl.any()
    assert to_logp.abs().max() > 0.01  # It is not a comparison of zeros.


# Splits of the batch


@examples(30)
@given(x=log_ratios(10.0), cut=st.integers(0, 12))
def test_the_sums_of_parts_add_up_to_those_of_the_batch(
    loss: ModuleType, x: list[float], cut: int
) -> None:
    # One of the parts may have no token.
    log_ratio = torch.tensor([x], dtype=F64)
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    first, second = mask.clone(), mask.clone()
    first[:, cut:] = False
    second[:, :cut] = False
    parts = loss.ratio_sums(log_ratio, first) + loss.ratio_sums(log_ratio, second)
    assert_close(parts, loss.ratio_sums(log_ratio, mask), 1e-12)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_any_split_into_ranks_and_micro_batches_gives_the_gradient_of_the_batch(
    loss: ModuleType, parts: int
) -> None:
    # A part is a micro-batch of some rank. The sums of all parts give e_B and |B|, and
    # the gradients of all parts add up.
    batch = make_batch(11, spread=0.8)
    size = len(batch.mask) // parts
    split = [batch.rows(slice(i * size, (i + 1) * size)) for i in range(parts)]
    sums = sum(loss.ratio_sums(part.log_ratio, part.mask) for part in split)
    e_b = float(loss.effective_sample_size(sums))
    outcomes = [run(loss.p3o, part, e_b, token_count=int(sums[0])) for part in split]
    values, to_logp, to_kl = zip(*outcomes, strict=True)
    found = Outcome(sum(values), torch.cat(to_logp), torch.cat(to_kl))
    assert_same_outcome(found, expected("p3o", batch, true_e_b(batch)), 1e-9)


# Padding and extreme ratios


def test_more_padding_changes_nothing(loss: ModuleType) -> None:
    batch = make_batch(18)
    wider = Batch(*(torch.nn.functional.pad(tensor, (0, 2)) for tensor in batch))
    e_b = ess_of_tokens(loss, wider.log_ratio, wider.mask)
    value, to_logp, to_kl = run(loss.p3o, wider, e_b)
    found = Outcome(value, to_logp[:, :-2], to_kl[:, :-2])
    assert_same_outcome(found, expected("p3o", batch, true_e_b(batch)), 1e-9)
    assert not to_logp[~wider.mask].any()
    assert not to_kl[~wider.mask].any()


@BOTH_DTYPES
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logp, behavior", [(-1.0, -81.0), (-81.0, -1.0)])
def test_80_nats_give_the_right_answer(
    loss: ModuleType,
    logp: float,
    behavior: float,
    advantage: float,
    dtype: torch.dtype,
) -> None:
    batch = make_batch(14, dtype=dtype)
    batch.logp[3, 0] = logp
    batch.logp_behavior[3, 0] = behavior
    batch.advantage[3] = advantage * batch.mask[3]
    e_b = ess_of_tokens(loss, batch.log_ratio, batch.mask)
    right = expected("p3o", batch, true_e_b(batch))
    assert_same_outcome(run(loss.p3o, batch, e_b), right, TOLERANCE[dtype])
