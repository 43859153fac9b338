"""Wrong versions of loss.py that the suite must reject, each a diff of a line or two.

WRONG: what is wrong -> (the tests of test_loss.py that must fail on it, old text, new text, ...).
A diff is applied to the repository's loss.py; if that no longer has the old text, it says so."""

import types
from pathlib import Path

WRONG = {
    "cap 1/e_B": (
        ["test_a_high_ratio_token_weighs_what_the_table_says", "test_loss_equals_the_oracle"],
        "torch.minimum(ratio, ess)",
        "torch.minimum(ratio, 1 / ess)",
    ),
    "cap 1": (
        ["test_a_high_ratio_token_weighs_what_the_table_says", "test_loss_equals_the_oracle"],
        "torch.minimum(ratio, ess)",
        "ratio.clamp(max=1.0)",
    ),
    "no stop-gradient on the capped ratio": (
        ["test_gradient_is_a_sum_of_weighted_scores", "test_loss_equals_the_oracle"],
        "torch.minimum(ratio, ess).detach()",
        "torch.minimum(ratio, ess)",
    ),
    "gradient through e_B": (
        ["test_e_b_is_a_constant_in_the_gradient", "test_loss_equals_the_oracle"],
        "log_ratio.detach()[mask]",
        "log_ratio[mask]",
        "device=ratio.device).detach()",
        "device=ratio.device)",
    ),
    "e_B over padding": (
        ["test_e_b_by_hand", "test_padding_changes_nothing"],
        "log_ratio.detach()[mask].double()",
        "torch.where(mask, log_ratio.detach(), 0.0).flatten().double()",
    ),
    "e_B of the micro-batch": (
        ["test_sum_over_micro_batches_is_the_batch", "test_given_e_b_is_used"],
        "    if ess is None:",
        "    if True:",
    ),
    "mean of means": (
        ["test_every_token_counts_the_same", "test_loss_equals_the_oracle"],
        "torch.where(mask, loss, 0.0).sum() / (n if count is None else count)",
        "(torch.where(mask, loss, 0.0).sum(1) / mask.sum(1).clamp(min=1)).mean()",
    ),
    "sign of the KL": (
        ["test_kl_pulls_back_to_the_behaviour_policy", "test_loss_equals_the_oracle"],
        "policy + (1 - ess) * kl",
        "policy - (1 - ess) * kl",
    ),
    "e_B instead of 1 - e_B on the KL": (
        ["test_kl_pulls_back_to_the_behaviour_policy", "test_loss_equals_the_oracle"],
        "policy + (1 - ess) * kl",
        "policy + ess * kl",
    ),
    "KL clamped at 10 nats": (
        ["test_kl_is_not_clamped"],
        "KL_ESTIMATORS[kl_estimator](log_ratio)",
        "KL_ESTIMATORS[kl_estimator](log_ratio.clamp(-10.0, 10.0))",
    ),
    "advantage not detached": (
        ["test_advantage_is_a_constant"],
        "advantage.detach()",
        "advantage",
    ),
    "advantage on the last token only": (
        ["test_every_token_has_its_responses_advantage_by_hand", "test_loss_equals_the_oracle"],
        "torch.where(mask, advantage.detach(), 0.0)",
        "torch.where(mask & (mask.flip(1).cumsum(1).flip(1) == 1), advantage.detach(), 0.0)",
    ),
    "population standard deviation": (
        ["test_group_advantage_by_hand"],
        "reward.std(dim=-1, keepdim=True)",
        "reward.std(dim=-1, keepdim=True, correction=0)",
    ),
    "ratio inverted": (
        ["test_a_high_ratio_token_weighs_what_the_table_says", "test_loss_equals_the_oracle"],
        "log_ratio = logp - logp_behavior",
        "log_ratio = logp_behavior - logp",
    ),
    "all-zero loss": (
        ["test_on_policy_it_is_reinforce", "test_loss_equals_the_oracle"],
        "torch.where(mask, loss, 0.0).sum()",
        "0 * torch.where(mask, loss, 0.0).sum()",
    ),
    # Beyond the list: what the authors' code, or a first attempt at a comparison, gets wrong.
    "e_B of a NaN is 1": (
        ["test_a_non_finite_log_ratio_stops_with_its_sequence"],
        '    check_rows(torch.isfinite(log_ratio) | ~mask, "a log-ratio is not finite")\n',
        "    if not torch.isfinite(log_ratio[mask]).all():\n        return torch.tensor(1.0)\n",
    ),
    "e_B above float32": (
        ["test_e_b_at_80_nats"],
        "ratio = (log_ratio - log_ratio.max()).exp()",
        "ratio = log_ratio.float().exp()",
    ),
    "gspo averages over tokens": (
        ["test_gspo_averages_over_sequences"],
        "finish(loss / length, cut, log_ratio, mask, n, count=count)",
        "finish(loss, cut, log_ratio, mask, n)",
    ),
    "cispo's eps_high is the cap": (
        ["test_a_high_ratio_token_weighs_what_the_table_says"],
        "C=1 + eps_high",
        "C=eps_high",
    ),
    "m2po drops in every direction": (
        ["test_m2po_drops_by_hand"],
        "cut = (advantage * log_ratio > 0) & (log_ratio**2 > cutoff)",
        "cut = log_ratio**2 > cutoff",
    ),
}


def wrong_loss(what):
    """The module that loss.py would be with that mistake in it, and the tests that must notice."""
    path = Path(__file__).parents[1] / "loss.py"
    tests, *texts = WRONG[what]
    source = path.read_text()
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if source.count(old) != 1:
            raise LookupError(f"{what}: loss.py should have exactly one {old!r}, to be made wrong")
        source = source.replace(old, new)
    module = types.ModuleType(f"loss with {what}")
    exec(compile(source, f"<loss.py with {what}>", "exec"), module.__dict__)
    return module, tests
