"""The objectives that P3O is compared with, P3O with parts of it taken out, and how the
trainer finds one: loss.py, tools/objectives.py, study/ablations.py.

As in test_loss.py: numbers by hand, an oracle in plain Python (loss_oracle.py), other
splits of the batch, extreme inputs. rho is 1 for a fresh token, A is the advantage.
"""

import json
import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from loss_batches import (
    F64,
    TOLERANCE,
    Batch,
    assert_close,
    assert_same_outcome,
    batches,
    expected,
    make_batch,
    one_token_each,
    run,
)
from torch import Tensor

from loss import LOSSES
from study import ablations
from tools import objectives as objectives_module

torch.set_num_threads(1)
E_B = 0.4  # No objective of tools/objectives.py looks at it.
# Each with hyper-parameters other than its defaults.
OTHERS: dict[str, dict[str, float]] = {
    "reinforce": {},
    "grpo": {"eps": 0.4},
    "dapo": {"eps_low": 0.1, "eps_high": 0.5},
    "gspo": {"eps_low": 0.2, "eps_high": 0.3},
    "cispo": {"eps_high": 0.5},
    "tis": {"C": 1.0},
    "m2po": {"tau": 0.3},
    "a3po": {"alpha": 0.75, "eps": 0.2, "cap": 1.5},
    "bapo": {"target": 0.4, "high_max": 1.5},
    "asymre": {"delta": -0.5},
    "rec": {"eps": 0.4},
    "opmd": {"tau": 1.0},
    "sapo": {"tau_pos": 0.5, "tau_neg": 2.0},
}
# The rules of 2026, whose weights are worked out in the tests themselves.
RULES = ("ipo", "sequence_mask", "dppo_tv", "icepop", "vespo", "opsm")
Objectives = dict[str, Callable[..., Tensor]]


def by_name(module: ModuleType) -> Objectives:
    """The objectives of loss.py, and those of tools/objectives.py."""
    names = {*OTHERS, *RULES} - set(LOSSES)
    own = {name: getattr(module, name) for name in names}
    return LOSSES | own


@pytest.fixture(scope="session")
def objectives() -> Objectives:
    """The objectives under test: test_wrong_losses.py calls the tests with others."""
    return by_name(objectives_module)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", list(OTHERS))
def test_an_objective_equals_the_oracle(objectives, name, dtype):
    for batch in batches(dtype):
        for options in ({}, OTHERS[name]):
            outcome = run(objectives[name], batch, E_B, **options)
            right = expected(name, batch, E_B, **options)
            assert_same_outcome(outcome, right, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "name, positive, negative",
    [
        ("reinforce", 1, -1),
        # A clipped loss learns nothing from a token that it has made likelier than its
        # range, if A > 0, and has no bound if A < 0.
        ("grpo", 0, -10),
        ("dapo", 0, -10),
        ("gspo", 0, -10),
        ("cispo", 5, -5),
        ("tis", 2, -2),
        ("m2po", 0, -10),
        # sqrt(10) is above 1.4. Where A < 0 the two factors of sqrt(10) are rho.
        ("a3po", 0, -10),
        ("bapo", 0, -10),
        ("asymre", 1.1, -0.9),
        ("rec", 0, -1),
        ("opmd", 1 - 0.2 * math.log(10), -1 - 0.2 * math.log(10)),
        # 4 s (1 - s) rho, with s = sigmoid(9) and sigmoid(9.45)
        ("sapo", 40 * 1.2337935e-4, -40 * 7.8677183e-5),
    ],
)
def test_a_high_ratio_token_weighs_what_the_table_says(
    objectives, name, positive, negative
):
    # The weight on grad log pi_theta of a token with rho = 10, for A = 1 and A = -1.
    for advantage, weight in ((1.0, positive), (-1.0, negative)):
        outcome = run(objectives[name], one_token_each([10.0], advantage), E_B)
        assert_close(-outcome.to_logp, [[weight]])


@pytest.mark.parametrize("name", [*OTHERS, *RULES])
def test_on_a_fresh_batch_every_objective_is_reinforce(objectives, name):
    # The gradient is -A / |B|, and the KL has none. AsymRE adds 0.1 to each A, also
    # where it is 0, but not to padding.
    batch = make_batch(3)
    batch = batch._replace(logp=batch.logp_behavior)
    _, to_logp, to_kl = run(objectives[name], batch, E_B)
    shift = 0.1 if name == "asymre" else 0.0
    advantage = (batch.advantage + shift) * batch.mask
    assert_close(to_logp, -advantage / batch.mask.sum(), 1e-12)
    assert not to_kl.any()


def test_m2po_and_bapo_look_at_the_whole_batch_by_hand(
    objectives,
):
    for name, weight_of_ratio in (
        # log rho of 0.1, 0.2 and 0.3 has a mean square of 0.14 / 3, above 0.04. Without
        # the last it is 0.05 / 2. The fourth token has moved against its advantage.
        ("m2po", {1.10517: 1.10517, 1.2214: 1.2214, 1.34986: 0, -1.64872: -1.64872}),
        # 1.2 + 1.2 is less than 0.8 + 2.55. So the lower bound rises to 0.9, and A < 0
        # counts 3.45. 1.6 + 1.8 is less than that, and 1.6 + 1.9 is not: 1.9 it is.
        ("bapo", {1.6: 1.6, 3.0: 0, -0.8: 0, -2.55: -2.55}),
    ):
        # Each ratio has the sign of its advantage.
        signed = torch.tensor(list(weight_of_ratio), dtype=F64)[:, None]
        batch = one_token_each(signed.abs()[:, 0].tolist())
        batch = batch._replace(advantage=signed.sign())
        outcome = run(objectives[name], batch, E_B, token_count=1)
        assert_close(-outcome.to_logp[:, 0], list(weight_of_ratio.values()))


# A response is its advantage A and the pairs (pi_theta, pi_b) of its tokens. `weights`
# are those on grad log pi_theta, one for each token in this order.
Response = tuple[float, list[tuple[float, float]]]


def batch_of(responses: list[Response], dtype: torch.dtype = F64) -> Batch:
    """The batch of these responses, whose padding is 0."""
    shape = len(responses), max(len(pairs) for _, pairs in responses)
    logp, logp_behavior, advantage = torch.zeros(3, *shape, dtype=F64)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, (of_response, pairs) in enumerate(responses):
        for t, (probability, of_behavior) in enumerate(pairs):
            logp[row, t] = math.log(probability)
            logp_behavior[row, t] = math.log(of_behavior)
            advantage[row, t] = of_response
            mask[row, t] = True
    kl = mask.double()  # No rule looks at it.
    tensors = (logp, logp_behavior, advantage, kl)
    return Batch(*(tensor.to(dtype) for tensor in tensors), mask)


@pytest.mark.parametrize(
    "name, options, responses, weights",
    [
        # A rise of 0.4 and a fall of 0.35 are above 0.3, whatever the sign of A. A rise
        # of 0.2 and a fall of 0.25 are not.
        (
            "ipo",
            {},
            [
                (2.0, [(0.65, 0.25), (0.05, 0.4), (0.3, 0.1)]),
                (-0.5, [(0.65, 0.25), (0.05, 0.4), (0.1, 0.35)]),
            ],
            [0, 0, 3 * 2, 0, 0, 0.1 / 0.35 * -0.5],
        ),
        # The first three moves are above 0.15. The derivative of 0.05 (log rho)^2 is
        # 0.1 log rho. It counts at every token, with or without an advantage.
        (
            "ipo",
            {"eps": 0.15, "kl_tau": 0.05},
            [(2.0, [(0.65, 0.25), (0.3, 0.1)]), (0.0, [(0.05, 0.4), (0.3, 0.25)])],
            [
                -0.1 * math.log(0.65 / 0.25),
                -0.1 * math.log(3),
                -0.1 * math.log(0.05 / 0.4),
                -0.1 * math.log(0.3 / 0.25),
            ],
        ),
        # 4 x 0.5 = 2 is kept, though one ratio is 4. 2 x 1.75 = 3.5 is above 3, though
        # no ratio is. 0.1 x 0.1 = 0.01 is kept: there is no lower bound.
        (
            "sequence_mask",
            {},
            [
                (1.5, [(0.4, 0.1), (0.2, 0.4)]),
                (0.7, [(0.4, 0.2), (0.7, 0.4)]),
                (-0.7, [(0.4, 0.2), (0.7, 0.4)]),
                (-0.9, [(0.05, 0.5), (0.03, 0.3)]),
                (0.3, [(0.3, 0.6)]),
            ],
            [2 * 1.5, 2 * 1.5, 0, 0, 0, 0, 0.01 * -0.9, 0.01 * -0.9, 0.5 * 0.3],
        ),
        (
            "sequence_mask",
            {"cap": 1.5},
            [(1.5, [(0.4, 0.1), (0.2, 0.4)]), (1.5, [(0.55, 0.4)])],
            [0, 0, 0.55 / 0.4 * 1.5],
        ),
        # A rise of 0.25 is dropped if A > 0 and a fall of 0.25 if A < 0. A rise of 0.15
        # is kept though rho is 4, and one of 0.196 has rho = 50, which is capped at 20.
        (
            "dppo_tv",
            {},
            [
                (2.0, [(0.35, 0.1), (0.2, 0.05), (0.2, 0.004), (0.1, 0.35)]),
                (-0.5, [(0.35, 0.1), (0.2, 0.45), (0.05, 0.2)]),
            ],
            [0, 4 * 2, 20 * 2, 0.1 / 0.35 * 2, 3.5 * -0.5, 0, 0.25 * -0.5],
        ),
        (
            "dppo_tv",
            {"eps": 0.1, "cap": 1.5},
            [(2.0, [(0.2, 0.05), (0.1, 0.05)]), (-1.0, [(0.2, 0.05), (0.1, 0.25)])],
            [0, 1.5 * 2, 1.5 * -1, 0],
        ),
        # Ratios of 0.4 and 6 are outside of 0.5 to 5, and 0.6 and 4.8 are not.
        (
            "icepop",
            {},
            [(2.0, [(0.2, 0.5), (0.3, 0.5)]), (-0.5, [(0.6, 0.1), (0.48, 0.1)])],
            [0, 0.6 * 2, 0, 4.8 * -0.5],
        ),
        (
            "icepop",
            {"low": 0.9, "high": 1.2},
            [(2.0, [(0.4, 0.5), (0.46, 0.5)]), (-0.5, [(0.13, 0.1), (0.11, 0.1)])],
            [0, 0.92 * 2, 0, 1.1 * -0.5],
        ),
        # w = 4 x 0.5 = 2, with both signs, and 0.3 / 0.6.
        (
            "vespo",
            {},
            [
                (1.5, [(0.4, 0.1), (0.2, 0.4)]),
                (-0.7, [(0.4, 0.1), (0.2, 0.4)]),
                (-0.9, [(0.3, 0.6)]),
            ],
            [
                2**2 * math.exp(3 * (1 - 2)) * 1.5,
                2**2 * math.exp(3 * (1 - 2)) * 1.5,
                2**3 * math.exp(2 * (1 - 2)) * -0.7,
                2**3 * math.exp(2 * (1 - 2)) * -0.7,
                0.5**3 * math.exp(2 * (1 - 0.5)) * -0.9,
            ],
        ),
        (
            "vespo",
            {"k_pos": 1.5, "lambda_pos": 0.5, "k_neg": 0.25, "lambda_neg": 1.25},
            [(1.5, [(0.3, 0.6)]), (-0.7, [(0.3, 0.6)])],
            [
                0.5**1.5 * math.exp(0.5 * 0.5) * 1.5,
                0.5**0.25 * math.exp(1.25 * 0.5) * -0.7,
            ],
        ),
        # log w is clamped: one of -60 to log 1e-8, and one of 60 to 20. A k of 0.01 and
        # a lambda of 1e-9 leave something of both.
        (
            "vespo",
            {"k_neg": 0.01, "lambda_neg": 1e-9},
            [
                (-1.0, [(0.5 * math.exp(-60), 0.5)]),
                (-1.0, [(0.5, 0.5 * math.exp(-60))]),
            ],
            [-(1e-8**0.01), -math.exp(0.01 * 20 + 1e-9 * (1 - math.exp(20)))],
        ),
        # The means of log(pi_b / pi_theta) are log(4) / 2 = 0.69, twice, which only the
        # negative response is dropped for, and log(2) / 2 = 0.35. Elsewhere GRPO clips:
        # 0.5 and 1.25 with A < 0 weigh nothing and rho A, 1.25 with A > 0 nothing.
        (
            "opsm",
            {},
            [
                (2.0, [(0.1, 0.4), (0.3, 0.3)]),
                (-0.5, [(0.1, 0.4), (0.3, 0.3)]),
                (-0.7, [(0.2, 0.4), (0.3, 0.3)]),
                (-0.9, [(0.5, 0.4)]),
                (0.9, [(0.5, 0.4)]),
            ],
            [0.25 * 2, 1 * 2, 0, 0, 0, -0.7, 1.25 * -0.9, 0],
        ),
        (
            "opsm",
            {"eps": 0.6, "delta": 0.3},
            [
                (-0.7, [(0.2, 0.4), (0.3, 0.3)]),
                (-0.7, [(0.2, 0.4), (0.3, 0.3), (0.3, 0.3)]),
            ],
            [0, 0, 0.5 * -0.7, -0.7, -0.7],
        ),
    ],
)
def test_the_weights_of_a_rule_are_those_of_plain_arithmetic(
    objectives, name, options, responses, weights
):
    batch = batch_of(responses)
    outcome = run(objectives[name], batch, E_B, token_count=1, **options)
    assert_close(-outcome.to_logp[batch.mask], weights)
    assert not outcome.to_logp[~batch.mask].any()
    assert not outcome.to_kl.any()


@pytest.mark.parametrize("name", RULES)
def test_a_token_that_a_rule_drops_adds_no_gradient_even_if_its_ratio_overflows(
    objectives, name
):
    # rho = e^95 is infinite in float32. The second token keeps the mean of
    # log(pi_b / pi_theta) above opsm's delta: (97 - 95) / 2 = 1.
    far = (0.9, 0.9 * math.exp(-95)), (0.9 * math.exp(-97), 0.9)
    batch = batch_of([(-1.0, [*far]), (1.0, [(0.5, 0.5)])], torch.float32)
    outcome = run(objectives[name], batch, E_B, token_count=1)
    assert torch.isfinite(outcome.value)
    assert_close(-outcome.to_logp[1, 0], 1.0)
    assert torch.isfinite(outcome.to_logp).all()


# P3O with a part of it taken out or replaced


@pytest.mark.parametrize(
    "name, weight, kl_weights",
    [
        ("cap_without_kl", 0.8, [0, 0]),
        ("kl_without_cap", 6, [0.6, 0.6]),
        ("kl_where_signal", 0.8, [0.6, 0]),
    ],
)
def test_a_part_of_p3o_is_left_out_by_hand(name, weight, kl_weights):
    # Two tokens with rho = 3, one with A = 2 and one with A = 0, at e_B = 0.4. Those of
    # P3O are min(rho, e_B) A = 0.8, and 1 - e_B = 0.6 for both.
    batch = one_token_each([3.0, 3.0])
    batch = batch._replace(advantage=torch.tensor([[2.0], [0.0]], dtype=F64))
    _, to_logp, to_kl = run(getattr(ablations, name), batch, 0.4, token_count=1)
    assert_close(-to_logp, [[weight], [0]])
    assert_close(to_kl, [[each] for each in kl_weights])


@pytest.mark.parametrize(
    "name, log_ratio, slope",
    [
        ("importance_sampled", -12.0, -12 * math.exp(-12)),
        ("importance_sampled", 0.5, 0.5 * math.exp(0.5)),
        ("k3", -12.0, 1 - math.exp(12)),  # not clamped
        ("k3", 2.0, 1 - math.exp(-2)),
        ("clamped_k3", 10.1, 1.0),
        # It pulls a token that has become rare back, by 19,929, and a rarer one on.
        ("clamped_k3", -9.9, 1 - math.exp(9.9)),
        ("clamped_k3", -10.1, 1.0),
    ],
)
def test_an_estimate_of_the_kl_has_the_slope_of_its_formula(name, log_ratio, slope):
    # A = 0 and e_B = 0.25 leave 3/4 of the estimate. The KL of the batch is ignored.
    batch = one_token_each([math.exp(log_ratio)], advantage=0.0)
    batch = batch._replace(kl=torch.ones_like(batch.kl))
    outcome = run(getattr(ablations, name), batch, 0.25)
    assert_close(outcome.to_logp, [[0.75 * slope]])
    assert not outcome.to_kl.any()


def test_fixed_ess_takes_a_level_for_e_b():
    batch = make_batch(22)
    outcome = run(ablations.fixed_ess, batch, E_B, level=0.3)
    assert_same_outcome(outcome, expected("p3o", batch, 0.3))


def test_e_b_is_measured_over_other_things_or_its_level_is_changed_by_hand():
    # Two responses with rho = 1, 9 and rho = 1, padding. A token of the second has an
    # advantage of 0, and pi_b is not sure of it: it is no padding.
    ratio = torch.tensor([[1.0, 9.0], [1.0, 1.0]], dtype=F64)
    logp_behavior = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]], dtype=F64)
    logp, kl = logp_behavior + ratio.log(), torch.ones_like(ratio)
    advantage = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=F64)
    tokens = (logp, logp_behavior, advantage, kl)
    for name, level, options in (
        ("ess_where_signal", 25 / 41, {}),  # of the first two tokens
        ("ess_of_responses", 25 / 41, {}),  # 9 and 1: (10 / 2)^2 / (82 / 2)
        ("ess_of_mean_ratios", 0.8, {}),  # 3 and 1: (4 / 2)^2 / (10 / 2)
        ("ess_to_a_power", 0.16, {"power": 2}),  # 0.4^2
    ):
        found = getattr(ablations, name)(*tokens, E_B, **options)
        assert_close(found, LOSSES["p3o"](*tokens, level))
    # Without any advantage nothing moves the policy.
    no_signal = logp, logp_behavior, 0 * advantage, kl
    assert not ablations.ess_where_signal(*no_signal, E_B).any()


def test_recent_ess_is_the_mean_over_the_last_updates():
    recent_ess = ablations.RecentEss()
    batch = make_batch(22)
    # Of two updates at most; the second has two micro-batches.
    for own, level in ((0.9, 0.9), (0.4, 0.65), (0.4, 0.65), (0.6, 0.5)):
        outcome = run(recent_ess, batch, own, updates=2)
        assert_same_outcome(outcome, expected("p3o", batch, level))


def test_an_objective_is_tried_before_the_run_without_its_noticing():
    from train import find_objective

    find_objective("study.ablations:recent_ess", {"updates": 3.0})
    assert ablations.recent_ess.of_updates == []


def test_yoked_ess_takes_another_runs_e_b_update_by_update(tmp_path):
    path = tmp_path / "ess.json"
    path.write_text(json.dumps([0.9, 0.4]))
    yoked_ess = ablations.YokedEss()
    batch = make_batch(22)
    # Two updates of two micro-batches each, which have the e_B of their update.
    for own, recorded in ((0.71, 0.9), (0.71, 0.9), (0.72, 0.4), (0.72, 0.4)):
        outcome = run(yoked_ess, batch, own, path=str(path))
        assert_same_outcome(outcome, expected("p3o", batch, recorded))
