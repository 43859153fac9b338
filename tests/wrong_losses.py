"""Losses with one mistake each, which the tests of the losses must reject.

WRONG_LOSSES holds mistakes in loss.py and tools/objectives.py, and test_wrong_losses.py
checks that they are rejected. wrong_loops.py holds mistakes in the rest of the code.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A text in the code, and a wrong one in its place."""

    where: str  # a file, or a function as "module.function"
    right: str
    wrong: str
    tests: list[str]  # the tests that must fail, each as "module.test_..."

    def made_in(self, source: str) -> str:
        """Return the source with the mistake.

        Raises LookupError unless the right text occurs exactly once: if the code
        changes, a mistake must not silently stop being one.
        """
        found = source.count(self.right)
        if found != 1:
            raise LookupError(f"{self.where} has {self.right!r} {found} times, not 1")
        return source.replace(self.right, self.wrong)


def parse(table: str) -> dict[str, Mistake]:
    """Return the mistakes of a table by their titles.

    A mistake is a block of lines: its title, where it is made, the right text after
    minus signs, the wrong text after plus signs, and the tests that must fail.
    """
    mistakes = {}
    for block in table.strip().split("\n\n"):
        title, where, *lines = block.splitlines()
        right, wrong = (
            "\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+"
        )
        tests = [line for line in lines if line[0] not in "-+"]
        mistakes[title] = Mistake(where, right, wrong, tests)
    return mistakes


WRONG_LOSSES = parse(r"""
the standard deviation is that of a population
loss.py
- reward.std(dim=-1, keepdim=True)
+ reward.std(dim=-1, keepdim=True, correction=0)
test_loss.test_group_advantage_by_hand

the group's mean is not subtracted
loss.py
- reward - reward.mean(dim=-1, keepdim=True)
+ reward
test_loss.test_group_advantage_by_hand

equal rewards do not cancel exactly
loss.py
-     reward = reward - reward[..., :1]
+
test_loss.test_a_group_of_equal_rewards_has_advantage_zero

e_B is taken over padding, too
loss.py
- ratio = log_ratio.detach()[mask].double().exp()  # (7)
+ ratio = log_ratio.detach().double().exp()  # (7)
test_loss.test_e_b_by_hand

e_B counts padding as tokens
loss.py
- torch.ones_like(ratio).sum()
+ torch.ones_like(log_ratio).sum().double()
test_loss.test_e_b_by_hand

means replace the sums
loss.py
- torch.stack([count, ratio.sum(), ratio.square().sum()])
+ torch.stack([count, ratio.mean(), ratio.square().mean()])
test_loss.test_e_b_by_hand
test_loss.test_any_split_into_ranks_and_micro_batches_gives_the_gradient_of_the_batch

sums are in float32
loss.py
- ratio = log_ratio.detach()[mask].double().exp()  # (7)
+ ratio = log_ratio.detach()[mask].float().exp()  # (7)
test_loss.test_e_b_at_80_nats

e_B has a gradient
loss.py
- ratio = log_ratio.detach()[mask].double().exp()  # (7)
+ ratio = log_ratio[mask].double().exp()  # (7)
test_loss.test_e_b_by_hand

ratios are clamped at 10 nats
loss.py
- ratio = log_ratio.detach()[mask].double().exp()  # (7)
+ ratio = log_ratio.detach()[mask].double().clamp(-10, 10).exp()  # (7)
test_loss.test_e_b_at_80_nats

the mean ratio is not squared
loss.py
- ess = ratio_sum.square() / (count * square_sum)
+ ess = ratio_sum / square_sum
test_loss.test_e_b_by_hand

the effective sample size is not normalized
loss.py
- ess = ratio_sum.square() / (count * square_sum)
+ ess = ratio_sum.square() / square_sum
test_loss.test_e_b_by_hand

e_B has a floor
loss.py
- ess.clamp(max=1.0)
+ ess.clamp(min=0.2, max=1.0)
test_loss.test_e_b_at_80_nats

rounding lifts e_B above 1
loss.py
- ess.clamp(max=1.0)
+ ess * (1 + 1e-12)
test_loss.test_e_b_is_between_one_over_the_token_count_and_one

a NaN makes e_B 1
loss.py
- ess.clamp(max=1.0)
+ ess.nan_to_num(1.0).clamp(max=1.0)
test_loss.test_e_b_is_nan_and_not_one_if_a_ratio_is_not_finite

the KL is KL(pi_b || pi_theta)
loss.py
- listed = (p * log_ratio - p + b).sum(dim=-1)
+ listed = (-b * log_ratio - b + p).sum(dim=-1)
test_loss.test_divergence_and_its_gradient_equal_the_oracle
test_loss.test_divergence_by_hand

the KL is estimated by k3 at each listed token
loss.py
- p * log_ratio - p + b
+ b * (log_ratio + (-log_ratio).exp() - 1)
test_loss.test_divergence_and_its_gradient_equal_the_oracle
test_loss.test_divergence_by_hand

the KL leaves out the bucket
loss.py
- return listed + rest
+ return listed
test_loss.test_divergence_and_its_gradient_equal_the_oracle
test_loss.test_divergence_by_hand

the bucket has no gradient
loss.py
- p_rest = (1 - p.sum(dim=-1)).clamp(min=REST_FLOOR)
+ p_rest = (1 - p.sum(dim=-1)).clamp(min=REST_FLOOR).detach()
test_loss.test_divergence_and_its_gradient_equal_the_oracle
test_loss.test_divergence_by_hand

the bucket has no floor
loss.py
- p_rest = (1 - p.sum(dim=-1)).clamp(min=REST_FLOOR)
+ p_rest = (1 - p.sum(dim=-1))
test_loss.test_divergence_and_its_gradient_equal_the_oracle

the KL has no gradient to pi_theta
loss.py
-     logp = logp.double()
+     logp = logp.detach().double()
test_loss.test_divergence_and_its_gradient_equal_the_oracle
test_loss.test_divergence_by_hand

the KL has a gradient to pi_b
loss.py
- logp_behavior.detach().double()
+ logp_behavior.double()
test_loss.test_divergence_by_hand

0 log 0 is NaN
loss.py
- torch.where(p > 0, logp - logp_behavior, 0.0)
+ logp - logp_behavior
test_loss.test_a_token_that_pi_theta_never_samples_adds_nothing

the cap is 1 / e_B
loss.py
- rho.clamp(max=e_b).detach()
+ rho.clamp(max=1 / e_b).detach()
test_loss.test_a_high_ratio_token_weighs_what_the_table_says
test_loss.test_loss_equals_the_oracle

the cap is 1
loss.py
- rho.clamp(max=e_b).detach()
+ rho.clamp(max=1.0).detach()
test_loss.test_a_high_ratio_token_weighs_what_the_table_says
test_loss.test_loss_equals_the_oracle

there is no cap
loss.py
- rho.clamp(max=e_b).detach()
+ rho.detach()
test_loss.test_a_high_ratio_token_weighs_what_the_table_says
test_loss.test_loss_equals_the_oracle

every weight is e_B
loss.py
- rho.clamp(max=e_b).detach()
+ e_b
test_loss.test_a_high_ratio_token_weighs_what_the_table_says
test_loss.test_loss_equals_the_oracle

tokens with a high ratio are dropped
loss.py
- rho.clamp(max=e_b).detach()
+ (rho * (rho < e_b)).detach()
test_loss.test_a_high_ratio_token_weighs_what_the_table_says
test_loss.test_loss_equals_the_oracle

the capped ratio has a gradient
loss.py
- rho.clamp(max=e_b).detach()
+ rho.clamp(max=e_b)
test_loss.test_a_high_ratio_token_weighs_what_the_table_says
test_loss.test_loss_equals_the_oracle

the ratio is inverted
loss.py
- (logp - logp_behavior).exp()  # (7)
+ (logp_behavior - logp).exp()  # (7)
test_loss.test_a_high_ratio_token_weighs_what_the_table_says
test_loss.test_loss_equals_the_oracle

the policy's loss has the wrong sign
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ weight * advantage * logp + (1 - e_b) * kl  # (12)
test_loss.test_on_policy_it_is_reinforce
test_loss.test_a_high_ratio_token_weighs_what_the_table_says
test_loss.test_loss_equals_the_oracle

the KL has the wrong sign
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ -weight * advantage * logp - (1 - e_b) * kl  # (12)
test_loss.test_the_kl_has_the_weight_one_minus_e_b_by_hand
test_loss.test_loss_equals_the_oracle

1 - e_B is left out
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ -weight * advantage * logp + kl  # (12)
test_loss.test_on_policy_it_is_reinforce
test_loss.test_the_kl_has_the_weight_one_minus_e_b_by_hand
test_loss.test_loss_equals_the_oracle

the KL has the weight e_B
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ -weight * advantage * logp + e_b * kl  # (12)
test_loss.test_on_policy_it_is_reinforce
test_loss.test_the_kl_has_the_weight_one_minus_e_b_by_hand
test_loss.test_loss_equals_the_oracle

the KL has no gradient
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ -weight * advantage * logp + (1 - e_b) * kl.detach()  # (12)
test_loss.test_the_kl_has_the_weight_one_minus_e_b_by_hand
test_loss.test_loss_equals_the_oracle

k3 replaces the KL
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ -weight * advantage * logp + (1 - e_b) * (rho.log() + 1 / rho - 1)  # (12)
test_loss.test_the_kl_has_the_weight_one_minus_e_b_by_hand
test_loss.test_loss_equals_the_oracle

the loss is a mean of means
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ (-weight * advantage * logp + (1 - e_b) * kl) / (logp != 0).sum(-1, True)  # (12)
test_loss.test_on_policy_it_is_reinforce
test_loss.test_loss_equals_the_oracle

the loss is the mean of the micro-batch
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ (-weight * advantage * logp + (1 - e_b) * kl).mean()  # (12)
test_loss.test_any_split_into_ranks_and_micro_batches_gives_the_gradient_of_the_batch
test_loss.test_loss_equals_the_oracle

the loss is zero
loss.py
- -weight * advantage * logp + (1 - e_b) * kl  # (12)
+ 0 * (-weight * advantage * logp + (1 - e_b) * kl)  # (12)
test_loss.test_on_policy_it_is_reinforce
test_loss.test_loss_equals_the_oracle

gspo's ratio is the product of a response's ratios
tools/objectives.py
- ratio = (log_rho / length)
+ ratio = log_rho
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

gspo counts padding
tools/objectives.py
- is_token = advantage != 0
+ is_token = advantage == advantage
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

cispo's eps_high is the cap
tools/objectives.py
- C=1 + eps_high
+ C=eps_high
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

dapo clips at the same distance on both sides
tools/objectives.py
- ratio.clamp(1 - eps_low, 1 + eps_high)
+ ratio.clamp(1 - eps_low, 1 + eps_low)
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

m2po drops tokens on both sides of rho = 1
tools/objectives.py
- (advantage * log_rho).detach() > 0
+ advantage != 0
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

tis has no stop-gradient
tools/objectives.py
- rho.clamp(max=C).detach()
+ rho.clamp(max=C)
test_objectives.test_on_a_fresh_batch_every_objective_is_reinforce

ipo considers the sign of A
tools/objectives.py
- (logp.exp() - logp_behavior.exp()).abs() <= eps
+ (logp.exp() - logp_behavior.exp()) * advantage.sign() <= eps
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

ipo's KL leaves dropped tokens out
tools/objectives.py
- log_rho.square()
+ log_rho.square() * is_near
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

ipo drops a token after its ratio has overflowed
tools/objectives.py
- -log_rho.where(is_near, 0.0).exp()
+ -log_rho.exp()
test_objectives.test_a_rule_has_a_finite_gradient_even_if_a_ratio_overflows

sequence_mask caps the ratio of a response
tools/objectives.py
- torch.where(w <= cap, w, 0.0)
+ w.clamp(max=cap)
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

sequence_mask looks at single tokens
tools/objectives.py
- w = log_w.exp()
+ w = (logp.detach() - logp_behavior).exp()
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

dppo_tv drops a token whatever the sign of A
tools/objectives.py
- (moved <= eps)
+ (moved.abs() <= eps)
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

dppo_tv compares ratios instead of probabilities
tools/objectives.py
- moved = (logp.exp() - logp_behavior.exp())
+ moved = (rho - 1)
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

icepop caps a high ratio
tools/objectives.py
- torch.where((rho >= low) & (rho <= high), rho, 0.0)
+ torch.where(rho >= low, rho.clamp(max=high), 0.0)
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

vespo takes the geometric mean of a response's ratios
tools/objectives.py
- log_w.clamp(math.log(1e-8), 20.0)
+ (log_w / _).clamp(math.log(1e-8), 20.0)
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

vespo does not clamp
tools/objectives.py
- log_w = log_w.clamp(math.log(1e-8), 20.0)  # [N, 1]
+
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

opsm drops responses with A > 0
tools/objectives.py
- (advantage >= 0) |
+
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic

opsm sums over a response
tools/objectives.py
- -total / length <= delta
+ -total <= delta
test_objectives.test_the_weights_of_a_rule_by_plain_arithmetic
""")
