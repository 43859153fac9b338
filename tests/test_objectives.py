"""The objectives that P3O is compared with, P3O with parts of it taken out, and how an
objective is found: loss.py, experiments/objectives.py, experiments/ablations.py.

As in test_loss.py: numbers by hand, an oracle in plain Python (loss_oracle.py), other
splits of the batch, extreme inputs. rho is 1 for a fresh token, A is the advantage.
"""

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_batches import (
    F64,
    TOLERANCE,
    Outcome,
    Responses,
    assert_close,
    assert_same_outcome,
    batch_of,
    expected,
    make_responses,
    one_token_each,
    run,
    run_objective,
    two_fresh_responses,
)
from loss_on_ranks import OTHER_OBJECTIVES, SIZES, batches, run_ranks
from test_loss import BOTH_DTYPES, kl_of_positions, names_response

from experiments import ablations
from loss import OBJECTIVES, Objective, effective_sample_size
from support.flags import Refused, find_objective

torch.set_num_threads(1)
EVERY_NAME = pytest.mark.parametrize("name", OTHER_OBJECTIVES)
Objectives = dict[str, Objective]


@pytest.fixture(scope="session")
def objectives() -> Objectives:
    """The objectives under test: test_wrong_losses.py calls the tests with others."""
    return OTHER_OBJECTIVES


def right_outcome(name: str, responses: Responses, **hyper_parameters: Any) -> Outcome:
    """What the oracle has for an objective; decoupled looks at logp_prox, too."""
    if name == "decoupled":
        hyper_parameters["logp_prox"] = responses.logp_prox.tolist()
    return expected(name, responses, **hyper_parameters)


def quantities_of(objective: Objective, responses: Responses) -> dict[str, Any]:
    """What only the whole batch can tell, where these responses are the whole batch."""
    batch = batch_of(responses, effective_sample_size)
    return objective.batch_quantities(batch, **objective.hyper_parameters)


# Values and gradients


@BOTH_DTYPES
@EVERY_NAME
def test_loss_equals_the_oracle(
    objectives: Objectives, name: str, dtype: torch.dtype
) -> None:
    for seed, spread in enumerate((0.02, 0.3, 0.6, 1.5)):  # from nearly fresh to stale
        responses = make_responses(seed, spread=spread, dtype=dtype)
        outcome = run_objective(objectives[name], responses)
        right = right_outcome(name, responses)
        assert_same_outcome(outcome, right, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "name, hyper_parameters",
    [
        ("grpo", {"eps": 0.4}),
        ("grpo", {"eps": 0.6}),
        ("dapo", {"eps_low": 0.1, "eps_high": 0.5}),
        ("gspo", {"eps_low": 0.2, "eps_high": 0.3}),
        ("cispo", {"eps_high": 0.5}),
        ("tis", {"C": 1.0}),
        ("decoupled", {"eps": 0.5, "c_w": 1.2}),
        ("m2po", {"tau": 0.3}),
        ("m2po", {"tau": 1e-9}),  # every token that moves away from pi_b is dropped
        ("m2po", {"tau": 1e9}),  # none is
    ],
)
def test_hyper_parameters_equal_the_oracle(
    objectives: Objectives, name: str, hyper_parameters: dict[str, float]
) -> None:
    responses = make_responses(5)
    outcome = run_objective(objectives[name], responses, **hyper_parameters)
    assert_same_outcome(outcome, right_outcome(name, responses, **hyper_parameters))


@EVERY_NAME
def test_hyper_parameters_are_the_defaults_of_the_loss(
    objectives: Objectives, name: str
) -> None:
    parameters = inspect.signature(objectives[name].loss).parameters
    for hyper_parameter, value in objectives[name].hyper_parameters.items():
        assert parameters[hyper_parameter].default == value


def test_decoupled_takes_pi_theta_for_a_proximal_policy_left_out(
    objectives: Objectives,
) -> None:
    responses = make_responses(5)
    outcome = run_objective(objectives["decoupled"], responses, logp_prox=None)
    assert_same_outcome(outcome, expected("decoupled", responses))


@EVERY_NAME
def test_an_advantage_per_token_is_taken_as_it_is(
    objectives: Objectives, name: str
) -> None:
    responses = make_responses(6)
    advantage = torch.linspace(-2, 2, 56, dtype=F64).view(8, 7)
    advantage = advantage.masked_fill(~responses.mask, math.nan)
    responses = responses._replace(advantage=advantage)
    outcome = run_objective(objectives[name], responses)
    assert_same_outcome(outcome, right_outcome(name, responses))


@EVERY_NAME
def test_every_token_has_its_responses_advantage(
    objectives: Objectives, name: str
) -> None:
    responses = make_responses(7)
    spread_out = responses.advantage[:, None].expand(responses.mask.shape)
    one_each = run_objective(objectives[name], responses)
    one_a_token = run_objective(
        objectives[name], responses._replace(advantage=spread_out)
    )
    assert_same_outcome(one_each, one_a_token, 1e-12)


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
        ("decoupled", 5, -5),
        # (log 10)^2 = 5.3 is above 0.04, if the token moves away from pi_b.
        ("m2po", 0, -10),
    ],
)
def test_a_high_ratio_token_weighs_what_the_table_says(
    objectives: Objectives, name: str, positive: float, negative: float
) -> None:
    # The weight on grad log pi_theta of a token with rho = 10, for A = 1 and A = -1.
    for advantage, weight in ((1.0, positive), (-1.0, negative)):
        responses = one_token_each([10.0], advantage)
        gradient = run_objective(objectives[name], responses).gradient
        assert_close(-gradient, [[weight]])


@EVERY_NAME
def test_on_a_fresh_batch_every_objective_is_reinforce(
    objectives: Objectives, name: str
) -> None:
    # Two responses of one length, so that gspo's mean is over the same, too. A = 3 and
    # -2, four tokens: the gradient is -A / 4.
    responses = two_fresh_responses([3.0, -2.0], lengths=(2, 2))
    gradient = run_objective(objectives[name], responses).gradient
    assert_close(gradient, [[-0.75, -0.75, 0], [0.5, 0.5, 0]], 1e-12)


def test_on_a_fresh_batch_p3o_is_reinforce() -> None:
    responses = make_responses(3)
    fresh = responses._replace(logp=responses.logp_behavior)
    p3o = run_objective(OBJECTIVES["p3o"], fresh)
    assert_same_outcome(p3o, run_objective(OBJECTIVES["reinforce"], fresh), 1e-12)


def test_gspo_averages_over_responses(objectives: Objectives) -> None:
    # Fresh responses of 2 and 3 tokens, A = 1 and 0: the loss of a response is -A,
    # however long it is, so -(1 + 0) / 2. Each of its tokens has an equal share.
    responses = two_fresh_responses([1.0, 0.0], lengths=(2, 3))
    value, gradient, _ = run_objective(objectives["gspo"], responses)
    assert_close(value, -0.5)
    assert_close(gradient, [[-0.25, -0.25, 0], [0, 0, 0]])


# A = 1 and log rho = 0.1, 0.2, 0.3, 0.4 have the squares 0.01, 0.04, 0.09, 0.16, with
# the running means 0.01, 0.025, 0.0467, 0.075.
RISING = [math.exp(x) for x in (0.1, 0.2, 0.3, 0.4)]


def test_m2po_drops_by_hand(objectives: Objectives) -> None:
    # Two of the four stay at tau = 0.04. log rho = -0.9 leads back to pi_b, and stays.
    responses = one_token_each([*RISING, math.exp(-0.9)])
    _, gradient, stats = run_objective(objectives["m2po"], responses)
    weights = [math.exp(0.1), math.exp(0.2), 0, 0, math.exp(-0.9)]
    assert_close(-5 * gradient[:, 0], weights)
    assert_close(stats["capped"], 2 / 5)


@pytest.mark.parametrize("tau", [0.04, 0.06])
def test_m2po_treats_equal_tokens_equally(objectives: Objectives, tau: float) -> None:
    # The squares are 0.01, 0.09, 0.09, with the running means 0.01, 0.05, 0.0633. At
    # tau = 0.06 two would fit, but which of the equal ones? Both go.
    responses = one_token_each([math.exp(x) for x in (0.1, 0.3, 0.3)])
    gradient = run_objective(objectives["m2po"], responses, tau=tau).gradient
    assert_close(-3 * gradient[:, 0], [math.exp(0.1), 0, 0])


def test_the_cutoff_of_m2po_lies_halfway_between_kept_and_dropped() -> None:
    # Squares of 0.04 and 0.09: so rounding in another micro-batch flips no token.
    objective = OTHER_OBJECTIVES["m2po"]
    quantities = quantities_of(objective, one_token_each(RISING))
    assert_close(quantities["cutoff"], 0.065)


@pytest.mark.parametrize(
    "ratio, weight",
    [
        (2.2, 2.2),  # pi_theta = 0.44: 1.1 times pi_prox, inside 1 +- 0.2
        (2.6, 0.0),  # pi_theta = 0.52: 1.3 times pi_prox is clipped
    ],
)
def test_decoupled_clips_around_the_proximal_policy(
    objectives: Objectives, ratio: float, weight: float
) -> None:
    # pi_b = 0.2 and pi_prox = 0.4, so the weight of the clipped loss is 2.
    prox = torch.full((1, 1), math.log(0.4), dtype=F64)
    responses = one_token_each([ratio])._replace(logp_prox=prox)
    gradient = run_objective(objectives["decoupled"], responses).gradient
    assert_close(-gradient, [[weight]])


@EVERY_NAME
def test_advantage_and_proximal_policy_are_constants(
    objectives: Objectives, name: str
) -> None:
    responses = make_responses(8)
    constants = {"advantage": responses.advantage.requires_grad_()}
    keywords = {}
    if objectives[name].takes_logp_prox:
        constants["logp_prox"] = responses.logp_prox.requires_grad_()
        keywords["logp_prox"] = constants["logp_prox"]
    value, _ = objectives[name].loss(
        responses.logp.clone().requires_grad_(),
        responses.logp_behavior,
        constants["advantage"],
        responses.mask,
        **keywords,
    )
    gradients = torch.autograd.grad(value, list(constants.values()), allow_unused=True)
    for gradient in gradients:
        assert gradient is None or not gradient.any()


@pytest.mark.parametrize(
    "name, tokens",
    [
        ("reinforce", 0),
        ("grpo", 4),  # those above 1.2
        ("dapo", 3),  # above 1.28
        ("cispo", 1),  # above 5
        ("tis", 2),  # above 2
        ("gspo", 5),  # above 1.0004: a response is one token here
        ("decoupled", 1),  # above 5, as pi_prox is pi_theta here
        # (log rho)^2 = 0.009, 0.050, 0.164, ... with the means 0.009, 0.029, 0.075, ...
        ("m2po", 3),
    ],
)
def test_capped_counts_the_tokens_that_are_cut(
    objectives: Objectives, name: str, tokens: int
) -> None:
    responses = one_token_each([0.1, 0.9, 1.1, 1.25, 1.5, 3.0, 9.0, 1.0])
    stats = run_objective(objectives[name], responses).stats
    assert float(stats["capped"]) == tokens / 8


# Splits of the batch


def test_what_the_whole_batch_tells_each_objective() -> None:
    # rho = e^0.1 ... e^0.4, A = 1, each token a response of its own.
    responses = one_token_each(RISING)
    quantities = {
        name: quantities_of(objective, responses)
        for name, objective in (OBJECTIVES | OTHER_OBJECTIVES).items()
    }
    ess = effective_sample_size(responses.log_ratio, responses.mask)
    assert quantities.pop("p3o") == {"token_count": 4, "ess": ess}
    assert quantities.pop("gspo") == {"token_count": 4, "sequence_count": 4}
    assert quantities["m2po"].keys() == {"token_count", "cutoff"}
    assert quantities.pop("m2po")["token_count"] == 4
    for name, others in quantities.items():
        assert others == {"token_count": 4}, name


def test_a_response_without_tokens_is_not_counted_by_gspo() -> None:
    responses = two_fresh_responses([1.0, 0.0], lengths=(2, 0))
    quantities = quantities_of(OTHER_OBJECTIVES["gspo"], responses)
    assert quantities == {"token_count": 2, "sequence_count": 1}


@EVERY_NAME
def test_twice_the_tokens_in_the_batch_is_half_the_weight(
    objectives: Objectives, name: str
) -> None:
    responses = make_responses(10)
    quantities = quantities_of(objectives[name], responses)
    once = run_objective(objectives[name], responses, **quantities)
    for count in ("token_count", "sequence_count"):
        if count in quantities:
            quantities[count] *= 2
    twice = run_objective(objectives[name], responses, **quantities)
    assert_close(2 * twice.value, once.value)
    assert_close(2 * twice.gradient, once.gradient)
    assert {"loss", "capped"} <= set(once.stats)
    for stat, value in once.stats.items():
        assert_close(2 * twice.stats[stat], value)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@EVERY_NAME
def test_sum_over_micro_batches_is_the_batch(
    objectives: Objectives, name: str, size: int
) -> None:
    responses = make_responses(11, spread=0.8)
    whole = run_objective(objectives[name], responses)
    quantities = quantities_of(objectives[name], responses)
    micro_batches = []
    for first in range(0, 8, size):
        micro_batch = responses.select(slice(first, first + size))
        outcome = run_objective(objectives[name], micro_batch, **quantities)
        micro_batches.append(outcome)
    assert_close(sum(micro.value for micro in micro_batches), whole.value, 1e-9)
    gradient = torch.cat([micro.gradient for micro in micro_batches])
    assert_close(gradient, whole.gradient, 1e-9)
    for stat, value in whole.stats.items():
        total = sum(float(micro.stats[stat]) for micro in micro_batches)
        assert_close(total, value, 1e-9)


@EVERY_NAME
def test_rounding_in_a_micro_batch_flips_no_token(
    objectives: Objectives, name: str
) -> None:
    # log-probabilities of another shape of micro-batch differ in the last bits.
    responses = make_responses(12)
    quantities = quantities_of(objectives[name], responses)
    outcome = run_objective(objectives[name], responses, **quantities)
    for factor in (1 - 1e-12, 1 + 1e-12):
        rounded = responses._replace(logp=responses.logp * factor)
        other = run_objective(objectives[name], rounded, **quantities)
        assert_same_outcome(other, outcome, 1e-9)


@pytest.fixture(scope="session")
def results_of_ranks(tmp_path_factory: Any) -> dict:
    return run_ranks(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("batch", ["all ranks", "half of them"])
@pytest.mark.parametrize("size", SIZES)
@EVERY_NAME
def test_sum_over_gloo_ranks_is_the_batch(
    results_of_ranks: dict, name: str, size: int, batch: str
) -> None:
    value, gradient = results_of_ranks[size, batch, name]
    right = right_outcome(name, batches()[batch])
    assert_same_outcome(Outcome(value, gradient, stats={}), right)


# Extreme and broken inputs


@BOTH_DTYPES
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logp, behavior", [(-1.0, -81.0), (-81.0, -1.0)])
@EVERY_NAME
def test_80_nats_give_the_right_answer(
    objectives: Objectives,
    name: str,
    logp: float,
    behavior: float,
    advantage: float,
    dtype: torch.dtype,
) -> None:
    responses = make_responses(14, dtype=dtype)
    responses.logp[2, 0] = logp
    responses.logp_behavior[2, 0] = behavior
    responses.advantage[2] = advantage
    outcome = run_objective(objectives[name], responses)
    assert_same_outcome(outcome, right_outcome(name, responses), TOLERANCE[dtype])
    assert all(math.isfinite(stat) for stat in outcome.stats.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -501.0])
@EVERY_NAME
def test_a_log_probability_that_cannot_be_used_stops_with_its_response(
    objectives: Objectives, name: str, bad: float
) -> None:
    responses = make_responses(15)
    responses.logp[5, 0] = bad
    with pytest.raises(FloatingPointError, match=names_response(5)):
        run_objective(objectives[name], responses)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@EVERY_NAME
def test_a_non_finite_advantage_stops_with_its_response(
    objectives: Objectives, name: str, bad: float
) -> None:
    responses = make_responses(17)
    responses.advantage[4] = bad
    with pytest.raises(FloatingPointError, match=names_response(4)):
        run_objective(objectives[name], responses)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@EVERY_NAME
def test_padding_changes_nothing(
    objectives: Objectives, name: str, junk: float
) -> None:
    responses = make_responses(18)
    padding = ~responses.mask

    def padded_with(value: float) -> Responses:
        return responses._replace(
            logp=responses.logp.masked_fill(padding, value),
            logp_behavior=responses.logp_behavior.masked_fill(padding, value),
            logp_prox=responses.logp_prox.masked_fill(padding, value),
        )

    right = run_objective(objectives[name], padded_with(-0.7))
    outcome = run_objective(objectives[name], padded_with(junk))
    assert_same_outcome(outcome, right, 1e-12)
    assert not outcome.gradient[padding].any()
    assert all(math.isfinite(stat) for stat in outcome.stats.values())
    # Nor does it in what the whole batch tells.
    ignoring = batch_of(padded_with(-0.7), effective_sample_size)
    batch = ignoring._replace(log_ratio=ignoring.log_ratio.masked_fill(padding, junk))
    hyper_parameters = objectives[name].hyper_parameters
    quantities = objectives[name].batch_quantities(batch, **hyper_parameters)
    outcome = run_objective(objectives[name], padded_with(junk), **quantities)
    assert_same_outcome(outcome, right, 1e-12)


@EVERY_NAME
def test_more_padding_changes_nothing(objectives: Objectives, name: str) -> None:
    responses = make_responses(18)
    pad = torch.nn.functional.pad
    wider = Responses(
        logp=pad(responses.logp, (0, 2), value=-2.0),
        logp_behavior=pad(responses.logp_behavior, (0, 2), value=-0.1),
        advantage=responses.advantage,
        mask=pad(responses.mask, (0, 2), value=False),
        logp_prox=pad(responses.logp_prox, (0, 2), value=-0.5),
    )
    right = run_objective(objectives[name], responses)
    value, gradient, _ = run_objective(objectives[name], wider)
    assert_close(value, right.value, 1e-12)
    assert_close(gradient[:, :-2], right.gradient, 1e-12)


@EVERY_NAME
def test_a_micro_batch_without_tokens_adds_exactly_zero(
    objectives: Objectives, name: str
) -> None:
    responses = make_responses(19)
    empty = responses._replace(mask=torch.zeros_like(responses.mask))
    quantities = quantities_of(objectives[name], responses)
    for keywords in (quantities, {"token_count": 30}):
        value, gradient, stats = run_objective(objectives[name], empty, **keywords)
        assert value == 0
        assert not gradient.any()
        assert all(float(stat) == 0 for stat in stats.values())


@EVERY_NAME
def test_a_batch_without_tokens_is_refused(objectives: Objectives, name: str) -> None:
    responses = make_responses(20)
    empty = responses._replace(mask=torch.zeros_like(responses.mask))
    with pytest.raises(ValueError):
        run_objective(objectives[name], empty)


@EVERY_NAME
def test_one_token_is_a_batch(objectives: Objectives, name: str) -> None:
    responses = one_token_each([3.0], advantage=-0.5)
    outcome = run_objective(objectives[name], responses)
    assert_same_outcome(outcome, right_outcome(name, responses))


@EVERY_NAME
def test_bfloat16_log_probabilities_are_not_subtracted_in_bfloat16(
    objectives: Objectives, name: str
) -> None:
    responses = make_responses(21, dtype=torch.bfloat16)
    outcome = run_objective(objectives[name], responses)
    right = right_outcome(name, responses)
    assert_close(outcome.value, right.value, 1e-4)
    # The gradient is handed back in bfloat16, which has 3 digits.
    assert_close(outcome.gradient, right.gradient, 1e-2)


# P3O with a part of it taken out or replaced


def run_ablation(
    ablation: Objective, responses: Responses, **hyper_parameters: Any
) -> Outcome:
    """An ablation as the trainer runs it, on a batch with a KL at each position."""
    hyper_parameters = ablation.hyper_parameters | hyper_parameters
    batch = batch_of(responses, effective_sample_size)
    keywords = hyper_parameters | ablation.batch_quantities(batch, **hyper_parameters)
    if ablation.takes_kl:
        keywords["kl"] = kl_of_positions(responses)
    return run(ablation.loss, responses, **keywords)


def test_cap_without_kl_is_the_first_term_of_p3o() -> None:
    responses = make_responses(22)
    no_kl = torch.zeros(responses.mask.shape).tolist()
    right = expected("p3o", responses, kl=no_kl)
    assert_same_outcome(run_ablation(ablations.cap_without_kl, responses), right)


def test_kl_without_cap_weighs_a_token_by_its_ratio() -> None:
    # -rho A log pi_theta + (1 - e_B) KL: importance sampling without truncation, and
    # the KL, whose gradient is not with respect to logp.
    responses = make_responses(22)
    outcome = run_ablation(ablations.kl_without_cap, responses)
    untruncated = expected("tis", responses, C=math.inf)
    ess = effective_sample_size(responses.log_ratio, responses.mask)
    kl = kl_of_positions(responses)[responses.mask].mean()
    assert_close(outcome.gradient, untruncated.gradient)
    assert_close(outcome.value, untruncated.value + (1 - ess) * kl)
    assert float(outcome.stats["capped"]) == 0


@pytest.mark.parametrize(
    "ablation", ["cap_without_kl", "kl_without_cap", "fixed_ess", "ess_of_micro_batch"]
)
def test_an_ablation_can_do_without_the_kl_of_positions(ablation: str) -> None:
    # As --top_logprobs 0 has it. The KL is estimated by "is", where there is one.
    responses = make_responses(22)
    objective = getattr(ablations, ablation)
    batch = batch_of(responses, effective_sample_size)
    quantities = objective.batch_quantities(batch, **objective.hyper_parameters)
    outcome = run(objective.loss, responses, kl=None, **quantities)
    ess = float(batch.ess)
    ratio = responses.log_ratio.exp()
    cap = {"kl_without_cap": math.inf, "fixed_ess": 1.0}.get(ablation, ess)
    kl_weight = {"cap_without_kl": 0.0, "fixed_ess": 0.0}.get(ablation, 1 - ess)
    weight = ratio.clamp(max=cap) * responses.advantage[:, None]
    gradient = -weight + kl_weight * ratio * responses.log_ratio
    right = torch.where(responses.mask, gradient / responses.mask.sum(), 0.0)
    assert_close(outcome.gradient, right)


def test_k3_and_importance_sampled_estimate_the_kl_from_the_sampled_token() -> None:
    responses = make_responses(22)
    k3 = expected("p3o", responses, kl_estimator="k3")
    assert_same_outcome(run_ablation(ablations.k3, responses), k3)
    importance_sampled = expected("p3o", responses, kl_estimator="is")
    outcome = run_ablation(ablations.importance_sampled, responses)
    assert_same_outcome(outcome, importance_sampled)


def test_clamped_k3_is_k3_within_10_nats() -> None:
    responses = make_responses(22)
    outcome = run_ablation(ablations.clamped_k3, responses)
    right = expected("p3o", responses, kl_estimator="k3")
    assert_same_outcome(outcome, right)


@pytest.mark.parametrize(
    "log_ratio, slope",
    [
        (-9.9, 1 - math.exp(9.9)),  # pulls a token that has become rare back: -19,929
        (-10.1, 1.0),  # pushes it on
        (10.1, 1.0),
    ],
)
def test_clamped_k3_pushes_a_rare_token_away(log_ratio: float, slope: float) -> None:
    # A = 0 and e_B = 0.25 leave 3/4 of the derivative of the KL.
    responses = one_token_each([math.exp(log_ratio)], advantage=0.0)
    quantities = {"ess": 0.25, "token_count": 1}
    gradient = run(ablations.clamped_k3.loss, responses, **quantities).gradient
    assert_close(gradient, [[0.75 * slope]])


def test_ess_of_micro_batch_depends_on_the_micro_batches() -> None:
    # rho = 1, 1, 3, 3: e_B is (8/4)^2 / (20/4) = 0.8 for all, and 1 for each half.
    responses = one_token_each([1.0, 1.0, 3.0, 3.0])
    batch = batch_of(responses, effective_sample_size)
    quantities = ablations.ess_of_micro_batch.batch_quantities(batch)
    kl = torch.ones(4, 1, dtype=F64)

    def gradient_of(rows: slice) -> list[list[float]]:
        micro_batch = responses.select(rows)
        outcome = run(
            ablations.ess_of_micro_batch.loss,
            micro_batch,
            kl=kl[rows],
            **quantities,
        )
        return (-4 * outcome.gradient).tolist()

    assert_close(gradient_of(slice(0, 4)), [[0.8]] * 4)
    assert_close(gradient_of(slice(0, 2)), [[1.0]] * 2)
    assert_close(gradient_of(slice(2, 4)), [[1.0]] * 2)


def test_fixed_ess_takes_a_level_for_e_b() -> None:
    responses = make_responses(22)
    kl = kl_of_positions(responses).tolist()
    outcome = run_ablation(ablations.fixed_ess, responses, level=0.3)
    assert_same_outcome(outcome, expected("p3o", responses, kl=kl, ess=0.3))


def test_yoked_ess_takes_another_runs_e_b_update_by_update(tmp_path: Path) -> None:
    path = tmp_path / "ess.json"
    path.write_text(json.dumps([0.9, 0.4]))
    yoked = Objective(ablations.p3o_with_given_ess, ablations.Replayed(), takes_kl=True)
    responses = make_responses(22)
    kl = kl_of_positions(responses).tolist()
    for ess in (0.9, 0.4):
        outcome = run_ablation(yoked, responses, path=str(path))
        assert_same_outcome(outcome, expected("p3o", responses, kl=kl, ess=ess))


# How an objective is found


def test_an_objective_of_loss_py_is_found_by_its_name() -> None:
    for name in ("p3o", "reinforce", "grpo"):
        assert find_objective(OBJECTIVES, name, {}) == OBJECTIVES[name]


def test_another_objective_is_found_by_module_and_name() -> None:
    dapo = find_objective(OBJECTIVES, "experiments.objectives:dapo", {})
    assert dapo == OTHER_OBJECTIVES["dapo"]


def test_given_hyper_parameters_take_the_place_of_the_defaults() -> None:
    # A command line has text, a YAML file numbers.
    for value in ("0.5", 0.5):
        dapo = find_objective(
            OBJECTIVES, "experiments.objectives:dapo", {"eps_high": value}
        )
        assert dapo.hyper_parameters == {"eps_low": 0.2, "eps_high": 0.5}
        responses = make_responses(5)
        outcome = run_objective(dapo, responses)
        assert_same_outcome(outcome, expected("dapo", responses, eps_high=0.5))
    # The objective itself stays what it was.
    assert OTHER_OBJECTIVES["dapo"].hyper_parameters["eps_high"] == 0.28


def test_p3o_takes_the_estimator_of_its_kl() -> None:
    p3o = find_objective(OBJECTIVES, "p3o", {"kl_estimator": "k3"})
    responses = make_responses(5)
    right = expected("p3o", responses, kl_estimator="k3")
    assert_same_outcome(run_objective(p3o, responses), right)


@pytest.mark.parametrize(
    "name, given, complaint",
    [
        ("ppo", {}, "give p3o, reinforce, grpo, or module:name"),
        ("no.such.module:dapo", {}, "cannot be imported"),
        ("experiments.objectives:ppo", {}, "cannot be imported"),
        (":dapo", {}, "cannot be imported"),
        (".objectives:dapo", {}, "cannot be imported"),
        # The loss in place of the Objective that has it.
        ("experiments.objectives:dapo_loss", {}, "no Objective"),
        ("grpo", {"epsilon": 0.4}, "epsilon=0.4: grpo takes eps=0.2"),
        ("grpo", {"eps": "much"}, "eps=much: grpo takes eps=0.2"),
        ("grpo", {"eps": "nan"}, "eps=nan: grpo takes eps=0.2"),
        ("reinforce", {"eps": 0.4}, "eps=0.4: reinforce takes nothing"),
    ],
)
def test_what_cannot_be_found_or_set_is_refused(
    name: str, given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(Refused, match=complaint):
        find_objective(OBJECTIVES, name, given)
