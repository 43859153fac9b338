"""What is refused before anything slow is built, and what batches are checked for."""

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from support.checkpoints import check_resume, checkpoints, on_rank_0, steps_done
from support.flags import Refused
from support.log import check_reporter


def check_run(cfg: Any, objective: Any, kl_estimators: Iterable[str]) -> None:
    """Raises Refused where fields of a train.Config do not go together.

    `objective` is the loss.Objective of that name; kl_estimators are the names of
    loss.KL_ESTIMATORS.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if cfg.prompts_per_step < max(world, cfg.minibatches):
        raise Refused(
            f"prompts_per_step is {cfg.prompts_per_step}: give each of the {world} "
            f"ranks and each of the {cfg.minibatches} minibatches at least one"
        )
    check_tensor_parallel(cfg.rollout_tp)
    if cfg.objective == "p3o":
        check_kl_estimator(cfg, kl_estimators)
    if objective.takes_kl and cfg.top_logprobs == 0 and not samples_fully(cfg):
        raise Refused(
            "with top_p or top_k the KL is over the tokens that can be sampled, which "
            "top_logprobs=0 does not list: give --top_logprobs, as 20"
        )
    check_reporter(cfg.report_to)
    check_out_dir(cfg)


def check_kl_estimator(cfg: Any, kl_estimators: Iterable[str]) -> None:
    """Raises Refused where P3O's kl_estimator is unknown, or is given in vain."""
    if cfg.top_logprobs > 0 and "kl_estimator" in cfg.objective_args:
        raise Refused(
            "objective_args has kl_estimator, by which the KL is estimated from the "
            "sampled tokens alone: add --top_logprobs 0"
        )
    estimator = cfg.objective_args.get("kl_estimator", "is")
    if estimator not in kl_estimators:
        raise Refused(
            f"objective_args has kl_estimator={estimator}: give "
            f"{' or '.join(kl_estimators)}"
        )


def check_out_dir(cfg: Any) -> None:
    """Raises Refused where out_dir has a file to lose, or nothing to go on from."""
    out = Path(cfg.out_dir)
    if cfg.resume:
        check_resume(cfg.out_dir, cfg.steps, cfg.model_dump())
    elif cfg.out_dir and holds_a_run(out):
        raise Refused(
            f"{cfg.out_dir} holds another run: choose another out_dir, or --resume"
        )
    elif cfg.out_dir and has_foreign_config(out):
        raise Refused(
            f"{cfg.out_dir} has a config.json that no run has written, such as a "
            "model's: choose another out_dir"
        )


def holds_a_run(out: Path) -> bool:
    """Whether there is a step to lose. A run that failed before its first has none."""
    return steps_done(out) > 0 or bool(checkpoints(out))


def has_foreign_config(out: Path) -> bool:
    """Whether a config.json is there that is not of a run."""
    path = out / "config.json"
    if not path.exists():
        return False
    try:
        return "out_dir" not in json.loads(path.read_text())
    except (ValueError, TypeError):  # no JSON, or a number
        return True


def lock_folder(out: Path) -> TextIO:
    """A lock on out_dir, for as long as the file that is returned is open.

    The system gives it back when the process ends, however it does. Raises Refused
    where another process has it, or where out_dir cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / "lock", "a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refused(
            f"{out} is being written to by another process: choose another out_dir, or "
            "wait until it has ended"
        ) from error
    except OSError as error:
        raise Refused(f"out_dir {out} cannot be written to: {error}") from error
    return lock


@contextmanager
def claim_folder(out: Path, check: Callable[[], None]) -> Iterator[None]:
    """Within, out_dir is this run's alone. Entering is a collective.

    Rank 0 holds the lock, and then makes the check: since an earlier one another run
    may have come and gone. Raises what these two raise.
    """
    locks: list[TextIO] = []
    on_rank_0(lambda: locks.append(lock_folder(out)))
    try:
        on_rank_0(check)
        yield
    finally:
        for lock in locks:
            lock.close()


def check_tensor_parallel(rollout_tp: int) -> None:
    """Raises Refused where the ranks of a node cannot share engines by rollout_tp."""
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks_of_node % rollout_tp:
        raise Refused(
            f"rollout_tp is {rollout_tp}: it has to divide the {ranks_of_node} ranks "
            "of a node"
        )


def samples_fully(cfg: Any) -> bool:
    """Whether the rollouts may have any token of the vocabulary."""
    return cfg.top_p == 1 and cfg.top_k == 0


def should_be_on_policy(cfg: Any) -> bool:
    """Whether a step's first minibatch is on-policy but for rounding."""
    same_temperature = cfg.temperature == cfg.policy_temperature
    same_precision = cfg.rollout_quantization == "none"
    return samples_fully(cfg) and same_temperature and same_precision and cfg.lag == 0


def check_on_policy(
    cfg: Any,
    stats: dict[str, float],
    step: int,
    is_first: bool,
    furthest_response: Callable[[], str],
) -> None:
    """Compare engine and trainer on a batch that should be on-policy.

    Where no mismatch was asked for, the ratios before an update differ from 1 by
    rounding. If most of them are not near 1, the first step of a run raises Refused;
    later, when there is something to lose, it is a warning, with the furthest response.
    A single token decides nothing: `stats` has e_B and the mean ratio with the outer 1%
    of the tokens at each end drawn in. A collective if there is something to complain
    of.
    """
    if not should_be_on_policy(cfg):
        return
    if stats["ess_central"] >= 0.9 and abs(stats["ratio_central"] - 1) <= 0.1:
        return
    complaint = (
        f"step {step}: a batch that should be on-policy has, with its outer 2% of "
        f"tokens drawn in, e_B {stats['ess_central']:.3f} and mean ratio "
        f"{stats['ratio_central']:.3f}, and mean |log rho| "
        f"{stats['mismatch_mean']:.3f}: look at the weight sync (a tied head?), the "
        "temperature, rollout_dtype, the alignment of tokens"
    )
    if is_first:
        raise Refused(complaint)
    text = furthest_response()
    if dist.get_rank() == 0:
        print(
            f"warning: {complaint}; furthest off is the response {text!r}",
            file=sys.stderr,
            flush=True,
        )
