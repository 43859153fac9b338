"""Keeps a run's folder: its configuration, its checkpoints and the final model.

A checkpoint is a folder. It holds the shards of weights and moments that
torch.distributed.checkpoint writes and, for each rank, the step's metrics and the
rollouts that no step has used yet. Rank 0 adds the rows of metrics.jsonl and
samples.jsonl.

No random state is saved because none is needed: the order of the problems and the
sampling noise are pure functions of (seed, step), and nothing else is random.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedModel

from support.command import Flags, Refused, Stopped, one_line
from support.config import ADJUSTABLE_FIELDS, NEUTRAL_FIELDS, Config
from support.hub import COMMITS
from support.log import ROW_FILES, append_row
from support.models import COMPANIONS


def checkpoints(out: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by their step, in any order."""
    return {
        int(path.name[5:]): path
        for path in (out / "checkpoints").glob("step-*")
        if re.fullmatch(r"step-\d{6,}", path.name)
    }


def check_out_dir(cfg: Config) -> None:
    """Raise Refused if out_dir is taken, or if --resume cannot continue its run.

    Without a checkpoint --resume starts the run, so that one command serves the first
    start and all later ones. It also restarts a run that was killed before its first
    checkpoint, but overwrites nothing of a run that has ended, that saves no
    checkpoints, or that has another configuration. After this call, models and datasets
    of the hub are read at the commits in the run's config.json.
    """
    if cfg.resume and not cfg.out_dir:
        raise Refused("--resume: give the folder of the run as --out_dir")
    try:
        check_free(cfg.out_dir)
        return
    except Refused:
        if not cfg.resume:
            raise
    out = Path(cfg.out_dir)
    done = max(checkpoints(out), default=0)
    try:
        stored = json.loads((out / "config.json").read_text())
        COMMITS.update(stored["commits"])
        stored["steps"] = max(stored["steps"], done)  # A resume may raise steps.
    except Exception as error:  # A damaged file raises many types.
        raise Refused(
            f"--resume: {out}/config.json cannot be read: {one_line(error)}; restore "
            "it, or copy the config.json of a new run with the same flags"
        ) from None
    if not done and (not stored.get("save_every") or (out / "model").exists()):
        raise Refused(
            f"--resume: the run in out_dir {out} has ended or saves no checkpoints "
            "(save_every is 0), so there is nothing to continue from: choose another "
            "folder, or delete this one"
        )
    allowed = NEUTRAL_FIELDS | ADJUSTABLE_FIELDS if done else NEUTRAL_FIELDS
    # With a lag, a longer run would have sampled batches that the stored one has not. A
    # run that takes no further step needs none of them.
    if cfg.steps == done or cfg.steps > done and cfg.lag == 0:
        allowed = allowed | {"steps"}
    for name, new in config_of(cfg).items():
        old = stored.get(name)
        if old != new and name not in allowed:
            raise Refused(
                f"--resume: {name} was {old!r} in {out} and is {new!r}; keep the old "
                "value, or choose another out_dir"
            )


def check_free(out_dir: str) -> None:
    """Raise Refused if out_dir holds more than the leftovers of a run that failed.

    A run that fails at its start leaves an empty folder, or only its config.json. The
    user's own files do not matter: a scheduler may log to slurm-7.out or job.o7 in this
    folder before the run starts, and a job script may copy its recipe there.
    """
    try:
        names = [
            name
            for name in os.listdir(out_dir)
            if not re.search(r"^\.|\.(?:out|err|log|txt|ya?ml|sh|[eo]\d+)$", name)
        ]
    except OSError:
        return  # take_folder creates it, or says why it cannot be created.
    if names == ["config.json"]:
        content = Path(out_dir, *names).read_bytes()
        if not content or b'"ranks"' in content:
            return
    if names:
        raise Refused(
            f"out_dir {out_dir} exists: choose another; train.py continues a run of "
            "its own with --resume"
        )


def config_of(cfg: Flags) -> dict[str, Any]:
    """Return the content of config.json.

    It has the fields of a configuration, the number of ranks, and the commits that were
    read from the hub.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    return {**cfg.model_dump(), "ranks": ranks, "commits": COMMITS}


def make_out_dir(cfg: Config) -> Path:
    """Create or reopen out_dir, and print the run's first lines. A collective.

    The configuration with which a run continues is added to resumes.jsonl. Raises
    Refused if this node does not see the folder.
    """
    # Rank 0 chooses the name, because it contains the time.
    names = [cfg.out_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{os.getpid()}")]
    dist.broadcast_object_list(names)
    [cfg.out_dir] = names
    out = Path(cfg.out_dir)
    if dist.get_rank() == 0:
        take_folder(out, cfg)
        # Schedulers send SIGTERM some seconds before they kill a job. With this handler
        # SIGTERM ends the run as Ctrl-C does, and run_script says how to continue.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(
            f"{out}: trains in {cfg.dtype}; the engine's dtype is {cfg.rollout_dtype}"
        )
        if done := max(checkpoints(out), default=0):
            append_row(out / "resumes.jsonl", {"step": done, **config_of(cfg)})
            print(f"{out}: continues after step {done}/{cfg.steps}, then saves model/")
        print(
            "e_B is 1 if the policy itself sampled the batch, and falls as policy and "
            "sampler drift apart; KL is in nats per token; tokens is the mean length "
            "of a response"
        )
    dist.barrier()
    # NFS may hide a new folder from this node until the node tries to create it, too.
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "config.json").exists():
        raise Refused(
            f"out_dir {out} on this node is not that of the first rank: give a folder "
            "on a file system that all nodes share"
        )
    return out


def take_folder(out: Path, cfg: Flags) -> None:
    """Create out_dir with its config.json, and lock it until this process ends.

    A run with checkpoints keeps its config.json. Raises OSError if the folder cannot be
    created, and Refused if another run holds the lock.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = os.open(out / "config.json", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(f"out_dir {out}: another run is using it") from None
    except OSError:
        pass  # Some file systems have no locks.
    if not checkpoints(out):
        for name in ROW_FILES:
            (out / name).unlink(missing_ok=True)
        # If the file were opened a second time, closing it would end the lock.
        os.truncate(file, 0)
        os.write(file, json.dumps(config_of(cfg), indent=1).encode())


@contextmanager
def publish(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, and rename it to `folder` after the with-block.

    A run may be killed at any moment, so a new folder has its name only when it is
    complete. An earlier folder of this name is deleted first. Raises Stopped if
    the folder cannot be written, as on a full disk. A collective.
    """
    unfinished = folder.with_name("unfinished")
    is_first = dist.get_rank() == 0
    try:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        yield unfinished
        dist.barrier()
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
    except (CheckpointException, Exception) as error:  # libraries raise many types
        raise Stopped(
            f"{folder} cannot be written: {reason_of(error)}; free space if its disk "
            "is full; --resume continues from the newest checkpoint, if there is one"
        ) from error


def save_checkpoint(
    out: Path,
    step: int,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    queue: Iterable,
    metrics: dict[str, Any],
) -> None:
    """Write checkpoints/step-N, then delete all but the newest two. A collective.

    `queue` holds this rank's rollout.Rollouts that no step has used yet. `metrics` are
    those of the step, which are logged only after this. Raises Stopped if the
    checkpoint cannot be written.
    """
    rank = dist.get_rank()
    weights, moments = get_state_dict(policy, optimizer)
    state = {"model_state_dict": weights, "optim_state_dict": moments}
    with publish(out / "checkpoints" / f"step-{step:06d}") as folder:
        dcp.save(state, checkpoint_id=folder)
        own = {
            "metrics": metrics,
            "queue": list(map(vars, queue)),
            "rows": {
                name: (out / name).read_text(errors="replace")
                for name in ROW_FILES
                if rank == 0
            },
        }
        torch.save(own, folder / f"rank-{rank}.pt")
    if rank == 0:
        for _, old in sorted(checkpoints(out).items())[:-2]:
            # Renamed first, so that a half-deleted folder is not a checkpoint.
            shutil.rmtree(old.rename(folder), ignore_errors=True)


def load_checkpoint(
    out: Path, policy: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, dict, list[dict], dict[str, str]]:
    """Restore policy and optimizer from the newest complete checkpoint.

    Returns its step, its metrics, the fields of its unused rollouts, and, on rank 0,
    the rows that metrics.jsonl and samples.jsonl had when it was saved. A run that is
    resumed at lag 4 continues with the batches that it had sampled ahead. Without a
    checkpoint, the step is 0, and there are no rollouts and rows. Raises Refused if the
    checkpoint cannot be read. A collective.
    """
    newest = [max(checkpoints(out).items(), default=(0, out))]
    dist.broadcast_object_list(newest)
    [(step, checkpoint)] = newest
    if step == 0:
        return 0, {"step": 0}, [], {}
    weights, moments = get_state_dict(policy, optimizer)
    state = {"model_state_dict": weights, "optim_state_dict": moments}
    try:
        dcp.load(state, checkpoint_id=checkpoint)
        own = torch.load(checkpoint / f"rank-{dist.get_rank()}.pt", weights_only=True)
    except (CheckpointException, Exception) as error:  # torch raises many types.
        raise Refused(
            f"--resume: {checkpoint} cannot be read: {reason_of(error)}; move it away "
            "to continue from the one before"
        ) from error
    set_state_dict(policy, optimizer, **state)
    return step, own["metrics"], own["queue"], own["rows"]


def reason_of(error: BaseException) -> str:
    """Return the reason of an error on one line.

    A CheckpointException holds the errors of several ranks, of which the last counts.
    """
    for cause, _ in getattr(error, "failures", {}).values():
        error = cause
    return one_line(error)


def save_model(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]], folder: Path
) -> None:
    """Write, whole or not at all, a folder that transformers and vLLM can load.

    `weights` are those of policy.full_weights, which rank 0 collects in main memory.
    They are stored in the dtype of the model's config, and a tied head is stored once.
    All other files, such as config.json and the tokenizer's, are copies of those in the
    folder that the model was built from, so a version of the libraries that can read
    that folder can read this one. A collective. Raises Stopped if the folder cannot be
    written.
    """
    stored = {}  # stays empty on the other ranks
    for name, weight in weights:
        if dist.get_rank() == 0 and name not in model.all_tied_weights_keys:
            stored[name] = weight.to("cpu", model.config.dtype)
    with publish(folder) as unfinished:
        if stored:
            save_torch_state_dict(stored, unfinished)
            for pattern in COMPANIONS:
                for file in Path(model.name_or_path).glob(pattern):
                    if file.is_file():
                        shutil.copyfile(file, unfinished / file.name)
            # So far only the owner can read these; give them config.json's permissions.
            for file in unfinished.glob("*.safetensors"):
                shutil.copymode(unfinished / "config.json", file)
