"""Run train.py and kill one rank with SIGKILL while it saves a checkpoint.

    torchrun --nproc-per-node 2 tests/killed.py RANK NUMBER FLAG ...

It is killed in its checkpoint of this number, counted from 1. By then it has written
its data, but not their index.
"""

import itertools
import os
import signal
import sys
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

import train
from support.command import run_script

rank, number, *flags = sys.argv[1:]
write_data = FileSystemWriter.write_data
saves = itertools.count(1)


def write_data_or_die(*arguments: Any) -> Any:
    written = write_data(*arguments)
    if next(saves) == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return written


if rank == os.environ["RANK"]:
    FileSystemWriter.write_data = write_data_or_die
sys.argv = ["train.py", *flags]
run_script(train.main)
