"""Checkpoints: what a run that was killed goes on from, with the same prompts and samples.

No random state is saved, for none matters: the order of the problems, the minibatches and the noise
of the samples are pure functions of (seed, step), and nothing else draws (a policy has no dropout).
"""

import json
import shutil
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils.rnn import pad_sequence

from config import Config, Refused
from policy import Policy
from rollout import Rollouts

# A resumed run may change what it does not learn from. (The sizes of batches do round otherwise.)
MAY_DIFFER = """out_dir steps eval_every save_every keep_checkpoints resume report_to verbose
    micro_batch_tokens kv_cache_gb max_num_seqs"""


def checkpoints(out_dir: str) -> list[Path]:
    """The complete checkpoints of a run, the newest last."""
    found = Path(out_dir, "checkpoints").glob("step-*")
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def check_resume(cfg: Config) -> None:
    """Raises Refused where --resume has nothing to go on from, nothing to do, or another task."""
    run = Path(cfg.out_dir)
    if not cfg.out_dir or not (run / "config.json").exists():
        raise Refused(f"--resume: out_dir {cfg.out_dir!r} holds no run")
    stored = json.loads((run / "config.json").read_text())
    same = asdict(cfg).keys() - set(MAY_DIFFER.split())
    if other := sorted(name for name in same if stored.get(name) != getattr(cfg, name)):
        values = ", ".join(f"{n} was {stored.get(n)!r}, is {getattr(cfg, n)!r}" for n in other)
        raise Refused(f"--resume: not the configuration of {run}: {values}")
    log = run / "metrics.jsonl"  # which a run that was killed early has not begun
    rows = log.read_text().splitlines(keepends=True) if log.exists() else []
    done = max((json.loads(row)["step"] for row in rows if row.endswith("\n")), default=0)
    if done >= cfg.steps:  # the last line comes after model/
        raise Refused(f"--resume: {run} is finished, {done} steps are done; give it more --steps")
    if not checkpoints(cfg.out_dir):
        raise Refused(f"--resume: {run} has no complete checkpoint; start anew in another out_dir")


def save_checkpoint(
    cfg: Config,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    queue: deque[Rollouts],
) -> None:
    """Write checkpoints/step-N and delete all but the newest keep_checkpoints: a collective.

    A folder has such a name only while it is complete: a run may be killed at any moment.
    """
    unfinished = Path(cfg.out_dir, "checkpoints", "unfinished")
    if dist.get_rank() == 0 and unfinished.exists():  # of a run that was killed
        shutil.rmtree(unfinished)
    dist.barrier()
    weights, moments = get_state_dict(policy, optimizer)
    state = {"policy": weights, "optimizer": moments, "schedule": schedule.state_dict()}
    everyone: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(list(queue), everyone)
    if everyone is not None:  # only here: of a key on all ranks, any rank's value may be written
        merged = [merge(parts, cfg.group_size) for parts in zip(*everyone, strict=True)]
        state["step"], state["queue"] = step, merged
    dcp.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(unfinished.with_name(f"step-{step:06d}"))
        for old in checkpoints(cfg.out_dir)[: -cfg.keep_checkpoints]:
            shutil.rmtree(old.rename(unfinished))


def load_checkpoint(
    cfg: Config,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    queue: deque[Rollouts],
) -> int:
    """Restore the newest complete checkpoint in place; returns the step to go on with.

    It may have been written by another number of ranks: each takes the groups that it would have
    sampled.
    """
    weights, moments = get_state_dict(policy, optimizer)
    state = {"policy": weights, "optimizer": moments, "schedule": schedule.state_dict()}
    state |= {"step": 0, "queue": []}
    dcp.load(state, checkpoint_id=checkpoints(cfg.out_dir)[-1])
    set_state_dict(
        policy, optimizer, model_state_dict=state["policy"], optim_state_dict=state["optimizer"]
    )
    schedule.load_state_dict(state["schedule"])
    rank, world = dist.get_rank(), dist.get_world_size()
    for rollouts in state["queue"]:
        mine = [i for i in range(len(rollouts.text)) if i // cfg.group_size % world == rank]
        queue.append(rollouts.rows(mine))
    return state["step"]


def merge(parts: list[Rollouts], group_size: int) -> Rollouts:
    """The ranks' rollouts of a step as one, in order of place: group g of rank r has g * world + r.

    The same for any number of ranks.
    """
    groups = [(g, r) for r, part in enumerate(parts) for g in range(len(part.text) // group_size)]
    text = [text for part in parts for text in part.text]
    order = sorted(range(len(text)), key=lambda i: groups[i // group_size])
    merged = {}
    for name, value in vars(parts[0]).items():
        if isinstance(value, torch.Tensor):
            rows = [row for part in parts for row in getattr(part, name)]
            join = torch.stack if value.dim() == 1 else lambda x: pad_sequence(x, batch_first=True)
            merged[name] = join([rows[i] for i in order])
    versions = " and ".join(sorted({part.weight_version for part in parts}))
    return replace(parts[0], text=[text[i] for i in order], weight_version=versions, **merged)
