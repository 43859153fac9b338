"""The code around the loss with one line wrong, which tests must reject.

MISTAKES has them by what is wrong: the function that has the line, the line as it is,
the wrong one in its place, and the tests that must fail on it. Each of these loops
runs, prints plausible numbers and mostly learns something.

A line that is not found, or is there twice, is an error: a mistake cannot silently stop
being one when the code is changed.
"""

import inspect
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

import pytest

import eval
import policy
import reward
import rollout
import support.checkpoints
import support.tasks
import train


class Mistake(NamedTuple):
    """One line of a function, and a wrong one in its place."""

    function: Callable
    right: str
    wrong: str
    tests: list[str]  # as "test_loop.test_...": a module of tests/, a test there

    def code(self) -> CodeType:
        """What the function would be compiled to with the wrong line."""
        source = textwrap.dedent(inspect.getsource(self.function))
        found = source.count(self.right)
        if found != 1:
            name = self.function.__qualname__
            raise LookupError(f"{name} has {self.right!r} {found} times, not once")
        names = dict(self.function.__globals__)
        exec(source.replace(self.right, self.wrong), names)
        return names[self.function.__name__].__code__

    def make(self, patch: pytest.MonkeyPatch) -> None:
        """Until `patch` is undone, the function has the wrong line.

        Its code is replaced in place, so that whoever has imported it has the mistake.
        """
        patch.setattr(self.function, "__code__", self.code())


# Tests that several mistakes fail.
EPOCHS = (
    "test_train.test_an_epoch_has_every_problem_once_and_the_next_one_another_order"
)
OWN_ANSWER = "test_loop.test_a_response_is_compared_with_the_answer_to_its_own_prompt"
OWN_GROUP = (
    "test_loop.test_the_advantage_of_a_response_is_within_the_group_of_its_own_prompt"
)
SETTINGS = "test_loop.test_a_step_samples_its_own_problems_with_the_settings_of_the_run"
NOISE = "test_loop.test_no_two_responses_of_a_run_have_the_same_noise"
ONE_MINIBATCH = "test_loop.test_a_pass_has_each_response_in_one_minibatch"
SAME_GROUPS = "test_loop.test_a_minibatch_has_the_same_groups_on_any_number_of_ranks"
HELDOUT = "test_loop.test_what_is_evaluated_is_the_policy_and_its_greedy_decoding"
HOT_POLICY = (
    "test_loop."
    "test_a_run_of_a_hot_policy_is_on_policy_at_the_temperature_of_its_rollouts"
)
LOG_SOFTMAX = (
    "test_rollout."
    "test_the_policy_gives_log_softmax_of_the_logits_at_sampled_and_top_tokens"
)
AGREE = (
    "test_rollout."
    "test_engine_and_trainer_agree_on_the_log_probability_of_every_sampled_token"
)
TOP_TOKENS = "test_rollout.test_the_engine_lists_the_likeliest_tokens_of_pi_b_in_order"
MICRO_BATCHES = "test_loop.test_micro_batches_change_neither_e_b_nor_the_gradient"
SHARED_LOGP = "test_loop.test_a_shared_prompt_changes_no_log_probability"
SHARED_GRADIENT = (
    "test_loop.test_a_shared_prompt_changes_no_gradient_and_is_computed_once"
)
WHOLE_GROUPS = (
    "test_loop.test_micro_batches_have_whole_groups_where_these_share_a_prompt"
)
FULL_MICRO_BATCHES = (
    "test_loop."
    "test_no_forward_pass_reads_more_than_micro_batch_tokens_with_shared_prompts"
)
TWICE = "test_loop.test_a_prompt_that_comes_twice_in_a_batch_makes_no_sequence_longer"
LOGP_PROX = (
    "test_loop.test_logp_prox_is_of_the_policy_before_the_first_update_on_the_batch"
)
NO_GRADIENT_LEFT = "test_loop.test_no_gradient_is_left_for_the_next_step"
CHECKPOINTING = (
    "test_loop."
    "test_gradient_checkpointing_computes_layers_twice_and_changes_no_gradient"
)
SENT_WEIGHTS = (
    "test_loop.test_the_weights_on_their_way_out_are_those_after_the_last_update"
)
RESTORED = "test_loop.test_a_resumed_trainer_makes_the_next_step_of_the_one_that_saved"
WAITING = (
    "test_resume."
    "test_a_checkpoint_brings_back_the_waiting_rollouts_with_pi_b_of_their_top_tokens"
)
SHARES = (
    "test_resume.test_joining_the_shares_of_any_number_of_ranks_gives_the_step_in_order"
)
EVALUATED = "test_eval.test_greedy_samples_are_scored_as_they_read"

MISTAKES: dict[str, Mistake] = {
    # train.py: rollouts
    "the problems of a step again in the next": Mistake(
        train.problem_numbers,
        "first = (step - 1) * cfg.prompts_per_step",
        "first = (step - 1) // 2 * cfg.prompts_per_step",
        [EPOCHS],
    ),
    "the same order in every epoch": Mistake(
        train.problem_numbers,
        "shuffled_epoch(cfg.seed, epoch, problem_count)",
        "shuffled_epoch(cfg.seed, 0, problem_count)",
        [EPOCHS],
    ),
    "the same sampling noise in every step": Mistake(
        train.sample_step,
        "first=(step - 1) * cfg.prompts_per_step",
        "first=0",
        [NOISE],
    ),
    "the same noise for neighboring prompts": Mistake(
        train.sample_step, "spacing=cfg.group_size", "spacing=1", [NOISE]
    ),
    "rollouts with the noise of the evaluation": Mistake(
        train.sample_step,
        "cfg.seed + 1,",
        "cfg.seed,",
        ["test_loop.test_the_noise_of_the_rollouts_is_not_that_of_the_evaluation"],
    ),
    "temperature ignored": Mistake(
        train.sample_step,
        "temperature=cfg.temperature",
        "temperature=1.0",
        [SETTINGS, HOT_POLICY],
    ),
    "top-p ignored": Mistake(
        train.sample_step, "top_p=cfg.top_p", "top_p=1.0", [SETTINGS]
    ),
    "every rank samples the first rank's noise": Mistake(
        train.sample_step,
        "seeds[group] for group in groups",
        "seeds[group] for group in range(len(groups))",
        [
            "test_loop."
            "test_on_two_ranks_a_step_has_the_prompts_and_the_noise_that_it_has_on_one"
        ],
    ),
    # train.py: rewards and advantages
    "the answers of the next step's problems": Mistake(
        train.add_reward,
        "problem_numbers(cfg, step, len(problems))",
        "problem_numbers(cfg, step + 1, len(problems))",
        [OWN_ANSWER],
    ),
    "advantages within other groups": Mistake(
        train.add_reward,
        "rollouts.reward.view(-1, cfg.group_size)",
        "rollouts.reward.view(cfg.group_size, -1).T",
        [OWN_GROUP],
    ),
    "advantages in another order": Mistake(
        train.add_reward, "advantage.flatten()", "advantage.T.flatten()", [OWN_GROUP]
    ),
    "scale_advantage ignored": Mistake(
        train.add_reward,
        "group_advantage(groups, cfg.scale_advantage)",
        "group_advantage(groups)",
        [OWN_GROUP],
    ),
    "the verifier of another task": Mistake(
        train.add_reward,
        "task_of(cfg.task).verifier",
        '"exact"',
        ["test_loop.test_answers_are_checked_by_the_verifier_of_the_task"],
    ),
    # train.py and support/tasks.py: prompts
    "the task's instruction left out": Mistake(
        train.load_data,
        "instruction=task_of(cfg.task).instruction",
        "instruction=None",
        ["test_loop.test_the_instruction_of_a_task_begins_every_prompt"],
    ),
    "a base model's beginning-of-sequence token left out": Mistake(
        support.tasks.encode_prompt,
        "add_special_tokens=True",
        "add_special_tokens=False",
        ["test_reward.test_the_prompt_of_a_base_model_begins_with_its_bos_token"],
    ),
    # train.py: minibatches and micro-batches
    "every minibatch of the first rows": Mistake(
        train.rows_of_minibatches,
        "groups[minibatch :: cfg.minibatches]",
        "sorted(groups)[: len(groups) // cfg.minibatches]",
        [ONE_MINIBATCH],
    ),
    "minibatches that overlap": Mistake(
        train.rows_of_minibatches,
        "groups[minibatch :: cfg.minibatches]",
        "groups[minibatch:]",
        [ONE_MINIBATCH],
    ),
    "the same minibatches in every step and pass": Mistake(
        train.rows_of_minibatches,
        'random.Random(f"{cfg.seed} {step} {pass_number}")',
        "random.Random(cfg.seed)",
        ["test_loop.test_the_minibatches_of_each_step_and_pass_are_others"],
    ),
    "minibatches that are others on each rank": Mistake(
        train.rows_of_minibatches,
        'random.Random(f"{cfg.seed} {step} {pass_number}")',
        'random.Random(f"{cfg.seed} {step} {pass_number} {dist.get_rank()}")',
        [SAME_GROUPS],
    ),
    "a group split between minibatches": Mistake(
        train.rows_of_minibatches,
        "range(first_row, first_row + cfg.group_size)",
        "[row + group % 2 for row in range(first_row, first_row + cfg.group_size)]",
        [ONE_MINIBATCH, "test_loop.test_a_minibatch_has_whole_groups"],
    ),
    "micro-batches larger than allowed": Mistake(
        train.rows_of_micro_batches,
        "(len(newest) + 1) * length[sequence] > max_tokens",
        "len(newest) * length[sequence] > max_tokens",
        ["test_loop.test_micro_batches_have_each_row_once_and_keep_to_their_size"],
    ),
    "micro-batches that divide a group whose prompt is shared": Mistake(
        train.rows_of_micro_batches,
        "sequence_of_row[row]]",
        "row]",
        [WHOLE_GROUPS],
    ),
    "micro-batches of the gradient that know nothing of shared prompts": Mistake(
        train.accumulate_gradient, "policy.sharing", "1", [FULL_MICRO_BATCHES]
    ),
    "micro-batches of log pi_prox that know nothing of shared prompts": Mistake(
        train.compute_logp_prox, "policy.sharing", "1", [FULL_MICRO_BATCHES]
    ),
    "a prompt shared by all groups that have it": Mistake(
        policy.sequence_of_response, "earlier // sharing", "0", [TWICE]
    ),
    "e_B of the first micro-batch": Mistake(
        train.accumulate_gradient,
        "gather_batch(micro_batches, logps, step)",
        "gather_batch(micro_batches[:1], logps[:1], step)",
        [MICRO_BATCHES],
    ),
    "the mean of the micro-batches' means": Mistake(
        train.accumulate_gradient,
        "(loss * dist.get_world_size()).backward()",
        "(loss * dist.get_world_size() / len(micro_batches)).backward()",
        [MICRO_BATCHES],
    ),
    "the KL of the sampled token where K tokens are asked for": Mistake(
        train.accumulate_gradient,
        'keywords["kl"] = kl',
        'keywords["kl"] = None',
        ["test_loop.test_the_objective_gets_the_kl_over_the_k_likeliest_tokens"],
    ),
    # train.py: the optimizer
    "AdamW's default weight decay": Mistake(
        train.build_optimizer,
        "weight_decay=cfg.weight_decay,",
        "",
        ["test_loop.test_weights_decay_as_configured_and_by_nothing_else"],
    ),
    "a warm-up that never ends": Mistake(
        train.build_optimizer,
        "(updates + 1) / max(1, cfg.warmup_steps)",
        "1 / max(1, cfg.warmup_steps)",
        ["test_loop.test_the_learning_rate_warms_up_and_is_constant_from_then_on"],
    ),
    "no gradient clipping": Mistake(
        train.update,
        "policy.parameters(), cfg.max_grad_norm",
        "policy.parameters(), math.inf",
        ["test_loop.test_a_gradient_is_clipped_to_max_grad_norm"],
    ),
    "gradients of the last step kept": Mistake(
        train.update, "optimizer.zero_grad()", "pass", [NO_GRADIENT_LEFT]
    ),
    "a schedule that moves once a batch": Mistake(
        train.update,
        "schedule.step()",
        "schedule.step() if not history else None",
        ["test_loop.test_every_minibatch_is_a_step_of_the_schedule"],
    ),
    "logp_prox of the policy that sampled": Mistake(
        train.update,
        "compute_logp_prox(policy, rollouts, cfg)",
        "rollouts.logp_behavior",
        [LOGP_PROX],
    ),
    "logp_prox of the policy before each minibatch": Mistake(
        train.update,
        "for rows in rows_of_minibatches(cfg, step, pass_number):",
        "for rows in rows_of_minibatches(cfg, step, pass_number):\n"
        "            rollouts.logp_prox = compute_logp_prox(policy, rollouts, cfg)",
        [LOGP_PROX],
    ),
    # train.py: main, and what it evaluates
    "policy_temperature ignored": Mistake(
        train.Run.__init__,
        "temperature=cfg.policy_temperature",
        "temperature=1.0",
        [HOT_POLICY],
    ),
    "held-out accuracy at the temperature of the rollouts": Mistake(
        train.heldout_accuracy, "cfg.policy_temperature", "cfg.temperature", [HELDOUT]
    ),
    "greedy accuracy that is sampled": Mistake(
        train.heldout_accuracy,
        '"heldout_greedy": 0.0',
        '"heldout_greedy": 1.0',
        [HELDOUT],
    ),
    "the fp8 copy of the policy evaluated": Mistake(
        train.build_engines,
        'if cfg.rollout_quantization == "none":',
        "if True:",
        ["test_loop.test_what_is_evaluated_is_never_a_quantized_copy"],
    ),
    "a queue that is one batch short": Mistake(
        train.Run.fill_queue,
        "min(step + self.cfg.lag, self.cfg.steps)",
        "min(step + max(0, self.cfg.lag - 1), self.cfg.steps)",
        ["test_train.test_a_batch_is_used_lag_steps_after_it_was_sampled"],
    ),
    # policy.py
    "logits of the position after": Mistake(
        policy.Policy.forward,
        "+ t - 1",
        "+ t",
        [LOG_SOFTMAX, AGREE],
    ),
    "the first token predicted by the response before, in a shared sequence": Mistake(
        policy.Policy.forward, "t == 0", "t < 0", [SHARED_LOGP]
    ),
    "a shared sequence that is not causal": Mistake(
        policy.shared_sequences, "sees_itself).tril()", "sees_itself)", [SHARED_LOGP]
    ),
    "responses that see each other in a shared sequence": Mistake(
        policy.shared_sequences,
        "sees_prompt | sees_itself",
        "sees_itself | True",
        [SHARED_LOGP],
    ),
    "positions that go on through the responses of a shared sequence": Mistake(
        policy.shared_sequences,
        "position_ids[sequence, place] = position",
        "position_ids[sequence, place] = place",
        [SHARED_LOGP],
    ),
    "a prompt said to be shared, and computed for each response": Mistake(
        policy.Policy.sequences,
        "return shared_sequences(rollouts, self.sharing)",
        "return own_sequences(rollouts)",
        [SHARED_GRADIENT],
    ),
    "the policy's temperature multiplied": Mistake(
        policy.chunk_log_probabilities, "/ temperature", "* temperature", [LOG_SOFTMAX]
    ),
    "the KL's K tokens shifted by one": Mistake(
        policy.Policy.forward,
        "logp[:, 1:]",
        "logp[:, :-1]",
        [LOG_SOFTMAX],
    ),
    "gradient checkpointing that cuts the gradient": Mistake(
        policy.build_policy,
        "language_model.gradient_checkpointing_enable()",
        "language_model.gradient_checkpointing_enable()\n"
        "        language_model.base_model.layers[0].register_forward_hook(\n"
        "            lambda layer, inputs, output: (output + output.detach()) / 2\n"
        "        )",
        [CHECKPOINTING],
    ),
    "gradient checkpointing left out": Mistake(
        policy.build_policy,
        "language_model.gradient_checkpointing_enable()",
        "pass",
        [CHECKPOINTING],
    ),
    "the weights of the last forward pass sent": Mistake(
        policy.full_weights, "policy.reshard()", "pass", [SENT_WEIGHTS]
    ),
    "the tied head left out of the sync": Mistake(
        policy.full_weights,
        "remove_duplicate=False",
        "remove_duplicate=True",
        [SENT_WEIGHTS],
    ),
    # rollout.py
    "the prefix cache kept over a sync": Mistake(
        rollout.Engine.sample,
        "if not self.llm.reset_prefix_cache():",
        "if False:",
        [
            "test_lost_weights."
            "test_a_sync_forgets_the_prefixes_that_the_old_weights_computed"
        ],
    ),
    "the likeliest token's log pi_b": Mistake(
        rollout.Engine.as_rollouts,
        "padded(all_logp[:, 0], mask)",
        "padded(all_logp[:, 1], mask)",
        [AGREE],
    ),
    "top tokens of another position": Mistake(
        rollout.Engine.as_rollouts,
        "padded(all_tokens[:, 1:], mask)",
        "padded(all_tokens[:, 1:].roll(1, dims=0), mask)",
        [TOP_TOKENS],
    ),
    "the sampled token for the likeliest one": Mistake(
        rollout.Engine.as_rollouts,
        "padded(all_tokens[:, 1:], mask)",
        "padded(all_tokens[:, :-1], mask)",
        [TOP_TOKENS],
    ),
    "the end of sequence left out of the mask": Mistake(
        rollout.Engine.as_rollouts,
        "mask=mask,",
        "mask=t < (response_length[:, None] - 1).clamp(min=1),",
        [
            "test_rollout."
            "test_the_end_of_sequence_token_is_part_of_the_response_and_truncated_ones_"
            "lack_it"
        ],
    ),
    "rows in another order than their texts": Mistake(
        rollout.Rollouts.select,
        "[self.text[row] for row in rows]",
        "[self.text[row] for row in sorted(rows)]",
        ["test_rollout.test_rows_keeps_the_numbers_of_each_row_and_trims_the_padding"],
    ),
    "runs whose seeds overlap": Mistake(
        rollout.noise_seeds,
        "base = random.Random(seed).getrandbits(31)",
        "base = seed",
        ["test_train.test_noise_seeds_never_repeat_in_a_run_and_differ_between_runs"],
    ),
    # reward.py
    "any word of a completion counts": Mistake(
        reward.same_words,
        "answer_part(completion).split()[-1:]",
        "answer_part(completion).split()[:1]",
        ["test_reward.test_exact_verdict"],
    ),
    "the first box counts": Mistake(
        reward.last_box,
        "if start is not None:",
        "if start is not None and not content:",
        ["test_reward.test_last_box_is_the_last_box_to_close"],
    ),
    # eval.py
    "every problem evaluated with the same noise": Mistake(
        eval.evaluate,
        "[seeds[i] for i in asked]",
        "[seeds[0] for i in asked]",
        [
            "test_eval."
            "test_the_samples_of_a_problem_do_not_depend_on_the_chunk_that_it_comes_in"
        ],
    ),
    "the counts of neighboring problems": Mistake(
        eval.evaluate,
        "counts[i] = round(sum(of_problem))",
        "counts[i - 1 if i else len(problems) - 1] = round(sum(of_problem))",
        [EVALUATED],
    ),
    "pass@k with replacement": Mistake(
        eval.pass_at_k,
        "1 - comb(n - c, k) / comb(n, k)",
        "1 - (1 - c / n) ** k",
        ["test_eval.test_pass_at_k_draws_without_replacement"],
    ),
    "an evaluation without the task's instruction": Mistake(
        eval.load_benchmarks,
        "instruction=task_of(task).instruction",
        "instruction=None",
        ["test_loop.test_an_evaluation_sends_the_prompts_that_the_training_sends"],
    ),
    # support/checkpoints.py
    "a resume that forgets the schedule": Mistake(
        support.checkpoints.load_checkpoint,
        'schedule.load_state_dict(progress["schedule"])',
        "pass",
        [RESTORED],
    ),
    "a resume that forgets the moments": Mistake(
        support.checkpoints.load_checkpoint,
        "dcp.load(state,",
        'dcp.load({"policy": weights},',
        [RESTORED],
    ),
    "a resume that forgets the weights": Mistake(
        support.checkpoints.load_checkpoint,
        "dcp.load(state,",
        'dcp.load({"optimizer": moments},',
        [RESTORED],
    ),
    "a resume that forgets the queue": Mistake(
        support.checkpoints.load_checkpoint,
        'progress["queue"]',
        "[]",
        [WAITING],
    ),
    "a resume that goes on from the oldest checkpoint": Mistake(
        support.checkpoints.load_checkpoint,
        "*older, newest = listed[0]",
        "newest, *older = listed[0]",
        [
            "test_resume."
            "test_the_last_k_checkpoints_are_kept_and_an_unfinished_one_is_overwritten"
        ],
    ),
    "a resume that splits groups between ranks": Mistake(
        support.checkpoints.share_of_rank,
        "row // group_size % world == rank",
        "row % world == rank",
        [SHARES],
    ),
    "a checkpoint of ranks one after the other": Mistake(
        support.checkpoints.join_ranks,
        "row // group_size * world + rank",
        "row // group_size + 1000 * rank",
        [SHARES],
    ),
}
