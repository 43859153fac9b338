"""One line of a loss wrong, which the tests of the loss must reject.

WRONG_LOSSES has the mistakes in loss.py by what is wrong: the text as it is, the wrong
one in its place, and the tests of test_loss.py that must fail on it. WRONG_OBJECTIVES
is the same for tools/objectives.py and test_objectives.py. test_wrong_losses.py
sees to it that they are rejected.
"""

from pathlib import Path
from typing import NamedTuple


class Mistake(NamedTuple):
    """A text of a file, and a wrong one in its place."""

    right: str
    wrong: str
    tests: list[str]

    def made_in(self, file: Path) -> str:
        """The source of `file` with the mistake.

        LookupError unless the right text is there once: a mistake cannot silently stop
        being one when the code is changed.
        """
        source = file.read_text()
        found = source.count(self.right)
        if found != 1:
            raise LookupError(f"{file.name} has {self.right!r} {found} times, not once")
        return source.replace(self.right, self.wrong)


ORACLE = "test_loss_equals_the_oracle"
TABLE = "test_a_high_ratio_token_weighs_what_the_table_says"
RULES = "test_the_weights_of_a_rule_by_plain_arithmetic"
OVERFLOW = "test_a_rule_has_a_finite_gradient_even_if_a_ratio_overflows"
E_B = "test_e_b_by_hand"
FRESH = "test_on_policy_it_is_reinforce"
SPLIT = "test_any_split_into_ranks_and_micro_batches_gives_the_gradient_of_the_batch"
DIVERGENCE = "test_divergence_and_its_gradient_equal_the_oracle"
BY_HAND = "test_divergence_by_hand"
FLOAT32 = "test_divergence_of_float32_where_nearly_all_is_listed"
KL_WEIGHT = "test_the_kl_has_the_weight_one_less_e_b_by_hand"

# Lines of loss.py that several mistakes are about.
RATIO = "ratio = log_ratio.detach()[mask].double().exp()  # (7)"
COUNT = "float(ratio.numel())"
ESS = "ess = ratio_sum.square() / (count * square_sum)"
REST = "p_rest = (1 - p.sum(dim=-1)).clamp(min=REST_FLOOR)"
WEIGHT = "rho.clamp(max=e_b).detach()"
LOSS = "-weight * advantage * logp + (1 - e_b) * kl  # (12)"

WRONG_LOSSES = {
    # (3)
    "population standard deviation": Mistake(
        "reward.std(dim=-1, keepdim=True)",
        "reward.std(dim=-1, keepdim=True, correction=0)",
        ["test_group_advantage_by_hand"],
    ),
    "the group's mean not subtracted": Mistake(
        "reward - reward.mean(dim=-1, keepdim=True)",
        "reward",
        ["test_group_advantage_by_hand"],
    ),
    "equal rewards do not cancel exactly": Mistake(
        "    reward = reward - reward[..., :1]\n",
        "",
        ["test_a_group_of_equal_rewards_has_advantage_zero"],
    ),
    # (11)
    "e_B over padding": Mistake(
        RATIO,
        RATIO.replace("[mask]", ""),
        [E_B],
    ),
    "e_B has padding in the count of its tokens": Mistake(
        COUNT,
        "float(mask.numel())",
        [E_B],
    ),
    "means in place of sums": Mistake(
        "torch.stack([count, ratio.sum(), ratio.square().sum()])",
        "torch.stack([count, ratio.mean(), ratio.square().mean()])",
        [E_B, SPLIT],
    ),
    "sums in float32": Mistake(
        RATIO, RATIO.replace("double", "float"), ["test_e_b_at_80_nats"]
    ),
    "gradient through e_B": Mistake(
        RATIO,
        RATIO.replace(".detach()", ""),
        ["test_e_b_is_a_constant_in_the_gradient"],
    ),
    "ratios clamped at 10 nats": Mistake(
        RATIO,
        RATIO.replace("double()", "double().clamp(-10, 10)"),
        ["test_e_b_at_80_nats"],
    ),
    "the mean ratio not squared": Mistake(
        ESS,
        "ess = ratio_sum / square_sum",
        [E_B],
    ),
    "the effective sample size not normalized": Mistake(
        ESS,
        "ess = ratio_sum.square() / square_sum",
        [E_B],
    ),
    "a floor of e_B": Mistake(
        "ess.clamp(max=1.0)",
        "ess.clamp(min=0.2, max=1.0)",
        ["test_e_b_at_80_nats"],
    ),
    "e_B above 1 by rounding": Mistake(
        "ess.clamp(max=1.0)",
        "ess * (1 + 1e-12)",
        ["test_e_b_is_between_one_over_the_token_count_and_one"],
    ),
    "e_B of a NaN is 1": Mistake(
        "ess.clamp(max=1.0)",
        "ess.nan_to_num(1.0).clamp(max=1.0)",
        ["test_e_b_is_nan_and_not_one_where_a_ratio_is_not_finite"],
    ),
    # The divergence
    "KL(pi_b || pi_theta)": Mistake(
        "listed = (p * log_ratio - p + b).sum(dim=-1)",
        "listed = (-b * log_ratio - b + p).sum(dim=-1)",
        [DIVERGENCE, BY_HAND, "test_divergence_is_from_pi_theta_to_pi_b"],
    ),
    "the KL estimated by k3 at each listed token": Mistake(
        "p * log_ratio - p + b",
        "b * (log_ratio + (-log_ratio).exp() - 1)",
        [DIVERGENCE, BY_HAND],
    ),
    "the rest left out of the KL": Mistake(
        "return listed + rest", "return listed", [DIVERGENCE, BY_HAND]
    ),
    "the rest without gradient": Mistake(
        REST, REST + ".detach()", [DIVERGENCE, BY_HAND]
    ),
    "the rest without floor": Mistake(
        REST, REST.replace(".clamp(min=REST_FLOOR)", ""), [FLOAT32]
    ),
    "pi_theta detached in the KL": Mistake(
        "    logp = logp.double()\n",
        "    logp = logp.detach().double()\n",
        [DIVERGENCE, BY_HAND],
    ),
    "pi_b not detached in the KL": Mistake(
        "logp_behavior.detach().double()",
        "logp_behavior.double()",
        ["test_divergence_does_not_move_pi_b"],
    ),
    "0 log 0 is NaN": Mistake(
        "torch.where(p > 0, logp - logp_behavior, 0.0)",
        "logp - logp_behavior",
        ["test_a_token_that_pi_theta_never_samples_adds_nothing"],
    ),
    # (12)
    "cap 1/e_B": Mistake(WEIGHT, "rho.clamp(max=1 / e_b).detach()", [TABLE, ORACLE]),
    "cap 1": Mistake(WEIGHT, "rho.clamp(max=1.0).detach()", [TABLE, ORACLE]),
    "no cap": Mistake(WEIGHT, "rho.detach()", [TABLE, ORACLE]),
    "e_B itself as the weight": Mistake(WEIGHT, "e_b", [TABLE, ORACLE]),
    "a high-ratio token dropped": Mistake(
        WEIGHT, "(rho * (rho < e_b)).detach()", [TABLE, ORACLE]
    ),
    "no stop-gradient on the capped ratio": Mistake(
        WEIGHT, "rho.clamp(max=e_b)", [TABLE, ORACLE]
    ),
    "ratio inverted": Mistake(
        "(logp - logp_behavior).exp()  # (7)",
        "(logp_behavior - logp).exp()  # (7)",
        [TABLE, ORACLE],
    ),
    "sign of the policy's loss": Mistake(
        LOSS, LOSS.removeprefix("-"), [FRESH, TABLE, ORACLE]
    ),
    "sign of the KL": Mistake(LOSS, LOSS.replace("+", "-"), [KL_WEIGHT, ORACLE]),
    "1 - e_B left out": Mistake(
        LOSS, LOSS.replace("(1 - e_b) * ", ""), [FRESH, KL_WEIGHT, ORACLE]
    ),
    "e_B instead of 1 - e_B on the KL": Mistake(
        LOSS, LOSS.replace("(1 - e_b)", "e_b"), [FRESH, KL_WEIGHT, ORACLE]
    ),
    "the KL without gradient": Mistake(
        LOSS, LOSS.replace("kl", "kl.detach()"), [KL_WEIGHT, ORACLE]
    ),
    "k3 in place of the KL": Mistake(
        LOSS,
        LOSS.replace("kl", "(rho.log() + 1 / rho - 1)"),
        [KL_WEIGHT, ORACLE],
    ),
    "mean of means": Mistake(
        LOSS, f"({LOSS[:-8]}) / (logp != 0).sum(-1, True)  # (12)", [FRESH, ORACLE]
    ),
    "mean of the micro-batch": Mistake(
        LOSS, f"({LOSS[:-8]}).mean()  # (12)", [SPLIT, ORACLE]
    ),
    "zero loss": Mistake(LOSS, f"0 * ({LOSS[:-8]})  # (12)", [FRESH, ORACLE]),
}

WRONG_OBJECTIVES = {
    "gspo's ratio is the product of a response's ratios": Mistake(
        "ratio = (log_rho / length)",
        "ratio = log_rho",
        ["test_an_objective_equals_the_oracle"],
    ),
    "gspo counts padding": Mistake(
        "is_token = advantage != 0",
        "is_token = advantage == advantage",
        ["test_an_objective_equals_the_oracle"],
    ),
    "cispo's eps_high is the cap": Mistake(
        "C=1 + eps_high",
        "C=eps_high",
        ["test_an_objective_equals_the_oracle"],
    ),
    "dapo clips at the same distance on both sides": Mistake(
        "ratio.clamp(1 - eps_low, 1 + eps_high)",
        "ratio.clamp(1 - eps_low, 1 + eps_low)",
        ["test_an_objective_equals_the_oracle"],
    ),
    "m2po drops tokens on both sides of rho = 1": Mistake(
        "(advantage * log_rho).detach() > 0",
        "advantage != 0",
        ["test_m2po_and_bapo_decide_by_the_whole_batch"],
    ),
    "tis without stop-gradient": Mistake(
        "rho.clamp(max=C).detach()",
        "rho.clamp(max=C)",
        ["test_on_a_fresh_batch_every_objective_is_reinforce"],
    ),
    "ipo asks for the sign of A": Mistake(
        "(logp.exp() - logp_behavior.exp()).abs() <= eps",
        "(logp.exp() - logp_behavior.exp()) * advantage.sign() <= eps",
        [RULES],
    ),
    "ipo's KL leaves dropped tokens out": Mistake(
        "log_rho.square()", "log_rho.square() * is_near", [RULES]
    ),
    "ipo drops a token after its ratio has overflowed": Mistake(
        "-log_rho.where(is_near, 0.0).exp()", "-log_rho.exp()", [OVERFLOW]
    ),
    "sequence_mask caps the ratio of a response": Mistake(
        "torch.where(w <= cap, w, 0.0)", "w.clamp(max=cap)", [RULES]
    ),
    "sequence_mask looks at single tokens": Mistake(
        "w = log_w.exp()", "w = (logp.detach() - logp_behavior).exp()", [RULES]
    ),
    "dppo_tv drops a token whatever the sign of A": Mistake(
        "(moved <= eps)", "(moved.abs() <= eps)", [RULES]
    ),
    "dppo_tv asks for the ratio instead of the probability": Mistake(
        "moved = (logp.exp() - logp_behavior.exp())", "moved = (rho - 1)", [RULES]
    ),
    "icepop caps a high ratio": Mistake(
        "torch.where((rho >= low) & (rho <= high), rho, 0.0)",
        "torch.where(rho >= low, rho.clamp(max=high), 0.0)",
        [RULES],
    ),
    "vespo has the geometric mean of a response's ratios": Mistake(
        "log_w.clamp(math.log(1e-8), 20.0)",
        "(log_w / _).clamp(math.log(1e-8), 20.0)",
        [RULES],
    ),
    "vespo does not clamp": Mistake(
        "log_w = log_w.clamp(math.log(1e-8), 20.0)  # [N, 1]", "", [RULES]
    ),
    "opsm drops responses with A > 0": Mistake("(advantage >= 0) | ", "", [RULES]),
    "opsm sums over a response": Mistake(
        "-total / length <= delta", "-total <= delta", [RULES]
    ),
}
