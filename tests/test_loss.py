"""The loss against hand numbers, an independent oracle (loss_oracle.py), the identities of the
method, other splits of the batch, extreme inputs; and the suite against wrong losses.

pytest tests/test_loss.py --loss path/to/another_loss.py runs it on a file of the same interface."""

import math
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from conftest import LOSS, load_module
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_oracle import DEFAULTS, effective_sample_size, oracle
from wrong_losses import WRONG, wrong_loss

torch.set_num_threads(1)
NAMES = list(DEFAULTS)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
F64 = torch.float64


def make_batch(seed=0, rows=8, columns=7, spread=0.6, dtype=F64):
    """Ragged responses, from 1 token to all; NaN in the padding; prox, a policy between the two."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, columns + 1, (rows,), generator=g)
    lengths[0], lengths[1] = 1, columns
    mask = torch.arange(columns) < lengths[:, None]  # [B, T]
    behavior = -3 * torch.rand(rows, columns, generator=g, dtype=F64) - 0.1
    logp = behavior + spread * torch.randn(rows, columns, generator=g, dtype=F64)
    prox = behavior + spread * torch.randn(rows, columns, generator=g, dtype=F64)
    advantage = torch.randn(rows, generator=g, dtype=F64)
    for x in (behavior, logp, prox):
        x[~mask] = math.nan
    return {k: v.to(dtype) for k, v in dict(l=logp, b=behavior, a=advantage, p=prox).items()}, mask


def rows_of(batch, mask, rows):
    return {k: v[rows] for k, v in batch.items()}, mask[rows]


def run(loss, name, batch, mask, **keywords):
    """-> value, gradient with respect to logp, stats."""
    logp = batch["l"].clone().requires_grad_()
    if name == "decoupled":
        keywords = {"logp_prox": batch["p"]} | keywords
    value, stats = loss.OBJECTIVES[name](logp, batch["b"], batch["a"], mask, **keywords)
    (gradient,) = torch.autograd.grad(value, logp)
    return value.detach().to(F64), gradient.to(F64), stats


def expected(name, batch, mask, **hyper):
    """The same from the oracle, on the very numbers that the dtype holds."""
    lists = {k: v.to(F64).tolist() for k, v in batch.items()}
    advantage = [[a] * mask.shape[1] for a in lists["a"]] if batch["a"].dim() == 1 else lists["a"]
    if name == "decoupled":
        hyper = {"logp_prox": lists["p"]} | hyper
    value, gradient = oracle(name, lists["l"], lists["b"], advantage, mask.tolist(), **hyper)
    return torch.tensor(value, dtype=F64), torch.tensor(gradient, dtype=F64)


def same(found, right, tolerance=1e-6):
    """Equal within tolerance of the largest value; NaN and inf are never equal to anything."""
    found, right = torch.as_tensor(found, dtype=F64), torch.as_tensor(right, dtype=F64)
    assert torch.isfinite(found).all(), found
    assert (found - right).abs().max() <= tolerance * right.abs().max() + 1e-15, (found, right)


def one_token(rho, a=1.0, tokens=1):
    """A batch of `tokens` sequences of one token each, of probability 0.2 under pi_b."""
    b = torch.full((tokens, 1), math.log(0.2), dtype=F64)
    logp = b + torch.as_tensor(rho, dtype=F64).log().reshape(-1, 1)
    batch = dict(l=logp, b=b, a=torch.full((tokens,), a, dtype=F64), p=logp)
    return batch, torch.ones(tokens, 1, dtype=torch.bool)


def quantities(loss, name, batch, mask):
    return loss.batch_quantities(name, batch["l"] - batch["b"], batch["a"], mask)


# Values and gradients


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_equals_the_oracle(loss, name, dtype):
    for seed, spread in enumerate((0.02, 0.3, 0.6, 1.5)):  # from nearly fresh to stale
        batch, mask = make_batch(seed, spread=spread, dtype=dtype)
        value, gradient, _ = run(loss, name, batch, mask)
        right_value, right_gradient = expected(name, batch, mask)
        same(value, right_value, TOLERANCE[dtype])
        same(gradient, right_gradient, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "name, hyper",
    [
        ("p3o", {"kl_estimator": "is"}),
        ("p3o", {"ess": 0.3}),
        ("grpo", {"eps": 0.4}),
        ("grpo", {"eps": 0.6}),
        ("dapo", {"eps_low": 0.1, "eps_high": 0.5}),
        ("gspo", {"eps_low": 0.2, "eps_high": 0.3}),
        ("cispo", {"eps_high": 0.5}),
        ("tis", {"C": 1.0}),
        ("decoupled", {"eps": 0.5, "c_w": 1.2}),
        ("decoupled", {"logp_prox": None}),
        ("m2po", {"tau": 0.3}),
        ("m2po", {"tau": 1e-9}),  # every token that moves away from pi_b is dropped
        ("m2po", {"tau": 1e9}),  # none is
    ],
)
def test_hyper_parameters_equal_the_oracle(loss, name, hyper):
    batch, mask = make_batch(5)
    value, gradient, _ = run(loss, name, batch, mask, **hyper)
    right_value, right_gradient = expected(name, batch, mask, **hyper)
    same(value, right_value)
    same(gradient, right_gradient)


@pytest.mark.parametrize("name", NAMES)
def test_an_advantage_per_token_is_taken_as_it_is(loss, name):
    batch, mask = make_batch(6)
    batch["a"] = torch.where(mask, torch.randn(mask.shape, dtype=F64), math.nan)
    value, gradient, _ = run(loss, name, batch, mask)
    right_value, right_gradient = expected(name, batch, mask)
    same(value, right_value)
    same(gradient, right_gradient)


@pytest.mark.parametrize("name", NAMES)
def test_every_token_has_its_responses_advantage(loss, name):
    batch, mask = make_batch(7)
    value, gradient, _ = run(loss, name, batch, mask)
    batch["a"] = batch["a"][:, None].expand(mask.shape)
    value2, gradient2, _ = run(loss, name, batch, mask)
    same(value, value2, 1e-12)
    same(gradient, gradient2, 1e-12)


def test_every_token_has_its_responses_advantage_by_hand(loss):
    # on-policy, two responses of 1 and 3 tokens, A = 3 and -2: gradient -A / 4 on every token
    b = torch.full((2, 3), -1.0, dtype=F64)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    batch = dict(l=b, b=b, a=torch.tensor([3.0, -2.0], dtype=F64))
    same(run(loss, "p3o", batch, mask)[1], [[-0.75, 0, 0], [0.5, 0.5, 0.5]])


@pytest.mark.parametrize(
    "name, keywords, positive, negative",
    [  # weight on grad log pi of a token with rho = 10, for A = 1 and A = -1
        ("reinforce", {}, 1, -1),
        ("grpo", {}, 0, -10),
        ("dapo", {}, 0, -10),
        ("gspo", {}, 0, -10),
        ("cispo", {}, 5, -5),
        ("decoupled", {"logp_prox": None}, 5, -5),
        ("tis", {}, 2, -2),
        ("m2po", {}, 0, -10),  # (log 10)^2 = 5.3 is above 0.04
        ("p3o", {"ess": 0.5}, 0.05, -0.95),  # 0.5 A - 0.5 (1 - 1/10)
        (
            "p3o",
            {"ess": 0.5, "kl_estimator": "is"},
            0.5 - 5 * math.log(10),
            -0.5 - 5 * math.log(10),
        ),
        ("p3o", {"ess": 1.0}, 1, -1),  # the cap at a fresh batch
    ],
)
def test_a_high_ratio_token_weighs_what_the_table_says(loss, name, keywords, positive, negative):
    for a, right in ((1.0, positive), (-1.0, negative)):
        same(-run(loss, name, *one_token(10.0, a), **keywords)[1], [[right]])


def test_gradient_is_a_sum_of_weighted_scores(loss):
    # rho = 1/2, 1, 2, 4: e_B = (7.5/4)^2 / (21.25/4) = 225/340 = 0.661765; A = 2
    # weight min(rho, e_B) A - (1 - e_B)(1 - 1/rho), over 4 tokens:
    #   1/2: 1 + 0.338235 = 1.338235    1: 1.323529    2: 1.323529 - 0.169118    4: ... - 0.253676
    batch, mask = one_token([0.5, 1.0, 2.0, 4.0], 2.0, tokens=4)
    right = [[1.3382353], [1.3235294], [1.1544118], [1.0698529]]
    same(-4 * run(loss, "p3o", batch, mask)[1], right)


def test_every_token_counts_the_same(loss):
    # on-policy, A = 1 and 0, 1 and 3 tokens of log-probability -1: 1/4 (mean of means: 1/2)
    b = torch.full((2, 3), -1.0, dtype=F64)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    batch = dict(l=b, b=b, a=torch.tensor([1.0, 0.0], dtype=F64))
    same(run(loss, "p3o", batch, mask)[0], 0.25)


def test_gspo_averages_over_sequences(loss):
    # rho = 1: loss -A a sequence whatever its length: -(1 + 0) / 2; gradient -1/2 and -0
    b = torch.full((2, 3), -1.0, dtype=F64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    batch = dict(l=b, b=b, a=torch.tensor([1.0, 0.0], dtype=F64))
    value, gradient, _ = run(loss, "gspo", batch, mask)
    same(value, -0.5)
    same(gradient, [[-0.25, -0.25, 0], [0, 0, 0]])


def test_m2po_drops_by_hand(loss):
    # A = 1 and log rho = 0.1, 0.2, 0.3, 0.4; squares 0.01, 0.04, 0.09, 0.16, running means 0.01,
    # 0.025, 0.0467, 0.075: two stay under 0.04. log rho = -0.9 leads back to pi_b and stays.
    ratios = torch.tensor([0.1, 0.2, 0.3, 0.4, -0.9]).exp()
    batch, mask = one_token(ratios, tokens=5)
    _, gradient, stats = run(loss, "m2po", batch, mask)
    same(-5 * gradient[:, 0], [math.exp(0.1), math.exp(0.2), 0, 0, math.exp(-0.9)])
    same(stats["capped"], 2 / 5)


def test_m2po_treats_equal_tokens_equally(loss):
    # squares 0.01, 0.09, 0.09: one 0.09 would give mean 0.05 > 0.04, so both go; and with tau =
    # 0.06 the mean of all, 0.0633, is above, the mean of two, 0.05, is not: both go again
    batch, mask = one_token(torch.tensor([0.1, 0.3, 0.3]).exp(), tokens=3)
    for tau in (0.04, 0.06):
        gradient = run(loss, "m2po", batch, mask, tau=tau)[1]
        same(-3 * gradient[:, 0], [math.exp(0.1), 0, 0])


def test_decoupled_clips_around_the_proximal_policy(loss):
    # pi_b = 0.2, pi_prox = 0.4, pi_theta = 0.44 : weight 2, ratio 1.1, inside 1 +- 0.2
    batch, mask = one_token(2.2)
    prox = torch.full((1, 1), math.log(0.4), dtype=F64)
    same(-run(loss, "decoupled", batch, mask, logp_prox=prox)[1], [[2.2]])
    # pi_theta = 0.52: ratio 1.3 is clipped, so nothing is learnt; rho / pi_b = 2.6
    batch, mask = one_token(2.6)
    same(-run(loss, "decoupled", batch, mask, logp_prox=prox)[1], [[0.0]])


def test_kl_pulls_back_to_the_behaviour_policy(loss):
    # A = 0, e_B = 0.25, rho = 2: loss 0.75 (log 2 + 1/2 - 1), gradient 0.75 (1 - 1/2) > 0: pi falls
    batch, mask = one_token(2.0, 0.0)
    value, gradient, stats = run(loss, "p3o", batch, mask, ess=0.25)
    same(value, 0.75 * (math.log(2) - 0.5))
    same(gradient, [[0.375]])
    same(stats["kl"], math.log(2) - 0.5)
    # "is": 0.75 (2 log 2 - 2 + 1), gradient 0.75 * 2 log 2
    value, gradient, stats = run(loss, "p3o", batch, mask, ess=0.25, kl_estimator="is")
    same(value, 0.75 * (2 * math.log(2) - 1))
    same(gradient, [[1.5 * math.log(2)]])
    same(stats["kl"], 2 * math.log(2) - 1)


def test_kl_is_not_clamped(loss):
    # A = 0, e_B = 0, rho = e^-12: value -12 + e^12 - 1, gradient 1 - e^12: back up, with all its
    # might; and rho = e^12: 12 + e^-12 - 1, gradient 1 - e^-12
    for x in (-12.0, 12.0):
        batch, mask = one_token(math.exp(x), 0.0)
        value, gradient, _ = run(loss, "p3o", batch, mask, ess=0.0)
        same(value, x + math.exp(-x) - 1)
        same(gradient, [[1 - math.exp(-x)]])


def test_advantage_is_a_constant(loss):
    for name in NAMES:
        batch, mask = make_batch(8)
        advantage = batch["a"].requires_grad_()
        logp = batch["l"].clone().requires_grad_()
        value, _ = loss.OBJECTIVES[name](logp, batch["b"], advantage, mask)
        (gradient,) = torch.autograd.grad(value, advantage, allow_unused=True)
        assert gradient is None or not gradient.any(), name


def test_e_b_is_a_constant_in_the_gradient(loss):
    batch, mask = make_batch(9, spread=1.0)
    ess = effective_sample_size((batch["l"] - batch["b"])[mask].tolist())
    assert 0.05 < ess < 0.9  # there is something to lose
    for estimator in ("k3", "is"):
        inside = run(loss, "p3o", batch, mask, kl_estimator=estimator)
        given_value = run(loss, "p3o", batch, mask, kl_estimator=estimator, ess=ess)
        given_tensor = run(
            loss, "p3o", batch, mask, kl_estimator=estimator, ess=torch.tensor(ess, dtype=F64)
        )
        for other in (given_value, given_tensor):
            same(inside[0], other[0], 1e-9)
            same(inside[1], other[1], 1e-9)


def test_given_e_b_is_used(loss):
    # rho = 10, A = 1, e_B of the batch 0.2: weight 0.2 - 0.8 * 0.9 (its own e_B would be 1)
    same(-run(loss, "p3o", *one_token(10.0), ess=0.2)[1], [[0.2 - 0.72]])


@pytest.mark.parametrize("name", NAMES)
def test_twice_the_tokens_in_the_batch_is_half_the_weight(loss, name):
    batch, mask = make_batch(10)
    whole = quantities(loss, name, batch, mask)
    counts = {k: 2 * v for k, v in whole.items() if k.endswith("_count")}
    value, gradient, stats = run(loss, name, batch, mask, **whole)
    value2, gradient2, stats2 = run(loss, name, batch, mask, **(whole | counts))
    same(2 * value2, value)
    same(2 * gradient2, gradient)
    assert {"loss", "kl", "capped"} <= set(stats)
    for key, stat in stats.items():
        same(2 * stats2[key], stat)


# Identities of the method


def ratios(spread=3.0):
    return st.lists(st.floats(-spread, spread), min_size=1, max_size=12)


def e_b(loss, log_ratios):
    x = torch.tensor([log_ratios], dtype=F64)
    return float(loss.effective_sample_size(x, torch.ones_like(x, dtype=torch.bool)))


@settings(max_examples=50, deadline=None)
@given(x=ratios())
def test_e_b_is_one_over_one_plus_squared_variation(loss, x):
    rho = [math.exp(v) for v in x]
    mean = sum(rho) / len(rho)
    variance = sum((r - mean) ** 2 for r in rho) / len(rho)
    same(e_b(loss, x), 1 / (1 + variance / mean**2), 1e-9)


@settings(max_examples=50, deadline=None)
@given(x=ratios(20.0), factor=st.floats(-30, 30))
def test_e_b_does_not_see_a_common_factor(loss, x, factor):
    same(e_b(loss, [v + factor for v in x]), e_b(loss, x), 1e-9)


@settings(max_examples=100, deadline=None)
@given(x=ratios(80.0))
def test_e_b_is_between_one_over_n_and_one(loss, x):
    assert 1 / len(x) * (1 - 1e-12) <= e_b(loss, x) <= 1


@settings(max_examples=50, deadline=None)
@given(x=st.floats(-80, 80), n=st.integers(1, 1000))
def test_e_b_of_equal_ratios_is_exactly_one(loss, x, n):
    assert e_b(loss, [x] * n) == 1


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 1000))
def test_e_b_of_one_dominant_token_is_one_over_n(loss, n):
    same(e_b(loss, [80.0] + [0.0] * (n - 1)), 1 / n, 1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_on_policy_it_is_reinforce(loss, seed):
    batch, mask = make_batch(seed)
    batch["l"] = batch["b"].clone()
    found, right = run(loss, "p3o", batch, mask), run(loss, "reinforce", batch, mask)
    same(found[0], right[0], 1e-12)
    same(found[1], right[1], 1e-12)
    same(found[1], torch.where(mask, -batch["a"][:, None] / mask.sum(), 0.0), 1e-12)
    assert found[1].abs().max() > 0.01  # not trivially: gradients of this size


def softmax_policies(tilt):
    """pi_b = (1, 2, 3, 4)/10 and a batch of ten tokens in just these shares; pi_theta is tilted."""
    tokens = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    behavior = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64)
    logits = (behavior.log() + torch.tensor(tilt, dtype=F64)).requires_grad_()
    return tokens, behavior, logits


tilts = st.lists(st.floats(-2, 2), min_size=4, max_size=4)


@settings(max_examples=30, deadline=None)
@given(tilt=tilts)
def test_e_b_estimates_one_over_one_plus_chi_squared(loss, tilt):
    # over a batch in the very shares of pi_b, mean rho = 1 and the estimate is exact
    tokens, behavior, logits = softmax_policies(tilt)
    policy = logits.softmax(0).detach()
    chi2 = float((policy**2 / behavior).sum() - 1)
    renyi2 = math.log1p(chi2)
    found = e_b(loss, (policy / behavior).log()[tokens].tolist())
    same(found, 1 / (1 + chi2), 1e-9)
    same(found, math.exp(-renyi2), 1e-9)


@settings(max_examples=30, deadline=None)
@given(tilt=tilts)
def test_is_gives_the_kl_and_its_gradient_and_k3_gives_neither(loss, tilt):
    tokens, behavior, logits = softmax_policies(tilt)
    mask, zero = torch.ones(10, 1, dtype=torch.bool), torch.zeros(10, dtype=F64)
    b, logp = behavior.log()[tokens][:, None], logits.log_softmax(0)[tokens][:, None]
    policy = logits.softmax(0)
    kl = (policy * (policy / behavior).log()).sum()  # KL(pi_theta || pi_b), exact
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    value, _ = loss.p3o_loss(logp, b, zero, mask, ess=0.0, kl_estimator="is")
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    assert abs(value - kl) < 1e-9
    assert (gradient - kl_gradient).abs().max() < 1e-9
    value, _ = loss.p3o_loss(logp, b, zero, mask, ess=0.0, kl_estimator="k3")
    chi2 = (behavior**2 / policy).sum() - 1
    same(value.detach(), (chi2 - (behavior * (behavior / policy).log()).sum()).detach(), 1e-9)


def test_e_b_by_hand(loss):
    # rho = 1, 3 : (4/2)^2 / (10/2) = 0.8; the padding, rho = 1 if it counted, would make it 0.818
    x = torch.tensor([[0.0, math.log(3), math.nan, math.inf]], dtype=F64)
    found = loss.effective_sample_size(x, torch.tensor([[True, True, False, False]]))
    assert found.dtype == F64 and found.shape == ()
    same(found, 0.8, 1e-9)


def test_capped_counts_the_tokens_that_are_cut(loss):
    batch, mask = one_token([0.1, 0.9, 1.1, 1.25, 1.5, 3.0, 9.0, 1.0], tokens=8)
    right = {"p3o": 7, "reinforce": 0, "grpo": 4, "dapo": 3, "cispo": 1, "tis": 2}
    for name, count in right.items():  # A = 1; ess = 0.5 for p3o
        stats = run(loss, name, batch, mask, **({"ess": 0.5} if name == "p3o" else {}))[2]
        assert float(stats["capped"]) == count / 8, name
        assert not torch.as_tensor(stats["capped"]).requires_grad


# Group advantage


def test_group_advantage_by_hand(loss):
    # 1, 0, 0, 1: mean 1/2, squares 4/4, over n - 1 = 3: sqrt(1/3) = 0.5773503 (population: 0.5)
    found = loss.group_advantage(torch.tensor([[1.0, 0, 0, 1], [2, 2, 2, 2]], dtype=F64))
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    same(found, [[a, -a, -a, a], [0, 0, 0, 0]], 1e-9)
    unscaled = loss.group_advantage(torch.tensor([[1.0, 0, 0, 0]]), scale=False)
    same(unscaled, [[0.75, -0.25, -0.25, -0.25]])


@settings(max_examples=30, deadline=None)
@given(reward=st.floats(-10, 10), size=st.integers(2, 9))
def test_a_group_of_equal_rewards_has_advantage_zero(loss, reward, size):
    for dtype in TOLERANCE:
        assert not loss.group_advantage(torch.full((2, size), reward, dtype=dtype)).any()


def test_a_group_of_one_is_refused(loss):
    with pytest.raises(ValueError):
        loss.group_advantage(torch.ones(4, 1))


# Splits of the batch


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_sum_over_micro_batches_is_the_batch(loss, name, size):
    batch, mask = make_batch(11, spread=0.8)
    value, gradient, stats = run(loss, name, batch, mask)
    whole = quantities(loss, name, batch, mask)
    parts = [rows_of(batch, mask, slice(i, i + size)) for i in range(0, 8, size)]
    found = [run(loss, name, *part, **whole) for part in parts]
    same(sum(v for v, _, _ in found), value, 1e-9)
    same(torch.cat([g for _, g, _ in found]), gradient, 1e-9)
    for key in stats:
        same(sum(float(s[key]) for _, _, s in found), stats[key])


@pytest.mark.parametrize("name", NAMES)
def test_rounding_in_a_micro_batch_changes_nothing_much(loss, name):
    # log-probabilities of another micro-batch shape differ in the last bits: no token may flip
    batch, mask = make_batch(12)
    whole = quantities(loss, name, batch, mask)
    value, gradient, _ = run(loss, name, batch, mask, **whole)
    for factor in (1 - 1e-12, 1 + 1e-12):
        other = run(loss, name, batch | {"l": batch["l"] * factor}, mask, **whole)
        same(other[0], value, 1e-9)
        same(other[1], gradient, 1e-9)


def rank_cases():
    """Two batches of 8 rows: one full, one whose second half (of the ranks) has no tokens."""
    batch, mask = make_batch(13, spread=0.8)
    half = mask & (torch.arange(8) < 4)[:, None]
    return {"all ranks": (batch, mask), "half of them": (batch, half)}


def worker(rank, path, folder):
    """One of 4 gloo ranks. In groups of 1, 2 and 4 each takes its rows, gathers what the batch-wide
    quantities need, and adds up the losses: as the trainer does. Rank 0 saves what came out."""
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(folder, "store"), 4)
    dist.init_process_group("gloo", rank=rank, world_size=4, store=store)
    loss, results = load_module(path), {}
    for size in (1, 2, 4):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for case, (batch, mask) in rank_cases().items():
            share = 8 // size
            mine = rows_of(batch, mask, slice(rank * share, (rank + 1) * share))

            def gather(x, size=size, group=group):
                parts = [torch.empty_like(x) for _ in range(size)]
                dist.all_gather(parts, x.contiguous(), group=group)
                return torch.cat(parts)

            log_ratio = gather(mine[0]["l"] - mine[0]["b"])
            advantage, whole_mask = gather(mine[0]["a"]), gather(mine[1])
            for name in NAMES:
                whole = loss.batch_quantities(name, log_ratio, advantage, whole_mask)
                value, gradient, _ = run(loss, name, *mine, **whole)
                dist.all_reduce(value, group=group)
                results[f"{size} {case} {name}"] = (value, gather(gradient))
    if rank == 0:
        torch.save(results, os.path.join(folder, "results.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def rank_results(loss, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, __file__, loss.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("case", ["all ranks", "half of them"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_sum_over_gloo_ranks_is_the_batch(loss, rank_results, name, size, case):
    value, gradient = rank_results[f"{size} {case} {name}"]
    right_value, right_gradient = expected(name, *rank_cases()[case])
    same(value, right_value)
    same(gradient, right_gradient)


# Extreme and broken inputs


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_80_nats_give_the_right_answer_or_a_clear_error(loss, name, dtype):
    for x in (80.0, -80.0):
        for a in (1.0, -1.0):
            batch, mask = make_batch(14, dtype=dtype)
            batch["b"][2, 0], batch["l"][2, 0] = (-81.0, -1.0) if x > 0 else (-1.0, -81.0)
            batch["a"][2] = a
            mask[2, 0] = True
            try:
                value, gradient, stats = run(loss, name, batch, mask)
            except (FloatingPointError, OverflowError, ValueError) as error:
                assert "2" in str(error), "which sequence?"
                continue
            right_value, right_gradient = expected(name, batch, mask)
            same(value, right_value, TOLERANCE[dtype])
            same(gradient, right_gradient, TOLERANCE[dtype])
            assert all(math.isfinite(s) for s in stats.values()), stats


def test_e_b_at_80_nats(loss):
    for dtype in TOLERANCE:
        x = torch.tensor([[80.0, 0, 0, 0], [-80.0, 0, 0, 0]], dtype=dtype)
        mask = torch.ones_like(x, dtype=torch.bool)
        same(loss.effective_sample_size(x, mask), 1 / 8, 1e-9)
        same(loss.effective_sample_size(x[1:], mask[1:]), 3 / 4, 1e-9)
        same(loss.effective_sample_size(-x, mask), 1 / 8, 1e-9)
        # the square of e^45 is more than float32 has: in the authors' code e_B is 1 from there on
        same(loss.effective_sample_size(x * 45 / 80, mask), 1 / 8, 1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_log_ratio_stops_with_its_sequence(loss, bad):
    batch, mask = make_batch(15)
    x = batch["l"] - batch["b"]
    x[5, 0] = bad
    with pytest.raises((FloatingPointError, ValueError), match="5"):
        loss.effective_sample_size(x, mask)
    for name in NAMES:
        with pytest.raises((FloatingPointError, ValueError), match="5"):
            logp = batch["l"].clone()
            logp[5, 0] = bad
            run(loss, name, batch | {"l": logp}, mask)


@pytest.mark.parametrize("name", NAMES)
def test_a_ratio_that_float32_cannot_hold_never_gives_a_nan(loss, name):
    batch, mask = make_batch(16, dtype=torch.float32)
    for logp, behavior in ((-1.0, -501.0), (-501.0, -1.0)):
        batch["l"][3, 0], batch["b"][3, 0] = logp, behavior
        try:
            value, gradient, _ = run(loss, name, batch, mask)
        except (FloatingPointError, OverflowError, ValueError) as error:
            assert "3" in str(error), "which sequence?"
        else:
            assert torch.isfinite(value) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_non_finite_advantage_stops_with_its_sequence(loss, name):
    for bad in (math.nan, math.inf):
        batch, mask = make_batch(17)
        batch["a"][4] = bad
        with pytest.raises((FloatingPointError, ValueError), match="4"):
            run(loss, name, batch, mask)


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(loss, name):
    batch, mask = make_batch(18)
    right = run(loss, name, {k: v.nan_to_num(-0.7) for k, v in batch.items()}, mask)
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        dirty = {k: v.clone() for k, v in batch.items()}
        for k in "lbp":
            dirty[k][~mask] = junk
        value, gradient, stats = run(loss, name, dirty, mask)
        same(value, right[0], 1e-12)
        same(gradient, right[1], 1e-12)
        assert not gradient[~mask].any()
        assert all(math.isfinite(s) for s in stats.values()), stats
        whole = quantities(loss, name, dirty, mask)
        same(run(loss, name, dirty, mask, **whole)[1], right[1], 1e-12)
    wider = {k: torch.cat([v, v[:, :2] * 3], 1) if v.dim() == 2 else v for k, v in batch.items()}
    mask = torch.cat([mask, torch.zeros_like(mask[:, :2])], 1)
    same(run(loss, name, wider, mask)[0], right[0], 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_without_tokens_adds_exactly_zero(loss, name):
    batch, mask = make_batch(19)
    whole = quantities(loss, name, batch, mask)
    for keywords in (whole, {"token_count": 30}):
        value, gradient, stats = run(loss, name, batch, mask & False, **keywords)
        assert value == 0 and not gradient.any()
        assert all(float(s) == 0 for s in stats.values())


def test_a_batch_without_tokens_is_refused(loss):
    batch, mask = make_batch(20)
    with pytest.raises(ValueError):
        loss.effective_sample_size(batch["l"] - batch["b"], mask & False)
    for name in NAMES:
        with pytest.raises(ValueError):
            run(loss, name, batch, mask & False)


@pytest.mark.parametrize("name", NAMES)
def test_one_token_is_a_batch(loss, name):
    batch, mask = one_token(3.0, -0.5)
    value, gradient, _ = run(loss, name, batch, mask)
    right_value, right_gradient = expected(name, batch, mask)
    same(value, right_value)
    same(gradient, right_gradient)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_log_probabilities_are_not_subtracted_in_bfloat16(loss, name):
    batch, mask = make_batch(21, dtype=torch.bfloat16)
    value, gradient, _ = run(loss, name, batch, mask)
    right_value, right_gradient = expected(name, batch, mask)
    same(value, right_value, 1e-4)
    same(gradient, right_gradient, 1e-2)  # handed back in bfloat16, 3 digits


# The suite itself


def cases(test):
    """Every choice of arguments that pytest would call a parametrized test with."""
    choices = [{}]
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args[0].split(", "), mark.args[1]
        rows = [dict(zip(names, v if len(names) > 1 else [v], strict=True)) for v in values]
        choices = [choice | row for choice in choices for row in rows]
    return choices


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_loss_fails_the_tests_named_for_it(what):
    wrong, tests = wrong_loss(what)
    for name in tests:
        with pytest.raises((AssertionError, pytest.fail.Exception)):  # in one case or another
            for case in cases(globals()[name]):
                globals()[name](loss=wrong, **case)


def test_another_loss_is_refused_when_its_interface_differs(tmp_path):
    other = tmp_path / "other.py"
    source = LOSS.read_text().replace("def group_advantage(reward:", "def group_advantage(rewards:")
    other.write_text(source)
    command = [sys.executable, "-m", "pytest", __file__, "-q", "--loss"]
    printed = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wrong = {str(other): "group_advantage(rewards", str(tmp_path / "no.py"): "no such file"}
    started = {path: subprocess.Popen([*command, path], **printed) for path in wrong}
    for path, process in started.items():  # both at once
        out, _ = process.communicate(timeout=120)
        assert process.returncode != 0 and wrong[path] in out


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # where torch is imported already
    ranks = [fork.Process(target=worker, args=(rank, *sys.argv[1:])) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
