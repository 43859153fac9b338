"""Losses with one mistake each, which the tests of the loss must reject.

`P3O` is a complete loss of the four functions of loss.py, right, in steps. A mistake is
a subclass that replaces a step. WRONG has them by what is wrong: an object that can
stand where loss.py does in tests/test_loss.py, and the tests there that must fail on
it. WRONG_OBJECTIVES is the same for experiments/objectives.py and test_objectives.py.
RIGHT is `P3O` itself, which no test may reject. test_wrong_losses.py sees to all that.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from experiments.objectives import dapo_loss, gspo, tis, tis_loss
from loss import Loss, Objective, batch_mean, check_tokens

LARGEST_LOG_RATIO = 82.0  # nats; what is beyond that is refused
SMALLEST_REST = 1e-6  # what is below that is rounding
FUNCTIONS = ("group_advantage", "effective_sample_size", "kl_divergence", "p3o_loss")


def refuse_rows(unusable: Tensor, what: str) -> None:
    """FloatingPointError with the first row that has an entry of `unusable` True."""
    if unusable.any():
        row = unusable.any(dim=1).tolist().index(True)
        raise FloatingPointError(f"{what} in response {row}")


def only_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """float64, with 0 in place of padding."""
    return torch.where(mask, values, 0.0).double()


class P3O:
    """The four functions, and the steps that a mistake replaces."""

    # (3)

    def group_advantage(self, reward: Tensor, scale: bool = True) -> Tensor:
        if reward.shape[-1] < 2:
            raise ValueError("a group of one has nothing to be compared with")
        advantage = reward - reward.mean(dim=-1, keepdim=True)
        # The mean of equal rewards may differ from them in the last bit.
        all_equal = (reward == reward[..., :1]).all(dim=-1, keepdim=True)
        advantage = advantage.masked_fill(all_equal, 0.0)
        if not scale:
            return advantage
        return advantage / (self.deviation(reward) + 1e-6)

    def deviation(self, reward: Tensor) -> Tensor:
        return reward.std(dim=-1, keepdim=True)

    # (11)

    def effective_sample_size(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        if not mask.any():
            raise ValueError("no tokens")
        refuse_rows(~log_ratio.isfinite() & mask, "a ratio is not finite")
        log_ratio = self.log_ratios_in_e_b(log_ratio, mask)
        ratio = self.up_to_a_factor(log_ratio)
        ess = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
        return torch.minimum(ess.double(), torch.ones_like(ess).double())

    def log_ratios_in_e_b(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio[mask].detach().double()

    def up_to_a_factor(self, log_ratio: Tensor) -> Tensor:
        return (log_ratio - log_ratio.max()).exp()

    # The divergence

    def kl_divergence(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        logp = logp.double()
        logp_behavior = logp_behavior.double().detach()
        rest = self.log_rest(logp)
        rest_behavior = self.log_rest(logp_behavior)
        logp = torch.cat([logp, rest], dim=-1)
        logp_behavior = torch.cat([logp_behavior, rest_behavior], dim=-1)
        return self.sum_over_outcomes(logp, logp_behavior)

    def log_rest(self, logp: Tensor) -> Tensor:
        """The log-probability of what is not listed: [..., 1]."""
        rest = 1 - logp.exp().sum(dim=-1, keepdim=True)
        return rest.clamp(min=SMALLEST_REST).log()

    def sum_over_outcomes(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        p = logp.exp()
        difference = torch.where(logp == -torch.inf, 0.0, logp - logp_behavior)
        return (p * difference - p + logp_behavior.exp()).sum(dim=-1)

    # (12)

    def p3o_loss(
        self,
        logp: Tensor,
        logp_behavior: Tensor,
        advantage: Tensor,
        mask: Tensor,
        *,
        kl: Tensor | None = None,
        ess: float | Tensor | None = None,
        token_count: int | None = None,
        kl_estimator: str = "is",
    ) -> Loss:
        if token_count is None and not mask.any():
            raise ValueError("no tokens")
        if advantage.dim() == 1:
            advantage = advantage[:, None].expand(mask.shape)
        advantage = only_tokens(self.constant_advantage(advantage), mask)
        advantage = self.advantage_of_tokens(advantage, mask)
        logp = only_tokens(logp, mask)
        log_ratio = self.log_ratio(logp, only_tokens(logp_behavior, mask))
        refuse_rows(~(log_ratio.abs() <= LARGEST_LOG_RATIO), "a ratio is too far off")
        refuse_rows(~advantage.isfinite(), "an advantage is not finite")

        ess = self.e_b(ess, log_ratio, mask)
        ratio = log_ratio.exp()
        policy_loss = -self.weight(ratio, ess) * advantage * logp
        kl = self.kl(kl, log_ratio, kl_estimator)
        loss = self.total(policy_loss, kl, ess)

        refuse_rows(~loss.isfinite() & mask, "the loss is not finite")
        mean = self.mean(loss, mask, token_count)
        stats = {
            "loss": mean.detach(),
            "policy_loss": P3O.mean(self, policy_loss, mask, token_count).detach(),
            "kl_loss": P3O.mean(self, kl, mask, token_count).detach(),
            "capped": P3O.mean(self, ratio > ess, mask, token_count).detach(),
        }
        return mean, stats

    def constant_advantage(self, advantage: Tensor) -> Tensor:
        return advantage.detach()

    def advantage_of_tokens(self, advantage: Tensor, mask: Tensor) -> Tensor:
        return advantage

    def log_ratio(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        return logp - logp_behavior.detach()

    def e_b(
        self, ess: float | Tensor | None, log_ratio: Tensor, mask: Tensor
    ) -> Tensor:
        if ess is None:
            ess = self.effective_sample_size(log_ratio, mask) if mask.any() else 1.0
        return torch.as_tensor(ess, dtype=torch.float64).detach()

    def weight(self, ratio: Tensor, ess: Tensor) -> Tensor:
        return torch.minimum(ratio, ess).detach()

    def kl(self, kl: Tensor | None, log_ratio: Tensor, kl_estimator: str) -> Tensor:
        if kl is None:
            return self.estimated_kl(log_ratio, kl_estimator)
        return kl

    def estimated_kl(self, log_ratio: Tensor, kl_estimator: str) -> Tensor:
        if kl_estimator == "k3":
            return torch.exp(-log_ratio) - 1 + log_ratio
        ratio = log_ratio.exp()
        return ratio * log_ratio - ratio + 1

    def total(self, policy_loss: Tensor, kl: Tensor, ess: Tensor) -> Tensor:
        return policy_loss + (1 - ess) * kl

    def mean(self, values: Tensor, mask: Tensor, token_count: int | None) -> Tensor:
        return only_tokens(values, mask).sum() / (token_count or mask.sum())


# Mistakes in (3) and (11)


class PopulationDeviation(P3O):
    def deviation(self, reward: Tensor) -> Tensor:
        return reward.std(dim=-1, keepdim=True, correction=0)


class PaddingInEss(P3O):
    def log_ratios_in_e_b(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, log_ratio.detach(), 0.0).flatten().double()


class EssOfFloat32(P3O):
    def up_to_a_factor(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.float().exp()


class EssOfNanIsOne(P3O):
    """The authors' code does this: a ratio that it cannot use makes the batch fresh."""

    def effective_sample_size(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        if not log_ratio[mask].isfinite().all():
            return torch.ones((), dtype=torch.float64)
        return super().effective_sample_size(log_ratio, mask)


# Mistakes in the divergence


class ReversedDivergence(P3O):
    """KL(pi_b || pi_theta)."""

    def sum_over_outcomes(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        return super().sum_over_outcomes(logp_behavior, logp)


class DivergenceWithoutRest(P3O):
    """The sum over the listed tokens, as if there were no others."""

    def sum_over_outcomes(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        return super().sum_over_outcomes(logp[..., :-1], logp_behavior[..., :-1])


class DivergenceWithoutGradient(P3O):
    def sum_over_outcomes(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        kl = super().sum_over_outcomes(logp, logp_behavior)
        # The graph stays, so that a gradient of 0 can be asked for.
        return kl.detach() + 0 * logp.exp().sum(dim=-1)


class RestWithoutGradient(P3O):
    def log_rest(self, logp: Tensor) -> Tensor:
        return super().log_rest(logp).detach()


class RestWithoutFloor(P3O):
    """Rounding can make what is not listed negative, and its logarithm NaN."""

    def log_rest(self, logp: Tensor) -> Tensor:
        return torch.log(1 - logp.exp().sum(dim=-1, keepdim=True))


# Mistakes in (12)


class CapOneOverEss(P3O):
    """As a description in circulation has it: looser as the batch gets worse."""

    def weight(self, ratio: Tensor, ess: Tensor) -> Tensor:
        return torch.minimum(ratio, 1 / ess).detach()


class CapOne(P3O):
    def weight(self, ratio: Tensor, ess: Tensor) -> Tensor:
        return ratio.clamp(max=1.0).detach()


class GradientThroughWeight(P3O):
    def weight(self, ratio: Tensor, ess: Tensor) -> Tensor:
        return torch.minimum(ratio, ess)


class GradientThroughEss(P3O):
    def log_ratios_in_e_b(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio[mask].double()

    def e_b(
        self, ess: float | Tensor | None, log_ratio: Tensor, mask: Tensor
    ) -> Tensor:
        if ess is None and mask.any():
            return self.effective_sample_size(log_ratio, mask)
        return super().e_b(ess, log_ratio, mask)


class EssOfMicroBatch(P3O):
    """As in the authors' code: the e_B that is given is not looked at."""

    def e_b(
        self, ess: float | Tensor | None, log_ratio: Tensor, mask: Tensor
    ) -> Tensor:
        return super().e_b(None, log_ratio, mask)


class EssIsOne(P3O):
    """No batch is ever stale."""

    def e_b(
        self, ess: float | Tensor | None, log_ratio: Tensor, mask: Tensor
    ) -> Tensor:
        return torch.ones((), dtype=torch.float64)


class MeanOfMeans(P3O):
    def mean(self, values: Tensor, mask: Tensor, token_count: int | None) -> Tensor:
        length = mask.sum(dim=1).clamp(min=1)
        return (only_tokens(values, mask).sum(dim=1) / length).mean()


class MeanOverPadding(P3O):
    def mean(self, values: Tensor, mask: Tensor, token_count: int | None) -> Tensor:
        return only_tokens(values, mask).sum() / (token_count or mask.numel())


class MeanOfMicroBatch(P3O):
    """The token_count that is given is not looked at."""

    def mean(self, values: Tensor, mask: Tensor, token_count: int | None) -> Tensor:
        return only_tokens(values, mask).sum() / mask.sum().clamp(min=1)


class ZeroLoss(P3O):
    def mean(self, values: Tensor, mask: Tensor, token_count: int | None) -> Tensor:
        return 0 * super().mean(values, mask, token_count)


class KlPushesAway(P3O):
    def total(self, policy_loss: Tensor, kl: Tensor, ess: Tensor) -> Tensor:
        return policy_loss - (1 - ess) * kl


class KlWeighsEss(P3O):
    """e_B in place of 1 - e_B: the fresher the batch, the stronger the pull."""

    def total(self, policy_loss: Tensor, kl: Tensor, ess: Tensor) -> Tensor:
        return policy_loss + ess * kl


class ClampedEstimate(P3O):
    """Beyond 10 nats nothing pulls a token back.

    The authors' code clamps the exponent of 1/rho alone: there it is pushed away.
    """

    def estimated_kl(self, log_ratio: Tensor, kl_estimator: str) -> Tensor:
        return super().estimated_kl(log_ratio.clamp(-10, 10), kl_estimator)


class K3ByDefault(P3O):
    def p3o_loss(
        self, *tensors: Tensor, kl_estimator: str = "k3", **keywords: Any
    ) -> Loss:
        return super().p3o_loss(*tensors, kl_estimator=kl_estimator, **keywords)


class GivenKlIgnored(P3O):
    def kl(self, kl: Tensor | None, log_ratio: Tensor, kl_estimator: str) -> Tensor:
        return self.estimated_kl(log_ratio, kl_estimator)


class GivenKlWithoutGradient(P3O):
    def kl(self, kl: Tensor | None, log_ratio: Tensor, kl_estimator: str) -> Tensor:
        if kl is None:
            return self.estimated_kl(log_ratio, kl_estimator)
        return kl.detach() + 0 * kl


class GradientThroughAdvantage(P3O):
    def constant_advantage(self, advantage: Tensor) -> Tensor:
        return advantage


class AdvantageOfLastToken(P3O):
    def advantage_of_tokens(self, advantage: Tensor, mask: Tensor) -> Tensor:
        tokens_from_here = mask.flip(1).cumsum(dim=1).flip(1)
        return torch.where(mask & (tokens_from_here == 1), advantage, 0.0)


class InvertedRatio(P3O):
    def log_ratio(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        return logp_behavior.detach() - logp


def module_like(version: P3O) -> SimpleNamespace:
    """An object with the four functions and nothing else, as a file may have them."""
    return SimpleNamespace(**{name: getattr(version, name) for name in FUNCTIONS})


RIGHT = module_like(P3O())

ORACLE = "test_loss_equals_the_oracle"
TABLE = "test_a_high_ratio_token_weighs_what_the_table_says"
PULL = "test_kl_pulls_back_to_the_behavior_policy"
DIVERGENCE = "test_divergence_and_its_gradient_equal_the_oracle"
BY_HAND = "test_divergence_by_hand"

MISTAKES: dict[str, tuple[type[P3O], list[str]]] = {
    "population standard deviation": (
        PopulationDeviation,
        ["test_group_advantage_by_hand"],
    ),
    "e_B over padding": (
        PaddingInEss,
        ["test_e_b_by_hand", "test_more_padding_changes_nothing"],
    ),
    "e_B in float32": (EssOfFloat32, ["test_e_b_at_80_nats"]),
    "e_B of a NaN is 1": (
        EssOfNanIsOne,
        ["test_a_non_finite_log_ratio_stops_with_its_response"],
    ),
    "KL(pi_b || pi_theta)": (
        ReversedDivergence,
        [DIVERGENCE, BY_HAND, "test_divergence_is_from_pi_theta_to_pi_b"],
    ),
    "the rest left out of the KL": (
        DivergenceWithoutRest,
        [DIVERGENCE, BY_HAND],
    ),
    "pi_theta detached in the KL": (
        DivergenceWithoutGradient,
        [DIVERGENCE, BY_HAND, "test_policy_and_kl_share_one_gradient_by_hand"],
    ),
    "the rest without gradient": (RestWithoutGradient, [DIVERGENCE, BY_HAND]),
    "the rest without floor": (
        RestWithoutFloor,
        ["test_divergence_of_float32_where_nearly_all_is_listed"],
    ),
    "cap 1/e_B": (CapOneOverEss, [TABLE, ORACLE]),
    "cap 1": (CapOne, [TABLE, ORACLE]),
    "no stop-gradient on the capped ratio": (
        GradientThroughWeight,
        ["test_gradient_is_a_sum_of_weighted_scores", ORACLE],
    ),
    "gradient through e_B": (
        GradientThroughEss,
        [
            "test_e_b_carries_no_gradient",
            "test_e_b_is_a_constant_in_the_gradient",
            ORACLE,
        ],
    ),
    "e_B of the micro-batch": (
        EssOfMicroBatch,
        ["test_sum_over_micro_batches_is_the_batch", "test_a_given_e_b_is_used"],
    ),
    "e_B = 1": (
        EssIsOne,
        [TABLE, ORACLE, PULL, "test_a_given_kl_has_the_weight_one_less_e_b_by_hand"],
    ),
    "mean of means": (MeanOfMeans, ["test_every_token_counts_the_same", ORACLE]),
    "mean over padding": (
        MeanOverPadding,
        ["test_every_token_counts_the_same", "test_more_padding_changes_nothing"],
    ),
    "mean of the micro-batch": (
        MeanOfMicroBatch,
        [
            "test_sum_over_micro_batches_is_the_batch",
            "test_twice_the_tokens_in_the_batch_is_half_the_weight",
        ],
    ),
    "zero loss": (ZeroLoss, ["test_on_policy_it_is_reinforce", ORACLE]),
    "sign of the KL": (
        KlPushesAway,
        [PULL, ORACLE, "test_a_given_kl_has_the_weight_one_less_e_b_by_hand"],
    ),
    "e_B instead of 1 - e_B on the KL": (
        KlWeighsEss,
        [PULL, ORACLE, "test_a_given_kl_has_the_weight_one_less_e_b_by_hand"],
    ),
    "estimated KL clamped at 10 nats": (
        ClampedEstimate,
        ["test_estimated_kl_is_not_clamped"],
    ),
    "k3 by default": (
        K3ByDefault,
        [ORACLE, PULL, "test_left_out_the_kl_is_estimated_by_is"],
    ),
    "the given KL ignored": (
        GivenKlIgnored,
        [
            "test_a_given_kl_takes_the_place_of_the_estimate",
            "test_a_given_kl_has_the_weight_one_less_e_b_by_hand",
        ],
    ),
    "the given KL without gradient": (
        GivenKlWithoutGradient,
        [
            "test_the_gradient_of_a_given_kl_flows",
            "test_policy_and_kl_share_one_gradient_by_hand",
        ],
    ),
    "advantage not detached": (
        GradientThroughAdvantage,
        ["test_advantage_is_a_constant"],
    ),
    "advantage on the last token only": (
        AdvantageOfLastToken,
        ["test_every_token_has_its_responses_advantage_by_hand", ORACLE],
    ),
    "ratio inverted": (InvertedRatio, [TABLE, ORACLE]),
}

WRONG: dict[str, tuple[SimpleNamespace, list[str]]] = {
    mistake: (module_like(version()), tests)
    for mistake, (version, tests) in MISTAKES.items()
}


# Mistakes in other objectives


def gspo_by_token(
    *tensors: Tensor, sequence_count: Any = None, **keywords: Any
) -> Loss:
    """The mean over all tokens: a long response counts more than a short one."""
    logp, logp_behavior, advantage, mask = tensors
    _, log_ratio, _ = check_tokens(logp, logp_behavior, advantage, mask)
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    sequence_log_ratio = log_ratio.sum(dim=1, keepdim=True) / length
    repeated = sequence_log_ratio.expand(mask.shape)
    nothing = torch.zeros_like(repeated)
    return dapo_loss(repeated, nothing, advantage, mask, **keywords)


def cispo_capped_at_eps(*tensors: Tensor, eps_high: float, **keywords: Any) -> Loss:
    """eps_high is the cap itself, as TRL means it, not what it exceeds 1 by."""
    return tis_loss(*tensors, C=eps_high, **keywords)


def m2po_in_every_direction(
    *tensors: Tensor, tau: float, token_count: int | None = None
) -> Loss:
    """A token on its way back to pi_b is dropped as well."""
    _, log_ratio, advantage = check_tokens(*tensors)
    mask = tensors[3]
    squares = (log_ratio[mask] ** 2).sort().values
    mean = squares.cumsum(dim=0) / torch.arange(1, len(squares) + 1)
    kept = int((mean <= tau).sum())
    dropped = log_ratio**2 > (squares[kept - 1] if kept else -1.0)
    loss = torch.where(dropped, 0.0, -log_ratio.exp() * advantage)
    return batch_mean(loss, {"capped": dropped}, mask, token_count)


# What is wrong -> (the name of the objective, the wrong one, the tests that must fail)
WRONG_OBJECTIVES: dict[str, tuple[str, Objective, list[str]]] = {
    "gspo averages over tokens": (
        "gspo",
        Objective(gspo_by_token, gspo.batch_quantities, gspo.hyper_parameters),
        ["test_gspo_averages_over_responses"],
    ),
    "cispo's eps_high is the cap": (
        "cispo",
        Objective(cispo_capped_at_eps, tis.batch_quantities, {"eps_high": 4.0}),
        ["test_a_high_ratio_token_weighs_what_the_table_says"],
    ),
    "m2po drops in every direction": (
        "m2po",
        Objective(m2po_in_every_direction, hyper_parameters={"tau": 0.04}),
        ["test_m2po_drops_by_hand"],
    ),
}
