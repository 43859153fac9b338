"""python tests/save_until_killed.py FOLDER KILLS: saves one after another, killed at any moment.

Each process checks the newest checkpoint of those before it, then saves one after another until it
is killed, KILLS times, at a random moment of a save or of the deletion of an old checkpoint. Prints
the names that the kills left in FOLDER/checkpoints, a line each.
"""

import os
import random
import signal
import sys
import time
from collections import deque
from pathlib import Path

import torch

from checkpoint import checkpoints, load_checkpoint, save_checkpoint
from config import Config
from policy import build_policy
from rollout import init_distributed


def save_on(folder: str) -> None:
    """Checkpoints whose weights are all equal to their step, without end."""
    cfg = Config(out_dir=folder)
    policy = build_policy(cfg, init_distributed())
    optimizer = torch.optim.AdamW(policy.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    parts, step = (policy, optimizer, schedule, deque()), 0
    if checkpoints(folder):
        step = load_checkpoint(cfg, *parts)
        assert checkpoints(folder)[-1].name == f"step-{step:06d}"
        assert all((p.full_tensor() == step).all() for p in policy.parameters())
    while True:
        step += 1
        for p in policy.parameters():
            torch.nn.init.constant_(p, step)
        save_checkpoint(cfg, step, *parts)


def main(folder: str, kills: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    moment = random.Random(0)
    for _ in range(kills):
        before = checkpoints(folder)
        child = os.fork()
        if child == 0:
            try:
                save_on(folder)
            finally:  # which only an error reaches
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        while checkpoints(folder)[-1:] == before[-1:] and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        time.sleep(moment.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        print(*sorted(path.name for path in Path(folder, "checkpoints").iterdir()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
