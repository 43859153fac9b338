"""Saves one after another, killed at any moment.

    python tests/save_until_killed.py FOLDER KILLS

Each process checks the newest checkpoint of those before it. Then it saves one after
another until it is killed, at a random moment of a save or of the deletion of an old
checkpoint. A last process only checks. Prints the names that each of the KILLS kills
left in FOLDER/checkpoints, a line each.
"""

import os
import random
import signal
import sys
import time
from collections import deque
from pathlib import Path

import torch

from policy import build_policy
from rollout import Rollouts, init_distributed
from support.checkpoints import checkpoints, load_checkpoint, save_checkpoint


def go_on(folder: Path, saves: bool) -> None:
    """Check the newest checkpoint, and then save one after another, without end.

    The weights of each are all equal to its step.
    """
    policy = build_policy("tiny", init_distributed())
    optimizer = torch.optim.AdamW(policy.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
    state = (policy, optimizer, schedule, deque())
    step = 0
    if checkpoints(folder):
        step = load_checkpoint(folder, *state, group_size=8, rollouts_type=Rollouts)
        assert checkpoints(folder)[-1].name == f"step-{step:06d}"
        for weight in policy.parameters():
            assert (weight.full_tensor() == step).all()
    while saves:
        step += 1
        for weight in policy.parameters():
            torch.nn.init.constant_(weight, step)
        save_checkpoint(folder, step, *state, group_size=8, keep=2)


def begin(folder: Path, saves: bool) -> int:
    """A process that goes on; its process id. It exits with 0 if all is as it was."""
    child = os.fork()
    if child == 0:
        try:
            go_on(folder, saves)
            os._exit(0)
        finally:  # which only an error reaches
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return child


def main(folder: Path, kills: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    moment = random.Random(0)
    for _ in range(kills):
        newest_before = checkpoints(folder)[-1:]
        child = begin(folder, saves=True)
        while checkpoints(folder)[-1:] == newest_before:
            has_ended, _ = os.waitpid(child, os.WNOHANG)
            assert not has_ended, "it should save until it is killed"
            time.sleep(0.01)
        time.sleep(moment.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        left = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
        print(*left)
    _, status = os.waitpid(begin(folder, saves=False), 0)
    assert os.waitstatus_to_exitcode(status) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
