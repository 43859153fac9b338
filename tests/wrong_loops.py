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

import answers.extraction
import eval
import policy
import reward
import rollout
import support.checkpoints
import support.log
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
EPOCHS = "test_loop.test_an_epoch_has_every_problem_once_and_the_next_one_another_order"
NOISE = "test_loop.test_no_two_responses_of_a_run_and_its_evaluations_share_their_noise"
SETTINGS = "test_loop.test_a_step_samples_its_own_problems_with_the_settings_of_the_run"
HOT_POLICY = (
    "test_loop.test_a_hot_policy_is_on_policy_at_the_temperature_of_its_rollouts"
)
ADVANTAGE = "test_loop.test_every_token_has_the_advantage_of_its_response_in_its_group"
PROMPTS = (
    "test_loop.test_the_instruction_of_a_task_begins_every_prompt_of_train_and_eval"
)
PASSES = "test_loop.test_each_pass_goes_through_all_groups_in_their_order"
LAG = "test_loop.test_a_batch_is_used_lag_steps_after_it_was_sampled_and_e_b_falls"
ON_POLICY = "test_loop.test_on_policy_every_batch_is_sampled_by_the_newest_weights"
METRICS = (
    "test_loop.test_a_step_logs_the_means_of_its_batch_and_updates_and_the_least_e_b"
)
RATES = "test_loop.test_the_rate_warms_up_over_updates_and_weights_decay_as_configured"
HELDOUT = "test_loop.test_what_is_evaluated_is_the_policy_and_its_greedy_decoding"
ENGINES = (
    "test_loop.test_the_engines_have_the_settings_of_the_run_and_the_evaluator_no_fp8"
)
BATCH = "test_train.test_micro_batches_of_any_size_change_neither_e_b_nor_the_gradient"
EACH_RESPONSE = (
    "test_train.test_each_response_is_in_one_micro_batch_and_none_is_empty_or_too_large"
)
TWO_RANKS = "test_train.test_a_second_rank_with_the_same_responses_changes_nothing"
NOT_FINITE = "test_train.test_a_number_that_is_not_finite_stops_the_run_with_the_step"
HANDED_OUT = (
    "test_sync.test_after_a_check_the_policy_still_hands_out_its_newest_weights"
)
KEEPS_WEIGHTS = (
    "test_sync.test_a_run_whose_engine_keeps_its_weights_without_a_word_stops"
)
LOG_SOFTMAX = (
    "test_rollout.test_the_policy_gives_log_softmax_of_the_logits_and_its_gradient"
)
LOG_PI_B = (
    "test_rollout."
    "test_log_pi_b_is_after_the_temperature_and_the_trainer_agrees_on_every_token"
)
TOP_TOKENS = (
    "test_rollout."
    "test_log_pi_b_is_renormalized_to_the_support_and_minus_infinity_outside"
)
RESTORED = (
    "test_checkpoints."
    "test_a_checkpoint_restores_moments_metrics_and_unused_rollouts_bit_for_bit"
)
ENDS_EARLY = (
    "test_checkpoints."
    "test_a_save_may_end_between_any_two_of_its_writes_and_the_next_one_works"
)

# Lines that several mistakes are about.
MINIBATCHES = "rows_of_rank.chunk(cfg.minibatches)"
SUMS = "sums += ratio_sums(logp - micro_batch.logp_behavior, micro_batch.mask)"
SUMS_OF_LAST = "sums += ratio_sums(output_of_last[0] - last.logp_behavior, last.mask)"
SYNC = "sync(engine, policy, step, check_on)"

MISTAKES: dict[str, Mistake] = {
    # train.py: problems and rollouts
    "the problems of a step again in the next": Mistake(
        train.sample_batch, "(step - 1) * cfg", "(step - 1) // 2 * cfg", [SETTINGS]
    ),
    "the same order in every epoch": Mistake(
        train.problem_indices, "{seed} {epoch}", "{seed} 0", [EPOCHS]
    ),
    "the seed left out of the order of the problems": Mistake(
        train.problem_indices,
        "{seed} {epoch}",
        "0 {epoch}",
        [
            "test_loop."
            "test_runs_of_different_seeds_have_the_problems_in_different_orders"
        ],
    ),
    "the same sampling noise in every step": Mistake(
        train.sample_batch,
        "noise_seed(cfg.seed + 1, group,",
        "noise_seed(cfg.seed + 1, group - first,",
        [NOISE],
    ),
    "the same noise for neighboring prompts": Mistake(
        train.sample_batch, "group, cfg.group_size", "group, 1", [NOISE]
    ),
    "rollouts with the noise of the evaluation": Mistake(
        train.sample_batch, "cfg.seed + 1,", "cfg.seed,", [NOISE]
    ),
    "temperature ignored": Mistake(
        train.sample_batch,
        "temperature=cfg.temperature",
        "temperature=1.0",
        [SETTINGS, HOT_POLICY],
    ),
    "top-p ignored": Mistake(
        train.sample_batch, "top_p=cfg.top_p", "top_p=1.0", [SETTINGS]
    ),
    "every rank samples the first rank's noise": Mistake(
        train.sample_batch,
        "noise_seed(cfg.seed + 1, group, cfg.group_size) for group in groups",
        "noise_seed(cfg.seed + 1, first + i, cfg.group_size) "
        "for i in range(len(groups))",
        ["test_loop.test_on_two_ranks_a_step_has_the_samples_that_it_has_on_one"],
    ),
    # train.py: rewards and advantages
    "the answers of other problems": Mistake(
        reward.compute_rewards,
        "dataset.problems[i]",
        "dataset.problems[i - 1]",
        ["test_loop.test_a_response_is_rewarded_for_the_answer_to_its_own_prompt"],
    ),
    "the verifier of another task": Mistake(
        support.tasks.load_split,
        "task.verifier",
        '"exact"',
        ["test_loop.test_answers_are_checked_by_the_verifier_of_the_task"],
    ),
    "advantages within other groups": Mistake(
        train.sample_batch,
        "rollouts.reward.view(-1, cfg.group_size)",
        "rollouts.reward.view(cfg.group_size, -1).T",
        [ADVANTAGE],
    ),
    "advantages in another order": Mistake(
        train.sample_batch,
        "advantage.view(-1, 1)",
        "advantage.flip(0).view(-1, 1)",
        [ADVANTAGE],
    ),
    "scale_advantage ignored": Mistake(
        train.sample_batch,
        "group_reward, cfg.scale_advantage",
        "group_reward",
        [ADVANTAGE],
    ),
    "an advantage for padding": Mistake(
        train.sample_batch,
        "advantage.view(-1, 1) * rollouts.mask",
        "advantage.view(-1, 1).expand(rollouts.mask.shape)",
        [ADVANTAGE],
    ),
    "the task's instruction left out": Mistake(
        support.tasks.load_split,
        'problem["prompt"], task.instruction',
        'problem["prompt"], None',
        [PROMPTS],
    ),
    "a base model's beginning-of-sequence token left out": Mistake(
        support.tasks.encode_prompt,
        "add_special_tokens=True",
        "add_special_tokens=False",
        ["test_tasks.test_the_prompt_of_a_base_model_begins_with_its_bos_token"],
    ),
    "a limit takes the last problems": Mistake(
        support.tasks.load_split,
        "[: limit or None]",
        "[-limit:]",
        ["test_tasks.test_a_limit_takes_the_first_problems_and_their_prompts"],
    ),
    # train.py: minibatches and micro-batches
    "every minibatch of the first rows": Mistake(
        train.main,
        MINIBATCHES,
        "[rows_of_rank.chunk(cfg.minibatches)[0]] * cfg.minibatches",
        [PASSES],
    ),
    "a single pass": Mistake(
        train.main, "minibatches * cfg.passes", "minibatches", [PASSES]
    ),
    "a group split between minibatches": Mistake(
        train.main,
        MINIBATCHES,
        "[rows_of_rank[i :: cfg.minibatches] for i in range(cfg.minibatches)]",
        [PASSES],
    ),
    "minibatches that do not follow the order of the prompts on a rank": Mistake(
        train.main,
        MINIBATCHES,
        "rows_of_rank.roll(cfg.group_size).chunk(cfg.minibatches)",
        [PASSES],
    ),
    "micro-batches larger than allowed": Mistake(
        train.micro_batches,
        "max(1, max_tokens // int(longest_sequence))",
        "1 + max_tokens // int(longest_sequence)",
        [EACH_RESPONSE],
    ),
    "as many micro-batches as a rank needs by itself": Mistake(
        train.micro_batches,
        "dist.all_reduce(longest_sequence, dist.ReduceOp.MAX)",
        "pass",
        ["test_train.test_ranks_make_equally_many_micro_batches_as_the_longest_allows"],
    ),
    "every micro-batch computed twice": Mistake(
        train.update,
        "output_of_last if is_last else policy(micro_batch)",
        "policy(micro_batch)",
        ["test_train.test_only_the_last_micro_batch_needs_no_second_forward_pass"],
    ),
    # train.py: e_B
    "the sums of the last micro-batch alone": Mistake(
        train.update, SUMS_OF_LAST, SUMS_OF_LAST.replace("+=", "="), [BATCH]
    ),
    "a micro-batch's sums left out": Mistake(
        train.update,
        SUMS,
        f"if micro_batch is not others[0]: {SUMS}",
        [BATCH],
    ),
    "the sums of a rank's own tokens": Mistake(
        train.update, "dist.all_reduce(sums)", "pass", [TWO_RANKS]
    ),
    "log pi of padding in the sums": Mistake(
        train.update,
        SUMS_OF_LAST,
        SUMS_OF_LAST.replace("last.mask", "torch.ones_like(last.mask)"),
        [BATCH],
    ),
    "|B| of one rank": Mistake(
        train.update,
        "token_count, ratio_sum, _ = sums.tolist()",
        "token_count, ratio_sum = rollouts.mask[rows].sum().item(), sums[1].item()",
        [TWO_RANKS],
    ),
    "e_B of the update before": Mistake(
        train.update,
        "e_b = effective_sample_size(sums).item()",
        "e_b = getattr(policy, 'e_b', 1.0); "
        "policy.e_b = effective_sample_size(sums).item()",
        [BATCH],
    ),
    "the last micro-batch left out of the gradient": Mistake(
        train.update,
        "for micro_batch in (last, *others):",
        "for micro_batch in others:",
        [BATCH],
    ),
    # train.py: the gradient
    "the KL without its gradient": Mistake(
        train.update,
        "kl_at_positions(top_logp, micro_batch, cfg)",
        "kl_at_positions(top_logp.detach(), micro_batch, cfg)",
        [BATCH],
    ),
    "the advantages of other rows": Mistake(
        train.update, "batch.advantage, kl", "batch.advantage.flip(0), kl", [BATCH]
    ),
    "the mean of the micro-batches' means": Mistake(
        train.update, ".sum() / token_count", ".mean() / (1 + len(others))", [BATCH]
    ),
    "the number of ranks left out": Mistake(
        train.update, "share * dist.get_world_size()", "share", [TWO_RANKS]
    ),
    "statistics of one rank": Mistake(
        train.update, "dist.all_reduce(total)", "pass", [TWO_RANKS]
    ),
    "statistics of the last micro-batch": Mistake(
        train.update, "totals[name] +=", "totals[name] =", [BATCH]
    ),
    "an update by an e_B that is not finite": Mistake(
        train.update, "if not math.isfinite(e_b):", "if False:", [NOT_FINITE]
    ),
    "an update by a gradient that is not finite": Mistake(
        train.apply_gradient,
        "if not math.isfinite(grad_norm):",
        "if False:",
        [NOT_FINITE],
    ),
    "no gradient clipping": Mistake(
        train.apply_gradient,
        "cfg.max_grad_norm",
        "math.inf",
        ["test_train.test_a_gradient_is_clipped_to_max_grad_norm"],
    ),
    "gradients of the last update kept": Mistake(
        train.apply_gradient,
        "optimizer.zero_grad()",
        "pass",
        ["test_train.test_no_gradient_is_left_for_the_next_update"],
    ),
    # train.py: the loop
    "AdamW's default weight decay": Mistake(
        train.Run.__init__, "weight_decay=cfg.weight_decay,", "", [RATES]
    ),
    "a warm-up that never ends": Mistake(
        train.set_learning_rate,
        "(updates + 1) / max(1, cfg.warmup_updates)",
        "1 / max(1, cfg.warmup_updates)",
        [RATES],
    ),
    "a warm-up over steps": Mistake(
        train.set_learning_rate, "+ updates_of_step", "", [RATES]
    ),
    "the objective ignored": Mistake(
        train.main,
        "find_objective(cfg.objective, cfg.objective_args)",
        'find_objective("p3o", {})',
        ["test_loop.test_every_update_has_the_objective_of_the_run"],
    ),
    "policy_temperature ignored": Mistake(
        train.Run.__init__, "cfg.policy_temperature", "1.0", [HOT_POLICY]
    ),
    "a queue that is one batch short": Mistake(
        train.main, "len(queue) <= cfg.lag", "len(queue) <= max(0, cfg.lag - 1)", [LAG]
    ),
    "a queue that is one batch long": Mistake(
        train.main, "len(queue) <= cfg.lag", "len(queue) <= cfg.lag + 1", [LAG]
    ),
    "batches that no step uses": Mistake(
        train.main, " and step + len(queue) <= cfg.steps", "", [LAG]
    ),
    "the newest batch first": Mistake(
        train.main, "queue.popleft()", "queue.pop()", [LAG]
    ),
    "the sync left out": Mistake(train.main, SYNC, "pass", [ON_POLICY]),
    "a sync of the name alone": Mistake(
        train.main, SYNC, "engine.llm.update_weight_version(str(step))", [ON_POLICY]
    ),
    "a sync every other step": Mistake(
        train.main, SYNC, f"step % 2 or {SYNC}", [ON_POLICY]
    ),
    "the first sync unchecked": Mistake(
        train.main,
        "sync(engine, policy, run.step, run.train.prompts)",
        "sync(engine, policy, run.step, [])",
        [KEEPS_WEIGHTS],
    ),
    "later syncs unchecked": Mistake(
        train.main,
        "if check_is_due else []",
        "if False else []",
        [KEEPS_WEIGHTS],
    ),
    "one allowance for all dtypes": Mistake(
        policy.check_sync,
        'precision = "float32 on a CPU"',
        'precision = "fp8"',
        ["test_sync.test_in_float32_an_engine_that_is_one_update_behind_is_refused"],
    ),
    "an evaluation before the checkpoint": Mistake(
        train.main,
        "        if cfg.save_every and",
        "        save_and_evaluate(step, run, cfg)\n        if cfg.save_every and",
        ["test_resume.test_an_evaluation_that_fails_costs_no_step"],
    ),
    # train.py: evaluation
    "held-out accuracy at the temperature of the rollouts": Mistake(
        train.save_and_evaluate, "cfg.policy_temperature", "cfg.temperature", [HELDOUT]
    ),
    "greedy accuracy that is sampled": Mistake(
        eval.heldout_accuracy,
        '("greedy", 0.0)',
        '("greedy", 1.0)',
        [HELDOUT],
    ),
    "a partial reward that counts as solved": Mistake(
        eval.heldout_accuracy,
        '["rewards"] == [1.0]',
        '["rewards"] > [0.0]',
        ["test_loop.test_a_partial_reward_is_not_a_solved_problem"],
    ),
    "the fp8 copy of the policy evaluated": Mistake(
        train.build_engines, "else build()", "else engine", [ENGINES]
    ),
    "an engine that begins with the weights of the model": Mistake(
        train.build_engines, 'load_format="dummy"', 'load_format="auto"', [ENGINES]
    ),
    "an evaluator without the newest weights": Mistake(
        train.save_and_evaluate,
        "sync(run.evaluator, policy, step, run.heldout.prompts)",
        "step or sync(run.evaluator, policy, step, run.heldout.prompts)",
        [
            "test_sync."
            "test_every_evaluation_of_an_fp8_run_is_of_the_policy_as_it_is_by_then"
        ],
    ),
    "the sync of the evaluator unchecked": Mistake(
        train.save_and_evaluate,
        "step, run.heldout.prompts)",
        "step, [])",
        ["test_sync.test_a_run_whose_evaluator_keeps_its_weights_stops"],
    ),
    "the KL over all listed tokens under top-k": Mistake(
        train.kl_at_positions,
        "if cfg.top_p < 1 or cfg.top_k:",
        "if cfg.top_p < 1:",
        [
            "test_train."
            "test_tokens_that_are_not_listed_count_unless_top_p_or_top_k_is_set"
        ],
    ),
    "no bucket for the tokens that are not listed": Mistake(
        train.kl_at_positions,
        "cfg.top_p < 1",
        "cfg.top_p <= 1",
        [
            "test_train."
            "test_tokens_that_are_not_listed_count_unless_top_p_or_top_k_is_set"
        ],
    ),
    "an engine that keeps its memory during the update": Mistake(
        train.main, "engine.sleep()", "pass", [ON_POLICY]
    ),
    # support/log.py
    "the seconds of the steps before": Mistake(
        support.log.Log.metrics_of,
        "self.seconds.clear()",
        "pass",
        ["test_checkpoints.test_the_seconds_of_a_phase_add_up_within_a_step"],
    ),
    "the largest e_B for the smallest": Mistake(
        train.main, 'min(stats["ess"]', 'max(stats["ess"]', [METRICS]
    ),
    "groups that are solved, not those with a signal": Mistake(
        support.log.Log.metrics_of, "> groups.amin(dim=1)", "> 0", [METRICS]
    ),
    "the longest response": Mistake(
        support.log.Log.metrics_of, "values.mean()", "values.max()", [METRICS]
    ),
    "the mismatch of the last update": Mistake(
        train.main,
        'updates[0]["logprob_abs_diff"]',
        'updates[-1]["logprob_abs_diff"]',
        [METRICS],
    ),
    "the entropy of a response": Mistake(
        support.log.Log.metrics_of,
        'metrics["entropy"] /= metrics["response_tokens"]',
        "pass",
        [METRICS],
    ),
    # policy.py
    "logits of the position after": Mistake(
        policy.Policy.forward, "position - 1]", "position]", [LOG_SOFTMAX, LOG_PI_B]
    ),
    "the policy's temperature multiplied": Mistake(
        policy.token_log_probabilities, "/ temperature", "* temperature", [LOG_SOFTMAX]
    ),
    "the KL's K tokens shifted by one": Mistake(
        policy.Policy.forward, "logp[:, 1:]", "logp[:, :-1]", [LOG_SOFTMAX]
    ),
    "the dropout of the model's config": Mistake(
        policy.build_policy,
        "setattr(config, name, 0.0)",
        "pass",
        ["test_rollout.test_no_dropout_of_a_models_config_acts"],
    ),
    "gradient checkpointing left out": Mistake(
        policy.build_policy,
        "language_model.gradient_checkpointing_enable()",
        "pass",
        [
            "test_rollout."
            "test_gradient_checkpointing_keeps_less_and_has_the_same_gradient"
        ],
    ),
    "master weights in the dtype of the model's folder": Mistake(
        policy.build_policy,
        "dtype=torch.float32, trust",
        "trust",
        [
            "test_checkpoints."
            "test_a_model_has_the_dtype_that_came_in_"
            "its_tied_head_once_and_ordinary_modes"
        ],
    ),
    "each rank alone with its check of the sync": Mistake(
        policy.check_sync,
        "dist.all_reduce(distance, dist.ReduceOp.MAX)",
        "pass",
        ["test_sync.test_all_ranks_stop_where_one_is_further_off"],
    ),
    "the sync checked at another temperature": Mistake(
        policy.check_sync,
        "temperature=policy.temperature",
        "temperature=1.0",
        ["test_sync.test_the_check_is_at_the_policys_own_temperature"],
    ),
    "the weights of the last forward pass sent": Mistake(
        policy.check_sync, "policy.reshard()", "pass", [HANDED_OUT]
    ),
    "the tied head left out of the sync": Mistake(
        policy.full_weights,
        "policy.model.state_dict().items()",
        "policy.model.named_parameters()",
        [HANDED_OUT],
    ),
    # rollout.py
    "the prefix cache kept over a sync": Mistake(
        rollout.Engine.sample,
        "if not self.llm.reset_prefix_cache():",
        "if False:",
        ["test_sync.test_a_sync_forgets_the_prefixes_that_the_old_weights_computed"],
    ),
    "the likeliest token's log pi_b": Mistake(
        rollout.Engine.as_rollouts, "all_logp[:, :, 0]", "all_logp[:, :, 1]", [LOG_PI_B]
    ),
    "top tokens of another position": Mistake(
        rollout.Engine.as_rollouts,
        "all_tokens[:, :, 1:]",
        "all_tokens[:, :, 1:].roll(1, dims=1)",
        [TOP_TOKENS],
    ),
    "the sampled token for the likeliest one": Mistake(
        rollout.Engine.as_rollouts,
        "all_tokens[:, :, 1:]",
        "all_tokens[:, :, :-1]",
        [TOP_TOKENS],
    ),
    "the end of sequence left out of the mask": Mistake(
        rollout.Engine.as_rollouts,
        "< length[:, None]",
        "< length[:, None] - 1",
        [
            "test_rollout."
            "test_the_end_of_sequence_is_in_the_mask_and_truncated_responses_lack_it"
        ],
    ),
    "rows in another order than their texts": Mistake(
        rollout.Rollouts.select,
        "[value[row] for row in rows]",
        "[value[row] for row in sorted(rows)]",
        [EACH_RESPONSE],
    ),
    "runs whose seeds overlap": Mistake(
        rollout.noise_seed,
        "random.Random(seed).getrandbits(31)",
        "seed",
        ["test_rollout.test_runs_of_different_seeds_share_no_noise"],
    ),
    # reward.py
    "any word of a response counts": Mistake(
        reward.same_words,
        ".split()[-1:]",
        ".split()[:1]",
        ["test_reward.test_exact_verdict"],
    ),
    "the first box counts": Mistake(
        answers.extraction.last_box,
        '["box"]:',
        '["box"] and not content:',
        ["test_reward.test_last_box_is_the_last_box_to_close"],
    ),
    # eval.py
    "every problem evaluated with the same noise": Mistake(
        eval.evaluate, "(seed, i, samples)", "(seed, 0, samples)", [NOISE]
    ),
    "pass@k with replacement": Mistake(
        eval.pass_at_k,
        "1 - comb(n - c, k) / comb(n, k)",
        "1 - (1 - c / n) ** k",
        [
            "test_eval."
            "test_pass_at_k_is_the_share_of_the_draws_of_k_samples_with_a_right_one"
        ],
    ),
    # support/checkpoints.py
    "a folder for each rank": Mistake(
        support.checkpoints.make_out_dir,
        "dist.broadcast_object_list(names)",
        "pass",
        ["test_checkpoints.test_a_folder_that_a_node_does_not_see_is_refused"],
    ),
    "two runs at work in one folder": Mistake(
        support.checkpoints.make_out_dir,
        "take_folder(out, cfg)",
        "pass",
        ["test_checkpoints.test_a_folder_in_which_another_run_is_at_work_is_refused"],
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
        [ENDS_EARLY],
    ),
    "a resume that forgets the queue": Mistake(
        support.checkpoints.load_checkpoint,
        'own["queue"]',
        "[]",
        [RESTORED],
    ),
    "a flipped bit that is not noticed": Mistake(
        support.checkpoints.load_checkpoint,
        "written.items() - checksums(checkpoint).items()",
        "",
        [
            "test_checkpoints."
            "test_a_damaged_checkpoint_is_refused_and_the_one_before_can_be_loaded"
        ],
    ),
    "a resume that continues from the oldest checkpoint": Mistake(
        support.checkpoints.load_checkpoint,
        "max(checkpoints(out)",
        "min(checkpoints(out)",
        [ENDS_EARLY],
    ),
}
