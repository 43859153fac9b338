"""Checkpoints, from which a killed run goes on, and the model that a run leaves.

No random state is saved, for none matters: the order of the problems, the minibatches
and the sampling noise are pure functions of (seed, step), and nothing else draws.

A checkpoint is a folder: the weights and the moments, in shards that any number of
ranks can read, and progress.pt, all the rest.
"""

import json
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from support.flags import Refused
from support.safe_load import SafePlanner, SafeReader

# Fields that a resumed run may change, as they do not change what it learns. There are
# two exceptions. Those that size the batches of a forward pass change rounding. And
# with lag a run samples nothing that it will not use: the steps that are added to it
# begin with rollouts of newer weights than they would have had from the start.
MAY_DIFFER = {
    "out_dir",
    "steps",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "resume",
    "report_to",
    "verbose",
    "micro_batch_tokens",
    "kv_cache_gb",
    "max_num_seqs",
}


def write_whole(path: Path, text: str) -> None:
    """Replace a file: even after a kill it holds the old text or the new one."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(text)
    unfinished.replace(path)


def checkpoints(out: Path) -> list[Path]:
    """The complete checkpoints of a run, the newest last."""
    # A folder "step-000007.bak" is somebody's own.
    folders = [
        path
        for path in (out / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdecimal()
    ]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


def steps_done(out: Path) -> int:
    """The last step that a run has a whole line of metrics for; 0 if there is none."""
    metrics = out / "metrics.jsonl"
    if not metrics.exists():
        return 0
    lines = metrics.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return max((json.loads(line)["step"] for line in whole), default=0)


def check_resume(out_dir: str, steps: int, config: dict[str, Any]) -> None:
    """Raises Refused where --resume cannot go on with the same configuration."""
    out = Path(out_dir)
    if not out_dir or not (out / "config.json").exists():
        raise Refused(f"--resume: out_dir {out_dir!r} holds no run")
    stored = json.loads((out / "config.json").read_text())
    changes = [
        f"{name} was {stored.get(name)!r}, is {value!r}"
        for name, value in sorted(config.items())
        if name not in MAY_DIFFER and stored.get(name) != value
    ]
    if changes:
        raise Refused(f"--resume: not the configuration of {out}: {', '.join(changes)}")
    done = steps_done(out)
    if done >= steps:
        raise Refused(
            f"--resume: {out} is finished, {done} steps are done; give it more --steps"
        )
    if not checkpoints(out):
        raise Refused(
            f"--resume: {out} has no complete checkpoint; start in another out_dir"
        )


class NotSaved(Refused):
    """A checkpoint or the model was not written; what was there before is as it was."""


def save_checkpoint(
    out: Path,
    step: int,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    queue: deque[Any],
    *,
    group_size: int,
    keep: int,
) -> None:
    """Write checkpoints/step-N, then delete all but the newest `keep`: a collective.

    `queue` holds this rank's rollout.Rollouts that were sampled and not yet used.
    A folder has its name only when it is complete: a run may be killed at any moment.
    Raises NotSaved on all ranks where it cannot be written, as on a full disk, or where
    a weight is not finite: a run that went on from it would stop at once.
    """
    unfinished = out / "checkpoints" / "unfinished"
    if not is_finite(policy):
        raise NotSaved(
            f"a weight is not finite, so there is no checkpoint of step {step}; "
            f"{newest_of(checkpoints(out))}"
        )

    def write_progress() -> None:
        progress = {
            "step": step,
            "schedule": schedule.state_dict(),
            "queue": [vars(rollouts) for rollouts in joined_queue],
        }
        content = BytesIO()
        torch.save(progress, content)
        (unfinished / "progress.pt").write_bytes(content.getvalue())

    def give_its_name() -> None:
        unfinished.rename(unfinished.with_name(f"step-{step:06d}"))
        for old in checkpoints(out)[:-keep]:
            # The new one is complete. One that cannot be deleted, as a network file
            # system may have it while somebody reads it, is tried again by the next.
            with suppress(OSError):
                shutil.rmtree(old.rename(unfinished))

    joined_queue = gather_queue(queue, group_size)
    weights, moments = get_state_dict(policy, optimizer)
    state = {"policy": weights, "optimizer": moments}
    try:
        on_rank_0(lambda: shutil.rmtree(unfinished, ignore_errors=True))
        dcp.save(state, checkpoint_id=unfinished)
        on_rank_0(write_progress)
        on_rank_0(give_its_name)
    except (CheckpointException, OSError) as error:
        # What there is of it would only fill the disk.
        on_rank_0(lambda: shutil.rmtree(unfinished, ignore_errors=True))
        raise NotSaved(
            f"the checkpoint of step {step} cannot be written: {reason(error)}; "
            f"{newest_of(checkpoints(out))}"
        ) from error


def is_finite(policy: torch.nn.Module) -> bool:
    """Whether every weight is a finite number, on all ranks. A collective."""
    finite = torch.tensor(1)
    for weight in policy.parameters():
        mine = weight.to_local() if isinstance(weight, DTensor) else weight
        if not mine.isfinite().all():
            finite.zero_()
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite)


def gather_queue(queue: deque[Any], group_size: int) -> list[Any]:
    """The waiting rollouts of all ranks, on rank 0; [] on the others. A collective."""
    is_writer = dist.get_rank() == 0
    queues: list | None = [None] * dist.get_world_size() if is_writer else None
    dist.gather_object(list(queue), queues)
    if queues is None:
        return []
    return [join_ranks(of_step, group_size) for of_step in zip(*queues, strict=True)]


def on_rank_0(act: Callable[[], Any]) -> None:
    """Have rank 0 do something with files. A collective.

    Raises on all ranks what it raised, Refused or OSError; any other error as OSError.
    """
    failure: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            act()
        except (OSError, Refused) as error:
            failure = [error]
        except Exception as error:  # safetensors and torch have errors of their own
            failure = [OSError(str(error))]
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]


def reason(error: BaseException) -> str:
    """What went wrong, in one line; of torch's report on all ranks, the first's."""
    if isinstance(error, CheckpointException):
        error, _ = error.failures[min(error.failures)]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def newest_of(complete: list[Path]) -> str:
    """What a run can go on from."""
    if not complete:
        return "there is no other one"
    return f"the newest complete one is {complete[-1]}"


def load_checkpoint(
    out: Path,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    queue: deque[Any],
    *,
    group_size: int,
    rollouts_type: type,
) -> int:
    """Restore the newest complete checkpoint in place; returns the steps done.

    It may have been written by another number of ranks: each takes the groups that it
    would have sampled. `rollouts_type` is rollout.Rollouts. A collective. Raises
    Refused where the checkpoint cannot be read.
    """
    # Rank 0's list: on a network file system another node may hear of the newest later.
    listed = [checkpoints(out)]
    dist.broadcast_object_list(listed)
    *older, newest = listed[0]
    weights, moments = get_state_dict(policy, optimizer)
    state = {"policy": weights, "optimizer": moments}
    try:
        reader = SafeReader(newest)
        reader.read_metadata()  # dcp.load would print a traceback if it cannot be read.
        dcp.load(state, storage_reader=reader, planner=SafePlanner())
        progress = torch.load(newest / "progress.pt", weights_only=True)
    except (CheckpointException, Exception) as error:
        # torch has many kinds of errors for a file that ends early, or is no such file.
        # Its CheckpointException is none of Python's Exceptions.
        instead = "there is no other one: start in another out_dir"
        if older:
            instead = (
                f"without it, {newest_of(older)}: remove {newest.name} to go on from "
                "there"
            )
        raise Refused(
            f"--resume: {newest} cannot be read: {reason(error)}; {instead}"
        ) from error
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=state["policy"],
        optim_state_dict=state["optimizer"],
    )
    schedule.load_state_dict(progress["schedule"])
    rank, world = dist.get_rank(), dist.get_world_size()
    for fields in progress["queue"]:
        rollouts = rollouts_type(**fields)
        queue.append(share_of_rank(rollouts, group_size, rank, world))
    return progress["step"]


def share_of_rank(rollouts: Any, group_size: int, rank: int, world: int) -> Any:
    """The groups of a step that a rank samples itself: rollout.prompts_of_rank."""
    responses = range(len(rollouts.text))
    mine = [row for row in responses if row // group_size % world == rank]
    return rollouts.select(mine)


def join_ranks(rollouts_of_rank: tuple[Any, ...], group_size: int) -> Any:
    """The ranks' rollouts for one step as one, in the order that one rank would have.

    By rollout.prompts_of_rank, group g of rank r of w is group g w + r of the step.
    """
    world = len(rollouts_of_rank)
    place = []  # of each row of the ranks' rollouts, one rank after the other
    for rank, rollouts in enumerate(rollouts_of_rank):
        for row in range(len(rollouts.text)):
            place.append((row // group_size * world + rank, row % group_size))
    order = sorted(range(len(place)), key=place.__getitem__)
    texts = [text for rollouts in rollouts_of_rank for text in rollouts.text]
    joined = {"text": [texts[i] for i in order]}
    for name, value in vars(rollouts_of_rank[0]).items():
        if isinstance(value, torch.Tensor):
            rows = [
                row for rollouts in rollouts_of_rank for row in getattr(rollouts, name)
            ]
            rows = [rows[i] for i in order]
            is_padded = value.dim() > 1
            joined[name] = pad_sequence(rows, True) if is_padded else torch.stack(rows)
    versions = {rollouts.weight_version for rollouts in rollouts_of_rank}
    joined["weight_version"] = " and ".join(sorted(versions))
    return replace(rollouts_of_rank[0], **joined)


def save_model(
    policy: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """A folder that transformers and vLLM load, as a whole or not at all. A collective.

    Raises Refused where it cannot be written, and NotSaved where a weight is not
    finite.
    """
    if not is_finite(policy):
        raise NotSaved(f"a weight is not finite, so there is no model in {folder}")
    rank = dist.get_rank()
    weights = {}
    for name, weight in policy.model.state_dict().items():
        # Gathered one by one in float32, and kept in rank 0's main memory alone.
        whole = weight.full_tensor()
        if rank == 0:
            weights[name] = whole.cpu()
    unfinished = folder.with_name(f"{folder.name}.new")
    replaced = folder.with_name(f"{folder.name}.old")

    def clear() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)

    def write() -> None:
        clear()  # of a run that was killed here
        policy.model.save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():  # of a run that had fewer steps
            folder.rename(replaced)
        try:
            unfinished.rename(folder)
        except OSError:
            if replaced.exists():
                replaced.rename(folder)
            raise
        shutil.rmtree(replaced, ignore_errors=True)

    try:
        on_rank_0(write)
    except OSError as error:
        on_rank_0(clear)  # What there is of it would only fill the disk.
        raise Refused(f"the model cannot be written to {folder}: {error}") from error
