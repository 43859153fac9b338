"""The loss of P3O: against numbers by hand, an oracle in plain Python (loss_oracle.py),
other splits of the batch, extreme inputs.

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
    TOLERANCE,
    Batch,
    Outcome,
    assert_close,
    assert_same_outcome,
    batches,
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


def test_group_advantage_by_hand(loss):
    # 1, 0, 0, 1 has the mean 1/2 and four squares of 1/4 each. Over n - 1 = 3 the
    # deviation is sqrt(1/3) = 0.577; the population's would be 0.5.
    reward = torch.tensor([[1, 0, 0, 1], [2, 2, 2, 2]], dtype=F64)
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert_close(loss.group_advantage(reward), [[a, -a, -a, a], [0, 0, 0, 0]], 1e-9)
    distance = [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]]
    assert_close(loss.group_advantage(reward, scale=False), distance)


@examples(30)
@given(reward=st.floats(-10, 10), size=st.integers(2, 9))
def test_a_group_of_equal_rewards_has_advantage_zero(loss, reward, size):
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


@pytest.mark.parametrize("padding", [0.0, math.nan, math.inf])
def test_e_b_by_hand(loss, padding):
    # rho = 1 and 3: (4/2)^2 / (10/2) = 0.8. With padding of log rho = 0 as tokens it
    # would be (6/4)^2 / (12/4) = 0.75.
    log_ratio = torch.tensor([[0.0, LOG3, padding, padding]])
    mask = torch.tensor([[True, True, False, False]])
    sums = loss.ratio_sums(log_ratio, mask)
    assert_close(sums, [2, 4, 10])
    ess = loss.effective_sample_size(sums)
    assert sums.dtype == ess.dtype == F64
    assert_close(ess, 0.8)


def test_e_b_is_a_constant_in_the_gradient(loss):
    log_ratio = torch.tensor([[0.0, LOG3]], requires_grad=True)
    sums = loss.ratio_sums(log_ratio, torch.tensor([[True, True]]))
    assert not loss.effective_sample_size(sums).requires_grad


@examples(50)
@given(x=st.lists(st.floats(-80, 80), min_size=1, max_size=12))
def test_e_b_is_between_one_over_the_token_count_and_one(loss, x):
    assert 1 / len(x) * (1 - 1e-12) <= e_b_of(loss, x) <= 1
    assert e_b_of(loss, x[:1] * len(x)) > 1 - 1e-12  # equal ratios, whatever they are


@BOTH_DTYPES
def test_e_b_at_80_nats(loss, dtype):
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
def test_e_b_is_nan_and_not_one_where_a_ratio_is_not_finite(loss, bad):
    # The square of e^400 is more than float64 has.
    assert math.isnan(e_b_of(loss, [0.0, bad, 0.0]))


# The divergence of (12)


def policies() -> tuple[Tensor, Tensor]:
    """Logits of pi_theta, and log pi_b with its 12 tokens from the likeliest down.

    [4, 5, 12] each.
    """
    generator = torch.Generator().manual_seed(0)
    behavior, noise = torch.randn(2, 4, 5, 12, generator=generator, dtype=F64)
    behavior = behavior.sort(descending=True).values.log_softmax(dim=-1)
    return (behavior + noise).requires_grad_(), behavior


def divergence_of(
    loss: ModuleType, logits: Tensor, behavior: Tensor, listed: int
) -> tuple[Tensor, Tensor]:
    """kl_divergence over the first `listed` tokens, and its gradient to the logits."""
    logp = logits.log_softmax(dim=-1)
    kl = loss.kl_divergence(logp[..., :listed], behavior[..., :listed])
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    return kl.detach(), gradient


def test_divergence_by_hand(loss):
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


def test_divergence_is_from_pi_theta_to_pi_b(loss):
    # KL((1/2, 1/2) || (3/4, 1/4)) = 1/2 log 2/3 + 1/2 log 2 = 1/2 log 4/3 = 0.144
    # KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 log 3/2 + 1/4 log 1/2 = 0.131
    half = torch.tensor([1 / 2, 1 / 2], dtype=F64).log()
    uneven = torch.tensor([3 / 4, 1 / 4], dtype=F64).log()
    one_way = math.log(4 / 3) / 2
    other_way = 3 / 4 * math.log(3 / 2) - LOG2 / 4
    assert_close(loss.kl_divergence(half, uneven), one_way)
    assert_close(loss.kl_divergence(uneven, half), other_way)


def assert_divergence_of_the_oracle(
    loss: ModuleType, dtype: torch.dtype, listed: int, tolerance: float
) -> None:
    logits, behavior = policies()
    p, b = [x.view(-1, 12).tolist() for x in (logits.softmax(dim=-1), behavior.exp())]
    right, right_gradient = [
        [function(*each, listed) for each in zip(p, b, strict=True)]
        for function in (divergence, divergence_gradient)
    ]
    logits = logits.detach().to(dtype).requires_grad_()
    kl, gradient = divergence_of(loss, logits, behavior.to(dtype), listed)
    assert kl.shape == (4, 5)
    assert_close(kl.flatten(), right, tolerance)
    assert_close(gradient.view(-1, 12), right_gradient, tolerance)


@pytest.mark.parametrize("listed", [1, 2, 5, 11, 12])
def test_divergence_and_its_gradient_equal_the_oracle(loss, listed):
    assert_divergence_of_the_oracle(loss, F64, listed, tolerance=1e-9)


def test_divergence_of_float32_where_nearly_all_is_listed(loss):
    # Where all 12 tokens are listed nothing is left for the others but rounding, 1e-7,
    # which is as often negative as not.
    assert_divergence_of_the_oracle(loss, torch.float32, listed=12, tolerance=1e-5)


def test_divergence_of_equal_policies_is_exactly_zero(loss):
    _, behavior = policies()
    for some in (behavior[..., :1], behavior[..., :6].float(), behavior.float()):
        assert not loss.kl_divergence(some, some).any()


def test_divergence_does_not_move_pi_b(loss):
    logits, behavior = policies()
    behavior.requires_grad_()
    kl = loss.kl_divergence(logits.log_softmax(dim=-1)[..., :5], behavior[..., :5])
    (gradient,) = torch.autograd.grad(kl.sum(), behavior, allow_unused=True)
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
def test_a_token_that_pi_theta_never_samples_adds_nothing(loss, p, b, right):
    logp = torch.tensor(p, dtype=F64).log().requires_grad_()
    kl = loss.kl_divergence(logp, torch.tensor(b, dtype=F64).log())
    assert_close(kl.detach(), right)
    (gradient,) = torch.autograd.grad(kl, logp)
    assert torch.isfinite(gradient).all()


# (12) The objective


def true_e_b(batch: Batch) -> float:
    """e_B of a batch, by the oracle."""
    return effective_sample_size(batch.log_ratio[batch.mask].tolist())


@BOTH_DTYPES
def test_loss_equals_the_oracle(loss, dtype):
    for batch in batches(dtype):
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
def test_a_high_ratio_token_weighs_what_the_table_says(loss, ratio, e_b, weight):
    # The weight on grad log pi_theta is min(rho, e_B) A.
    for advantage in (1.0, -1.0):
        outcome = run(loss.p3o, one_token_each([ratio], advantage), e_b)
        assert_close(-outcome.to_logp, [[weight * advantage]])


def test_the_kl_has_the_weight_one_less_e_b_by_hand(loss):
    # A = 0, KL = 1/2 and 1/4, e_B = 0.8: (1 - 0.8) (1/2 + 1/4) / 2. The gradient to
    # each KL is (1 - 0.8) / 2, above 0: descent makes the KL smaller.
    batch = one_token_each([1.0, 3.0], advantage=0.0)
    batch = batch._replace(kl=torch.tensor([[1 / 2], [1 / 4]], dtype=F64))
    value, to_logp, to_kl = run(loss.p3o, batch, 0.8)
    assert_close(value, 0.2 * 3 / 8)
    assert_close(to_kl, [[0.1], [0.1]])
    assert not to_logp.any()


@examples(30)
@given(seed=st.integers(0, 10**6))
def test_on_policy_it_is_reinforce(loss, seed):
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


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_any_split_into_ranks_and_micro_batches_gives_the_gradient_of_the_batch(
    loss, parts
):
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
