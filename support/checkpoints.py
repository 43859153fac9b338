"""A run's folder: checkpoints, from which a killed run goes on, and the last model.

No random state is saved, for none matters: the order of the problems and the sampling
noise are pure functions of (seed, step), and nothing else draws.

A checkpoint is a folder: the shards of weights and moments that
torch.distributed.checkpoint writes, and of each rank the step's metrics and the
rollouts that wait.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from support.command import Flags, Refused, Stopped
from support.config import MAY_DIFFER, Config
from support.hub import COMMITS
from support.machine import bfloat16_is_slow

SECONDS_UNSEEN = 60  # so long NFS may hide a new folder from another node
KEPT = 2  # checkpoints of a run, the newest


def checkpoints(out: Path) -> list[Path]:
    """The complete checkpoints of a run, the newest last."""
    return sorted((out / "checkpoints").glob("step-??????"))


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def check_out_dir(cfg: Config) -> None:
    """Raises Refused where out_dir is taken, or --resume cannot go on there."""
    if not cfg.resume:
        return check_free(cfg.out_dir)
    out = Path(cfg.out_dir)
    if not cfg.out_dir or not checkpoints(out):
        raise Refused(
            f"--resume: out_dir {cfg.out_dir!r} has no complete checkpoint: remove the "
            "folder or choose another, and begin without --resume"
        )
    stored = json.loads((out / "config.json").read_text())
    COMMITS.update(stored.get("commits", {}))  # to read the same data and model again
    done = step_of(checkpoints(out)[-1])
    if cfg.steps < done:
        raise Refused(f"--resume: {out} has made {done} steps; steps is {cfg.steps}")
    for name, value in config_of(cfg).items():
        may_differ = name in MAY_DIFFER or (name == "steps" and cfg.lag == 0)
        if stored.get(name) != value and not may_differ:
            raise Refused(
                f"--resume: {name} was {stored.get(name)!r} in {out} and is {value!r}; "
                "go on with what it was"
            )


def check_free(out_dir: str) -> None:
    """Raises Refused where there is more than a start that failed early leaves.

    That is an empty folder, or a run's config.json alone.
    """
    try:
        names = os.listdir(out_dir)
    except OSError:
        return  # take_folder makes it, or says why it cannot.
    if names == ["config.json"] and b'"ranks"' in Path(out_dir, *names).read_bytes():
        return
    if names:
        raise Refused(
            f"out_dir {out_dir} exists: choose another, or --resume (train.py)"
        )


def config_of(cfg: Flags) -> dict[str, Any]:
    """What config.json holds: the fields of a configuration, the number of ranks, the
    commits that were read from the hub, and the variables of vLLM, torch and OpenMP,
    which may change a run."""
    libraries = "VLLM_(?!API_KEY)|OMP_|KMP_|MKL_|TORCH_|PYTORCH_|CUDA_|NCCL_"
    return {
        **cfg.model_dump(),
        "ranks": int(os.environ.get("WORLD_SIZE", 1)),
        "commits": COMMITS,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if re.match(libraries, name)
        },
    }


def make_out_dir(cfg: Config) -> Path:
    """Make the run's folder with config.json, unless --resume has it. A collective.

    Raises Refused, on all ranks, where a node does not see it.
    """
    # The folder's name has rank 0's time.
    named = [cfg.out_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{os.getpid()}")]
    dist.broadcast_object_list(named)
    cfg.out_dir = named[0]
    out = Path(cfg.out_dir)
    if dist.get_rank() == 0:
        take_folder(out, cfg)
        is_slow = "bfloat16" in (cfg.dtype, cfg.rollout_dtype) and bfloat16_is_slow()
        note = " (bfloat16 is slow on this CPU)" if is_slow else ""
        print(f"{out}: trains in {cfg.dtype}, samples in {cfg.rollout_dtype}{note}")
        print(
            "e_B is 1 where the policy is what sampled, and falls the further they are "
            "apart; KL: nats a token; tokens: of a response"
        )
    dist.barrier()
    for _ in range(SECONDS_UNSEEN):
        if out.exists():
            break
        time.sleep(1)
    hosts: list = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, None if out.exists() else socket.gethostname())
    for host in filter(None, hosts):
        raise Refused(
            f"out_dir {out} is not on {host}: give a folder on a file system that all "
            "nodes share"
        )
    return out


def take_folder(out: Path, cfg: Flags) -> None:
    """Make an out_dir with its config.json, and lock it until this process ends.

    Raises Refused where that cannot be, or where another run has the lock.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = os.open(out / "config.json", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"out_dir {out}: another run is at work there") from None
        except OSError:
            pass  # Some file systems know no locks.
        if not checkpoints(out):  # --resume keeps it.
            # The lock would end with another file that is closed.
            os.truncate(file, 0)
            os.write(file, json.dumps(config_of(cfg), indent=1).encode())
    except OSError as error:
        raise Refused(f"out_dir {out} cannot be made: {error.strerror}") from None


def save_checkpoint(
    out: Path,
    step: int,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    queue: Iterable[Any],
    metrics: dict[str, Any],
) -> None:
    """Write checkpoints/step-N, then delete all but the newest KEPT: a collective.

    `queue` are this rank's rollout.Rollouts that no step has used yet, and `metrics`
    are the step's, which is logged only after this. A folder has its name only when it
    is complete, as a run may be killed at any moment. Raises Stopped where it cannot be
    written, as on a full disk.
    """
    rank = dist.get_rank()
    unfinished = out / "checkpoints" / "unfinished"
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    weights, moments = get_state_dict(policy, optimizer)
    of_rank = {"metrics": metrics, "queue": [vars(batch) for batch in queue]}
    try:
        dist.barrier()
        dcp.save({"policy": weights, "optimizer": moments}, checkpoint_id=unfinished)
        torch.save(of_rank, unfinished / f"rank-{rank}.pt")
        dist.barrier()
        if rank == 0:
            unfinished.rename(unfinished.with_name(f"step-{step:06d}"))
            for old in checkpoints(out)[:-KEPT]:
                # A folder that is only half deleted has no name of a checkpoint.
                shutil.rmtree(old.rename(unfinished))
    except (CheckpointException, OSError, RuntimeError) as error:
        free = shutil.disk_usage(out).free / 2**30  # torch does not say: a full disk.
        raise Stopped(
            f"step {step}: the checkpoint cannot be written to {unfinished}, where "
            f"{free:.2g} GB are free: {last_line(error)}; {len(checkpoints(out))} are "
            "there that --resume can go on from"
        ) from error


def load_checkpoint(
    out: Path, policy: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Restore policy and optimizer in place, from the newest complete checkpoint.

    Returns its step, the metrics of that step, and the fields of the rollouts that
    wait: a run resumed at lag 4 goes on with the batches that it had sampled ahead, and
    samples none of them again. Log drops the metrics of later steps. A collective.
    Raises Refused where it cannot be read.
    """
    newest = checkpoints(out)[-1]
    weights, moments = get_state_dict(policy, optimizer)
    state = {"policy": weights, "optimizer": moments}
    try:
        dcp.load(state, checkpoint_id=newest)
        of_rank = torch.load(newest / f"rank-{dist.get_rank()}.pt", weights_only=True)
    except (CheckpointException, Exception) as error:  # torch has many kinds of them
        raise Refused(
            f"--resume: {newest} cannot be read: {last_line(error)}; remove "
            "it to go on from the one before"
        ) from error
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=state["policy"],
        optim_state_dict=state["optimizer"],
    )
    return step_of(newest), of_rank["metrics"], of_rank["queue"]


def last_line(error: BaseException) -> str:
    """What went wrong. A CheckpointException has the ranks' tracebacks above it."""
    return (str(error).strip() or repr(error)).splitlines()[-1]


def save_model(
    model: PreTrainedModel,
    weights: Iterable[tuple[str, torch.Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """A folder that transformers and vLLM load, written whole and then renamed.

    `weights` are those of policy.full_weights, which rank 0 keeps in main memory. They
    are stored in the dtype of the model's config, a tied head once. A collective.
    Raises Stopped where it cannot be written.
    """
    dtype = model.config.dtype
    kept = {}
    for name, weight in weights:
        if dist.get_rank() == 0 and name not in model.all_tied_weights_keys:
            kept[name] = weight.to("cpu", dtype)
    if dist.get_rank() > 0:
        return
    unfinished = folder.with_name("model.unfinished")
    generation = model.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:
        # It came with a temperature or top-p, but without do_sample, as Vicuna does.
        # transformers would not save that.
        generation.do_sample = True
    try:
        generation.validate(strict=True)
    except ValueError:  # nor other mistakes, as the -1 for padding of old LLaMAs
        end = generation.eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=end)
    try:
        model.save_pretrained(unfinished, state_dict=kept)
        for file in unfinished.glob("*.safetensors"):  # safetensors lets no other read.
            file.chmod((unfinished / "config.json").stat().st_mode)
        model.config.dtype = dtype  # It has written that of the master weights.
        model.config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that had fewer steps
        unfinished.rename(folder)
    except Exception as error:  # safetensors has errors of its own
        raise Stopped(f"the model cannot be written to {folder}: {error}") from error
