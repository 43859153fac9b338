"""Test the loss of P3O with numbers worked out by hand, with an oracle in plain Python
(loss_oracle.py), with other divisions of the batch, and with extreme inputs.

    pytest tests/test_loss.py --loss path/to/another_loss.py

tests another file. It needs only five functions with the signatures of loss.py:
group_advantage, ratio_sums, effective_sample_size, kl_divergence and p3o. In the tests
`loss` is the module under test. Equation numbers are those of arXiv 2605.12380.
test_wrong_losses.py checks that these tests reject losses with one mistake each.
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


# The same examples every time, and at most one failure
FIXED_EXAMPLES = settings(
    max_examples=50, deadline=None, derandomize=True, report_multiple_bugs=False
)


# (3) The group advantage


def test_group_advantage_by_hand(loss):
    # The mean of 1, 0, 0, 1 is 1/2, and the four squared distances are 1/4 each. With
    # the denominator n - 1 = 3 the standard deviation is sqrt(1/3) = 0.577, not 0.5.
    reward = torch.tensor([[1, 0, 0, 1], [2, 2, 2, 2]], dtype=F64)
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert_close(loss.group_advantage(reward), [[a, -a, -a, a], [0, 0, 0, 0]], 1e-9)
    distance = [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]]
    assert_close(loss.group_advantage(reward, scale=False), distance)


@FIXED_EXAMPLES
@given(reward=st.floats(-10, 10), size=st.integers(2, 9))
def test_a_group_of_equal_rewards_has_advantage_zero(loss, reward, size):
    for dtype in TOLERANCE:
        equal = torch.full((2, size), reward, dtype=dtype)
        assert not loss.group_advantage(equal).any()


# (11) The effective sample size


def compute_e_b(
    loss: ModuleType, log_ratio: Tensor | list, mask: Tensor | None = None
) -> float:
    """Return e_B of a batch. Without a mask there is no padding."""
    log_ratio = torch.as_tensor(log_ratio)
    if mask is None:
        mask = torch.ones_like(log_ratio, dtype=torch.bool)
    return float(loss.effective_sample_size(loss.ratio_sums(log_ratio, mask)))


@pytest.mark.parametrize("padding", [0.0, math.nan, math.inf])
def test_e_b_by_hand(loss, padding):
    # rho = 1 and 3 give (4/2)^2 / (10/2) = 0.8. If padding with log rho = 0 counted,
    # it would be (6/4)^2 / (12/4) = 0.75.
    log_ratio = torch.tensor([[0.0, LOG3, padding, padding]], requires_grad=True)
    sums = loss.ratio_sums(log_ratio, torch.tensor([[True, True, False, False]]))
    assert_close(sums, [2, 4, 10])
    ess = loss.effective_sample_size(sums)
    assert sums.dtype == ess.dtype == F64
    assert_close(ess, 0.8)
    assert not ess.requires_grad  # e_B is a constant in the gradient.


@FIXED_EXAMPLES
@given(x=st.lists(st.floats(-80, 80), min_size=1, max_size=12))
def test_e_b_is_between_one_over_the_token_count_and_one(loss, x):
    assert 1 / len(x) * (1 - 1e-12) <= compute_e_b(loss, [x]) <= 1
    # Equal ratios give 1, whatever they are.
    assert compute_e_b(loss, [x[:1] * len(x)]) > 1 - 1e-12


@BOTH_DTYPES
def test_e_b_at_80_nats(loss, dtype):
    log_ratio = torch.tensor([[80, 0, 0, 0], [-80, 0, 0, 0]], dtype=dtype)
    # One of eight tokens dominates, with either sign. The square of e^45 already
    # overflows float32; in the authors' code e_B is then 1.
    for factor in 1, -1, 45 / 80:
        assert_close(compute_e_b(loss, factor * log_ratio), 1 / 8, 1e-9)
    # Three of four tokens are alike, and the fourth adds nothing.
    assert_close(compute_e_b(loss, log_ratio[1:]), 3 / 4, 1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 400.0])
def test_e_b_is_nan_and_not_one_if_a_ratio_is_not_finite(loss, bad):
    # The square of e^400 overflows float64.
    assert math.isnan(compute_e_b(loss, [[0.0, bad, 0.0]]))


# The divergence of (12)


def divergence_of(
    loss: ModuleType, logits: Tensor, behavior: Tensor, listed: int
) -> tuple[Tensor, Tensor]:
    """Return the KL over the first `listed` tokens and its gradient to the logits.

    Asserts that the KL has no gradient to pi_b.
    """
    logp, behavior = logits.log_softmax(dim=-1), behavior.clone().requires_grad_()
    kl = loss.kl_divergence(logp[..., :listed], behavior[..., :listed])
    gradient, to_behavior = torch.autograd.grad(
        kl.sum(), [logits, behavior], allow_unused=True, materialize_grads=True
    )
    assert not to_behavior.any()
    return kl.detach(), gradient


def test_divergence_by_hand(loss):
    # pi_theta = (1/2, 1/4, 1/4), pi_b = (1/8, 1/8, 3/4). Over the whole vocabulary the
    # KL from pi_theta to pi_b is 0.592; the one from pi_b to pi_theta would be 0.564.
    #     1/2 log 4 + 1/4 log 2 + 1/4 log 1/3 = 5/4 log 2 - 1/4 log 3
    # Over the first token and a bucket of probability 1/2 and 7/8 it is
    #     1/2 log 4 + 1/2 log 4/7 = 0.413
    logits = torch.tensor([2.0, 1, 1], dtype=F64).log().requires_grad_()
    behavior = torch.tensor([1 / 8, 1 / 8, 3 / 4], dtype=F64).log()
    kl, gradient = divergence_of(loss, logits, behavior, listed=3)
    whole = 5 / 4 * LOG2 - LOG3 / 4
    assert_close(kl, whole)
    # The gradient to the logits is p_v (log(p_v / b_v) - KL).
    right = [(2 * LOG2 - whole) / 2, (LOG2 - whole) / 4, (-LOG3 - whole) / 4]
    assert_close(gradient, right)
    # Both tokens of the bucket have its ratio, 4/7.
    kl, gradient = divergence_of(loss, logits, behavior, listed=1)
    bucket = LOG2 + math.log(4 / 7) / 2
    assert_close(kl, bucket)
    rest_gradient = (math.log(4 / 7) - bucket) / 4
    assert_close(gradient, [(2 * LOG2 - bucket) / 2, rest_gradient, rest_gradient])


@pytest.mark.parametrize(
    "dtype, listed, tolerance",
    [
        *((F64, listed, 1e-9) for listed in (1, 2, 5, 11, 12)),
        # If all tokens are listed, the bucket has only the rounding error of float32,
        # 1e-7, which may be negative.
        (torch.float32, 12, 1e-5),
    ],
)
def test_divergence_and_its_gradient_equal_the_oracle(loss, dtype, listed, tolerance):
    generator = torch.Generator().manual_seed(0)
    behavior, noise = torch.randn(2, 4, 5, 12, generator=generator, dtype=F64)
    logits = behavior + noise
    behavior = behavior.log_softmax(dim=-1)
    p, b = [x.view(-1, 12).tolist() for x in (logits.softmax(dim=-1), behavior.exp())]
    right, right_gradient = [
        [function(*each, listed) for each in zip(p, b, strict=True)]
        for function in (divergence, divergence_gradient)
    ]
    logits = logits.to(dtype).requires_grad_()
    kl, gradient = divergence_of(loss, logits, behavior.to(dtype), listed)
    assert kl.shape == (4, 5)
    assert_close(kl.flatten(), right, tolerance)
    assert_close(gradient.view(-1, 12), right_gradient, tolerance)


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
    # pi_theta always samples a token that pi_b never samples.
    assert loss.kl_divergence(*torch.eye(2).log()) == math.inf


# (12) The objective


def true_e_b(batch: Batch) -> float:
    """Return e_B of a batch by the oracle."""
    return effective_sample_size(batch.log_ratio[batch.mask].tolist())


@BOTH_DTYPES
def test_loss_equals_the_oracle(loss, dtype):
    for batch in batches(dtype):
        for e_b in (true_e_b(batch), 0.3, 1.0):
            outcome = run(loss.p3o, batch, e_b)
            assert_same_outcome(outcome, expected(batch, e_b), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "ratio, e_b, weight",
    [
        (10.0, 0.5, 0.5),  # capped at e_B, not at 1 or at 1 / e_B = 2
        (10.0, 1.0, 1.0),  # capped at 1 if the rest of the batch is fresh
        (0.1, 0.5, 0.1),  # below the cap it is the ratio itself
    ],
)
def test_a_high_ratio_token_weighs_what_the_table_says(loss, ratio, e_b, weight):
    # The weight on grad log pi_theta is min(rho, e_B) A.
    for advantage in (1.0, -1.0):
        outcome = run(loss.p3o, one_token_each([ratio], advantage), e_b)
        assert_close(-outcome.to_logp, [[weight * advantage]])


def test_the_kl_has_the_weight_one_minus_e_b_by_hand(loss):
    # A = 0, KL = 1/2 and 1/4, e_B = 0.8: (1 - 0.8) (1/2 + 1/4) / 2. The gradient to
    # each KL is (1 - 0.8) / 2, which is positive, so descent makes the KL smaller.
    batch = one_token_each([1.0, 3.0], advantage=0.0)
    batch = batch._replace(kl=torch.tensor([[1 / 2], [1 / 4]], dtype=F64))
    value, to_logp, to_kl = run(loss.p3o, batch, 0.8)
    assert_close(value, 0.2 * 3 / 8)
    assert_close(to_kl, [[0.1], [0.1]])
    assert not to_logp.any()


@FIXED_EXAMPLES
@given(seed=st.integers(0, 10**6))
def test_on_policy_it_is_reinforce(loss, seed):
    # If all ratios are 1, e_B = 1. The loss is -A log pi_theta with the gradient
    # -A / |B|, and the KL does not count.
    batch = make_batch(seed)
    batch = batch._replace(logp=batch.logp_behavior)
    e_b = compute_e_b(loss, batch.log_ratio, batch.mask)
    value, to_logp, to_kl = run(loss.p3o, batch, e_b)
    count = batch.mask.sum()
    assert_close(value, (-batch.advantage * batch.logp).sum() / count, 1e-12)
    assert_close(to_logp, -batch.advantage / count, 1e-12)
    assert not to_kl.any()
    assert to_logp.abs().max() > 0.01  # The comparison is not between zeros.


# Splits of the batch


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_any_split_into_ranks_and_micro_batches_gives_the_gradient_of_the_batch(
    loss, count
):
    # The sums of all micro-batches of all ranks give e_B and |B|, and their gradients
    # add up.
    batch = make_batch(11, spread=0.8)
    size = len(batch.mask) // count
    split = [batch.rows(slice(i * size, (i + 1) * size)) for i in range(count)]
    sums = sum(loss.ratio_sums(each.log_ratio, each.mask) for each in split)
    e_b = float(loss.effective_sample_size(sums))
    outcomes = [run(loss.p3o, each, e_b, token_count=int(sums[0])) for each in split]
    values, to_logp, to_kl = zip(*outcomes, strict=True)
    found = Outcome(sum(values), torch.cat(to_logp), torch.cat(to_kl))
    assert_same_outcome(found, expected(batch, true_e_b(batch)), 1e-9)
