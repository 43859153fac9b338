"""train.py, of which one rank gets kill -9 in the middle of a step.

    python tests/killed.py RANK PHASE STEP FLAG ...
    torchrun --nproc-per-node 2 tests/killed.py RANK PHASE STEP FLAG ...

PHASE is "update": the gradient of a batch is there, and the optimizer's step is not. Or
it is "save": this rank's data of the checkpoint are written, and their index is not.
"""

import os
import signal
import sys
from typing import Any

import train  # isort: skip  (first: it sets what torch reads when it is imported)
from torch.distributed.checkpoint import FileSystemWriter

from support.command import run_script


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(phase: str, fatal_step: int) -> None:
    """Have this process die in this phase of this step."""
    apply_gradient, save_checkpoint = train.apply_gradient, train.save_checkpoint
    write_data = FileSystemWriter.write_data

    def write_data_and_die(*arguments: Any) -> None:
        write_data(*arguments)
        die()

    def apply_gradient_or_die(
        policy: Any, optimizer: Any, cfg: Any, step: int
    ) -> float:
        if (phase, step) == ("update", fatal_step):
            die()
        return apply_gradient(policy, optimizer, cfg, step)

    def save_checkpoint_or_die(out: Any, step: int, *state: Any) -> None:
        if (phase, step) == ("save", fatal_step):
            FileSystemWriter.write_data = write_data_and_die
        save_checkpoint(out, step, *state)

    train.apply_gradient = apply_gradient_or_die
    train.save_checkpoint = save_checkpoint_or_die


if __name__ == "__main__":
    rank, phase, step, *flags = sys.argv[1:]
    if rank == os.environ.get("RANK", "0"):
        arm(phase, int(step))
    sys.argv = ["train.py", *flags]
    run_script(train.main)
