"""Run train.py and kill one rank with SIGKILL while it saves a checkpoint.

    torchrun --nproc-per-node 2 tests/killed.py RANK STEP FLAG ...

The data of that rank are written by then, but not their index.
"""

import os
import signal
import sys
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

import train
from support.command import run_script


def arm(fatal_step: int) -> None:
    """Make this process kill itself while it saves this step."""
    save_checkpoint = train.save_checkpoint
    write_data = FileSystemWriter.write_data

    def write_data_and_die(*arguments: Any) -> None:
        write_data(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    def save_checkpoint_or_die(out: Any, step: int, *state: Any) -> None:
        if step == fatal_step:
            FileSystemWriter.write_data = write_data_and_die
        save_checkpoint(out, step, *state)

    train.save_checkpoint = save_checkpoint_or_die


if __name__ == "__main__":
    rank, step, *flags = sys.argv[1:]
    if rank == os.environ.get("RANK", "0"):
        arm(int(step))
    sys.argv = ["train.py", *flags]
    run_script(train.main)
