"""What is refused before anything slow is built, and what batches are checked for."""

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from support.checkpoints import check_resume
from support.flags import Refused
from support.log import check_reporter

# The names of loss.KL_ESTIMATORS.
KL_ESTIMATORS = ("is", "k3")


def check_run(cfg: Any) -> None:
    """Raises Refused where fields of a train.Config do not go together."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if cfg.prompts_per_step < max(world, cfg.minibatches):
        raise Refused(
            f"prompts_per_step is {cfg.prompts_per_step}: give each of the {world} "
            f"ranks and each of the {cfg.minibatches} minibatches at least one"
        )
    check_tensor_parallel(cfg.rollout_tp)
    if cfg.top_logprobs > 0 and "kl_estimator" in cfg.objective_args:
        raise Refused(
            "objective_args has kl_estimator, by which the KL is estimated from the "
            "sampled tokens alone: add --top_logprobs 0"
        )
    estimator = cfg.objective_args.get("kl_estimator", "is")
    if estimator not in KL_ESTIMATORS:
        raise Refused(
            f"objective_args has kl_estimator={estimator}: give "
            f"{' or '.join(KL_ESTIMATORS)}"
        )
    check_reporter(cfg.report_to)
    if cfg.resume:
        check_resume(cfg.out_dir, cfg.steps, cfg.model_dump())
    elif cfg.out_dir and Path(cfg.out_dir, "config.json").exists():
        raise Refused(
            f"{cfg.out_dir} holds another run: choose another out_dir, or --resume"
        )


def check_tensor_parallel(rollout_tp: int) -> None:
    """Raises Refused where the ranks of a node cannot share engines by rollout_tp."""
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks_of_node % rollout_tp:
        raise Refused(
            f"rollout_tp is {rollout_tp}: it has to divide the {ranks_of_node} ranks "
            "of a node"
        )


def check_on_policy(cfg: Any, stats: dict[str, float], step: int, first: bool) -> None:
    """Compare engine and trainer on a batch that should be on-policy.

    Where no mismatch was asked for, the ratios before an update differ from 1 by
    rounding. If most of them are not near 1, the first step of a run raises Refused;
    later, when there is something to lose, it is a warning. A single token decides
    nothing: `stats` has e_B and the mean ratio without the outer 1% of the tokens at
    each end.
    """
    samples_fully = cfg.top_p == 1 and cfg.top_k == 0
    same_temperature = cfg.temperature == cfg.policy_temperature
    same_precision = cfg.rollout_quantization == "none"
    if not (samples_fully and same_temperature and same_precision and cfg.lag == 0):
        return
    if stats["ess_central"] >= 0.9 and abs(stats["ratio_central"] - 1) <= 0.1:
        return
    complaint = (
        f"step {step}: a batch that should be on-policy has, without its outer 2% of "
        f"tokens, e_B {stats['ess_central']:.3f} and mean ratio "
        f"{stats['ratio_central']:.3f}, and mean |log rho| "
        f"{stats['mismatch_mean']:.3f}: look at the weight sync (a tied head?), the "
        "temperature, rollout_dtype, the alignment of tokens"
    )
    if first:
        raise Refused(complaint)
    if dist.get_rank() == 0:
        print(f"warning: {complaint}", file=sys.stderr, flush=True)
