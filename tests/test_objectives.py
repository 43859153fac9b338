"""Test the objectives that P3O is compared with, and P3O with one element replaced.

The objectives are in loss.py, tools/objectives.py and study/ablations.py. Their weights
are worked out by hand. rho is 1 for a fresh token, and A is the advantage.
"""

import math
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from conftest import ROOT
from loss_batches import (
    F64,
    Batch,
    assert_close,
    assert_same_outcome,
    make_batch,
    one_token_each,
    run,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from loss import LOSSES, effective_sample_size, p3o, ratio_sums
from study import ablations
from tools import objectives as objectives_module
from train import find_objective

torch.set_num_threads(1)
E_B = 0.4  # No objective of tools/objectives.py uses it.
Objectives = dict[str, Callable[..., Tensor]]

# A block is a rule with its options, comments, and the responses of a batch. A response
# is its advantage, a colon, and its tokens, each as pi_theta / pi_b -> its weight on
# grad log pi_theta.
WEIGHTS = """
reinforce
2: 0.9 / 0.1 -> 2, 0.1 / 0.9 -> 2
-0.5: 0.9 / 0.1 -> -0.5

grpo
# The range is 0.8 to 1.2. A rho of 1.25 is clipped if A > 0, one of 0.75 if A < 0.
2: 0.5 / 0.4 -> 0, 0.46 / 0.4 -> 1.15 * 2, 0.3 / 0.4 -> 0.75 * 2
-0.5: 0.9 / 0.1 -> 9 * -0.5, 0.34 / 0.4 -> 0.85 * -0.5, 0.3 / 0.4 -> 0

grpo eps=0.4
2: 0.5 / 0.4 -> 1.25 * 2, 0.6 / 0.4 -> 0

dapo
# The range is 0.8 to 1.28.
2: 0.5 / 0.4 -> 1.25 * 2, 0.52 / 0.4 -> 0
-0.5: 0.34 / 0.4 -> 0.85 * -0.5, 0.3 / 0.4 -> 0

dapo eps_low=0.4, eps_high=0.1
2: 0.46 / 0.4 -> 0
-0.5: 0.3 / 0.4 -> 0.75 * -0.5

gspo
# The geometric means of the ratios are 1, 2, 2 and 6. The range is 0.9997 to 1.0004.
2: 0.4 / 0.1 -> 2, 0.1 / 0.4 -> 2
1.5: 0.8 / 0.2 -> 0, 0.3 / 0.3 -> 0
-0.5: 0.8 / 0.2 -> 2 * -0.5, 0.3 / 0.3 -> 2 * -0.5
-0.7: 0.6 / 0.1 -> 6 * -0.7

gspo eps_low=0.2, eps_high=0.3
2: 0.5 / 0.4 -> 1.25 * 2
1.5: 0.54 / 0.4 -> 0
-0.5: 0.34 / 0.4 -> 0.85 * -0.5
-0.7: 0.3 / 0.4 -> 0

cispo
2: 0.6 / 0.1 -> 5 * 2, 0.45 / 0.1 -> 4.5 * 2, 0.2 / 0.4 -> 0.5 * 2
-0.5: 0.6 / 0.1 -> 5 * -0.5

cispo eps_high=0.5
2: 0.4 / 0.2 -> 1.5 * 2

tis
2: 0.6 / 0.2 -> 2 * 2, 0.3 / 0.2 -> 1.5 * 2
-0.5: 0.6 / 0.2 -> 2 * -0.5, 0.1 / 0.2 -> 0.5 * -0.5

tis C=1
2: 0.3 / 0.2 -> 1 * 2

m2po
# A log rho of 0.1, 0.2 and 0.3 has a mean square of 0.14 / 3, above tau = 0.04. Without
# the third it is 0.05 / 2. The fourth moved against its advantage.
1: 0.2 * exp(0.1) / 0.2 -> exp(0.1)
1: 0.2 * exp(0.2) / 0.2 -> exp(0.2)
1: 0.2 * exp(0.3) / 0.2 -> 0
-1: 0.2 * exp(0.5) / 0.2 -> -exp(0.5)

m2po tau=0.3
# The mean square is 0.37, and 0.25 without the second.
1: 0.2 * exp(0.5) / 0.2 -> exp(0.5), 0.2 * exp(0.7) / 0.2 -> 0

a3po
# pi_prox is the geometric mean of pi_theta and pi_b, so rho is split into two factors:
# 1.5, 1.2, 0.5 and 0.8. The second is clipped to 0.6 to 1.4. A token is dropped if the
# first is above 5, as 6 is, and 4 is not.
2: 0.9 / 0.4 -> 0, 0.36 / 0.25 -> 1.44 * 2
-0.5: 0.1 / 0.4 -> 0, 0.16 / 0.25 -> 0.64 * -0.5
-0.7: 0.9 / 0.025 -> 0, 0.64 / 0.04 -> 16 * -0.7

a3po alpha=0.75, eps=0.2, cap=1.5
# The factors are 1.1^3 and 1.1, then 0.9^3 and 0.9, 0.7^3 and 0.7, 1.25^3 and 1.25.
2: 0.1 * 1.1**4 / 0.1 -> 1.1**4 * 2
-0.5: 0.9**4 / 1 -> 0.9**4 * -0.5, 0.7**4 / 1 -> 0, 0.1 * 1.25**4 / 0.1 -> 0

bapo
# A > 0 contributes 1.2 and A < 0 only 0.7, so the range stays 0.6 to 1.2.
1: 0.25 / 0.2 -> 0
-1: 0.14 / 0.2 -> -0.7

bapo
# A > 0 contributes 1.2 + 1.2 and A < 0 0.8 + 2.55, which is more. The lower bound rises
# to its maximum, 0.9, and A < 0 contributes 0.9 + 2.55 = 3.45. The upper bound rises
# until A > 0 contributes as much: 1.6 + 1.9, so it is 1.9.
1: 0.32 / 0.2 -> 1.6
1: 0.6 / 0.2 -> 0
-1: 0.16 / 0.2 -> 0
-1: 0.51 / 0.2 -> -2.55

bapo target=0.4
# If the upper bound is 1.3, the share of A > 0 is 1.3 / 3.3 = 0.39. With 1.4 it is
# 0.41.
1: 0.3 / 0.2 -> 0
-1: 0.4 / 0.2 -> -2

bapo high_max=1.5
# The share stays below 1.5 / 4.05 = 0.37.
1: 0.32 / 0.2 -> 0
-1: 0.51 / 0.2 -> -2.55

asymre
2: 0.9 / 0.1 -> 2.1
0: 0.9 / 0.1 -> 0.1
-0.5: 0.1 / 0.9 -> -0.4

asymre delta=-0.5
-0.7: 0.1 / 0.9 -> -0.2

rec
2: 0.5 / 0.4 -> 0, 0.46 / 0.4 -> 2, 0.3 / 0.4 -> 2
-0.5: 0.5 / 0.4 -> -0.5, 0.34 / 0.4 -> -0.5, 0.3 / 0.4 -> 0

rec eps=0.4
2: 0.5 / 0.4 -> 2, 0.6 / 0.4 -> 0

opmd
# The derivative of 0.1 (log rho)^2 is 0.2 log rho.
2: 0.3 / 0.1 -> 2 - 0.2 * log(3)
0: 0.1 / 0.4 -> 0.2 * log(4)

opmd tau=1
-0.5: 0.3 / 0.1 -> -0.5 - log(3)

sapo
# A sigmoid s(x) has the derivative s (1 - s) = 1 / (4 cosh(x / 2)^2). Here x is rho - 1
# if A > 0, and 1.05 (rho - 1) if A < 0.
2: 0.3 / 0.1 -> 3 / cosh(1)**2 * 2, 0.2 / 0.4 -> 0.5 / cosh(0.25)**2 * 2
-0.5: 0.3 / 0.1 -> 3 / cosh(1.05)**2 * -0.5

sapo tau_pos=0.5, tau_neg=2
2: 0.3 / 0.1 -> 3 / cosh(0.5)**2 * 2
-0.5: 0.2 / 0.1 -> 2 / cosh(1)**2 * -0.5

ipo
# A rise of 0.4 and a fall of 0.35 are above 0.3, whatever the sign of A. A rise of 0.2
# and a fall of 0.25 are not.
2: 0.65 / 0.25 -> 0, 0.05 / 0.4 -> 0, 0.3 / 0.1 -> 3 * 2
-0.5: 0.65 / 0.25 -> 0, 0.1 / 0.35 -> 0.1 / 0.35 * -0.5

ipo eps=0.15, kl_tau=0.05
# The rise of 0.2 is above 0.15. The derivative of 0.05 (log rho)^2 is 0.1 log rho. It
# counts for every token, with or without an advantage.
2: 0.3 / 0.1 -> -0.1 * log(3)
0: 0.05 / 0.2 -> 0.1 * log(4)

sequence_mask
# 4 x 0.5 = 2 stays, though one ratio is 4. 2 x 1.75 = 3.5 is above 3, though no ratio
# is. 0.1 stays, as there is no lower bound.
1.5: 0.4 / 0.1 -> 2 * 1.5, 0.2 / 0.4 -> 2 * 1.5
-0.7: 0.4 / 0.2 -> 0, 0.7 / 0.4 -> 0
-0.9: 0.05 / 0.5 -> 0.1 * -0.9

sequence_mask cap=1.5
1.5: 0.4 / 0.25 -> 0

dppo_tv
# A rise of 0.25 is dropped if A > 0, and a fall of 0.25 if A < 0. One of 0.15 stays,
# though rho is 4. One of 0.196 stays too, but its rho of 50 is capped.
2: 0.35 / 0.1 -> 0, 0.2 / 0.05 -> 4 * 2, 0.2 / 0.004 -> 20 * 2, 0.1 / 0.35 -> 0.2 / 0.35
-0.5: 0.35 / 0.1 -> 3.5 * -0.5, 0.2 / 0.45 -> 0, 0.05 / 0.2 -> 0.25 * -0.5

dppo_tv eps=0.1, cap=1.5
2: 0.2 / 0.05 -> 0, 0.1 / 0.05 -> 1.5 * 2

icepop
# The ratios are 0.4, 0.6, 6 and 4.8. The range is 0.5 to 5.
2: 0.2 / 0.5 -> 0, 0.3 / 0.5 -> 0.6 * 2
-0.5: 0.6 / 0.1 -> 0, 0.48 / 0.1 -> 4.8 * -0.5

icepop low=0.9, high=1.2
2: 0.4 / 0.5 -> 0, 0.13 / 0.1 -> 0

vespo
# w is 4 x 0.5 = 2 for the first response and 0.5 for the second.
1.5: 0.4 / 0.1 -> 2**2 * exp(-3) * 1.5, 0.2 / 0.4 -> 2**2 * exp(-3) * 1.5
-0.9: 0.3 / 0.6 -> 0.5**3 * exp(2 * 0.5) * -0.9

vespo k_pos=1.5, lambda_pos=0.5, k_neg=0.25, lambda_neg=1.25
1.5: 0.3 / 0.6 -> 0.5**1.5 * exp(0.25) * 1.5
-0.7: 0.3 / 0.6 -> 0.5**0.25 * exp(0.625) * -0.7

vespo k_neg=0.01, lambda_neg=1e-9
# log w = -60 is clamped to log 1e-8, and log w = 60 to 20. k and lambda are so small
# here that neither weight is 0.
-1: exp(-60) / 1 -> -(1e-8**0.01)
-1: 1 / exp(-60) -> -exp(0.2 + 1e-9 * (1 - exp(20)))

opsm
# The mean of log(pi_b / pi_theta) is log(4) / 2 = 0.69 in responses 1 and 2 and
# log(2) / 2 = 0.35 in the third. Only the second is dropped. The others have GRPO's
# weights: rho = 0.5 with A < 0 and rho = 1.25 with A > 0 are clipped.
2: 0.1 / 0.4 -> 0.25 * 2, 0.3 / 0.3 -> 1 * 2
-0.5: 0.1 / 0.4 -> 0, 0.3 / 0.3 -> 0
-0.7: 0.2 / 0.4 -> 0, 0.3 / 0.3 -> -0.7
0.9: 0.5 / 0.4 -> 0

opsm eps=0.26, delta=0.3
# rho = 0.75 is above 1 - 0.26, and -log 0.75 = 0.29. -log 0.7 is 0.36.
-0.7: 0.3 / 0.4 -> 0.75 * -0.7
-0.7: 0.28 / 0.4 -> 0
"""
CASES = re.sub("(?m)^#.*\n", "", WEIGHTS).strip().split("\n\n")
NAMES = sorted({case.split()[0] for case in CASES})


def by_name(module: ModuleType) -> Objectives:
    """Return the objectives of loss.py and those of tools/objectives.py by name."""
    return {name: LOSSES.get(name) or getattr(module, name) for name in NAMES}


@pytest.fixture(scope="session")
def objectives() -> Objectives:
    """Return the objectives under test; test_wrong_losses.py passes wrong ones."""
    return by_name(objectives_module)


@pytest.mark.parametrize("name", NAMES)
def test_on_a_fresh_batch_every_objective_is_reinforce(objectives, name):
    # The gradient is -A / |B|, and that of the KL is 0. AsymRE adds 0.1 to the A of
    # every token, even if A is 0.
    batch = make_batch(3)
    batch = batch._replace(logp=batch.logp_behavior)
    _, to_logp, to_kl = run(objectives[name], batch, E_B)
    shift = 0.1 if name == "asymre" else 0.0
    advantage = (batch.advantage + shift) * batch.mask
    assert_close(to_logp, -advantage / batch.mask.sum(), 1e-12)
    assert not to_kl.any()


# The numbers of a token: pi_theta / pi_b -> its weight on grad log pi_theta.
TOKEN = re.compile(r"([^,]+?) / ([^,]+?) -> ([^,]+)")
MATH = dict(vars(math))  # The numbers are expressions, such as 2 * exp(0.1).


def batch_of(responses: str, dtype: torch.dtype = F64) -> tuple[Batch, Tensor]:
    """Return the batch of these responses, and the weights of its tokens.

    Each line is a response: its advantage, a colon and its tokens. Padding is 0.
    """
    columns = []
    for line in responses.splitlines():
        advantage, tokens = line.split(":")
        rows = [[eval(x, MATH) for x in row] for row in TOKEN.findall(tokens)]
        pi, pi_b, weight = torch.tensor(rows, dtype=F64).T
        one = torch.ones_like(pi)
        # No rule uses the KL, which is 1 here.
        columns.append((pi.log(), pi_b.log(), float(advantage) * one, one, weight))
    *fields, weight = (
        pad_sequence(column, batch_first=True) for column in zip(*columns, strict=True)
    )
    mask = fields[-1] > 0
    return Batch(*(field.to(dtype) for field in fields), mask), weight[mask]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.splitlines()[0])
def test_the_weights_of_a_rule_by_plain_arithmetic(objectives, case):
    rule, responses = case.split("\n", 1)
    options = {name: float(x) for name, x in re.findall(r"(\w+)=([^,]+)", rule)}
    batch, weights = batch_of(responses)
    outcome = run(objectives[rule.split()[0]], batch, E_B, token_count=1, **options)
    assert_close(-outcome.to_logp[batch.mask], weights)
    assert not outcome.to_logp[~batch.mask].any()
    assert not outcome.to_kl.any()


# The rules whose weights have a bound, or are 0 for a token that has moved this far.
@pytest.mark.parametrize(
    "name", ["ipo", "sequence_mask", "dppo_tv", "icepop", "vespo", "opsm"]
)
def test_a_rule_has_a_finite_gradient_even_if_a_ratio_overflows(objectives, name):
    # e^95 is infinite in float32. The mean of log(pi_b / pi_theta) over the response is
    # (97 - 95) / 2 = 1, so opsm drops it. ipo drops both tokens.
    far = "-1: 0.9 / 0.9 * exp(-95) -> 0, 0.9 * exp(-97) / 0.9 -> 0"
    batch, _ = batch_of(f"{far}\n1: 0.5 / 0.5 -> 1", torch.float32)
    outcome = run(objectives[name], batch, E_B, token_count=1)
    assert torch.isfinite(outcome.value)
    assert_close(-outcome.to_logp[1, 0], 1.0)
    assert torch.isfinite(outcome.to_logp).all()


# P3O with one element removed or replaced


@pytest.mark.parametrize(
    "name, weight, kl_weights",
    [
        ("cap_without_kl", 0.8, [0, 0]),
        ("kl_without_cap", 6, [0.6, 0.6]),
        ("kl_where_signal", 0.8, [0.6, 0]),
    ],
)
def test_p3o_without_its_cap_its_kl_or_part_of_its_kl(name, weight, kl_weights):
    # Two tokens have rho = 3, one with A = 2 and one with A = 0, and e_B is 0.4. P3O's
    # weights are min(rho, e_B) A = 0.8 and 0, and its KL has 1 - e_B = 0.6 twice.
    batch = one_token_each([3.0, 3.0])
    batch = batch._replace(advantage=torch.tensor([[2.0], [0.0]], dtype=F64))
    _, to_logp, to_kl = run(getattr(ablations, name), batch, 0.4, token_count=1)
    assert_close(-to_logp, [[weight], [0]])
    assert_close(to_kl, [[each] for each in kl_weights])


# The slope of an estimate of the KL at a log rho. k3 is not clamped.
SLOPES = [
    ("importance_sampled", -12, -12 * math.exp(-12)),
    ("importance_sampled", 0.5, 0.5 * math.exp(0.5)),
    ("k3", -12, 1 - math.exp(12)),
    ("k3", 2, 1 - math.exp(-2)),
]


@pytest.mark.parametrize("name, log_ratio, slope", SLOPES)
def test_an_estimate_of_the_kl_has_the_slope_of_its_formula(name, log_ratio, slope):
    # With A = 0 and e_B = 0.25 the loss is 3/4 of the estimate. `kl` is ignored.
    batch = one_token_each([math.exp(log_ratio)], advantage=0.0)
    batch = batch._replace(kl=torch.ones_like(batch.kl))
    outcome = run(getattr(ablations, name), batch, 0.25)
    assert_close(outcome.to_logp, [[0.75 * slope]])
    assert not outcome.to_kl.any()


def test_other_numbers_in_place_of_e_b():
    # The first response has rho = 1 and 9, the second rho = 1 and padding. The products
    # are 9 and 1, whose e_B is (10 / 2)^2 / (82 / 2).
    ratio = torch.tensor([[1.0, 9.0], [1.0, 1.0]], dtype=F64)
    logp_behavior = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]], dtype=F64)
    logp, kl = logp_behavior + ratio.log(), torch.ones_like(ratio)
    advantage = torch.tensor([[1.0, 1.0], [-0.5, 0.0]], dtype=F64)
    tokens = (logp, logp_behavior, advantage, kl)
    found = ablations.ess_of_responses(*tokens, E_B)
    assert_close(found, p3o(*tokens, 25 / 41))
    found = ablations.fixed_ess(*tokens, E_B, level=0.3)
    assert_close(found, p3o(*tokens, 0.3))


class Counting:
    """An objective that counts its calls."""

    calls = 0

    def __call__(self, logp, logp_behavior, advantage, *others):
        self.calls += 1
        return -advantage * logp


counting = Counting()


def detached(logp, *others):
    return others[0] - logp.detach()


def exchanged(logp_behavior, logp, *others):
    return LOSSES["grpo"](logp, logp_behavior, *others)


def test_find_objective_tries_a_copy_and_leaves_the_objective_unchanged():
    found = find_objective("test_objectives:counting", {})
    assert counting.calls == 0
    found(*torch.zeros(4, 1, 1), 1.0)
    assert counting.calls == 1


def test_the_function_on_the_page_about_cs336_is_p3o_with_the_sampled_kl():
    code = (ROOT / "docs/cs336.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(code, names)
    batch = make_batch(7)
    e_b = effective_sample_size(ratio_sums(batch.log_ratio, batch.mask)).item()

    def page_objective(logp, logp_behavior, advantage, kl, e_b):
        loss, metrics = names["compute_policy_gradient_loss"](
            advantage[:, 0],
            logp,
            old_log_probs=logp_behavior,
            response_mask=batch.mask,
        )
        assert_close(metrics["ess"], e_b)
        return loss

    right = run(ablations.importance_sampled, batch, e_b)
    assert_same_outcome(run(page_objective, batch, e_b), right)
