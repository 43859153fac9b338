"""Runs of two ranks, of which one is killed in the middle of a phase.

    python tests/one_rank_dies.py FOLDER NODES KILLED PHASE ...

NODES is 1 or 2: the ranks are on one node or each is on a node of its own. The phases
are those of lives.py; rank KILLED, 0 or 1, sends itself SIGKILL in the second step. No
torchrun is there that would end the other one. Prints a JSON object, for each phase:
{"code": the other one's exit code, "printed": what it printed, "seconds": how long it
outlived the killed one}.
"""

import json
import sys
import time
from pathlib import Path

from launch import exit_code, free_port
from lives import begin_life

FLAGS = [
    "--steps=4",
    "--prompts_per_step=4",
    "--eval_problems=8",
    "--eval_every=0",
    "--save_every=1",
]


def environment_of(rank: int, nodes: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank."""
    ranks_of_node = 2 // nodes
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank % ranks_of_node),
        "LOCAL_WORLD_SIZE": str(ranks_of_node),
        "GROUP_RANK": str(rank // ranks_of_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def begin_two_ranks(
    folder: Path, flags: list[str], nodes: int, blows: list[list | None]
) -> list[int]:
    """Start a run of two ranks, each with its blow or None; their process ids.

    They write into folder/run, and print into folder/printed-0 and folder/printed-1.
    """
    port = free_port()
    flags = [*flags, f"--out_dir={folder / 'run'}"]
    processes = []
    for rank, blow in enumerate(blows):
        environment = environment_of(rank, nodes, port)
        output = folder / f"printed-{rank}"
        processes.append(begin_life(flags, blow, output, environment))
    return processes


def outlive(folder: Path, nodes: int, killed: int, phase: str) -> dict:
    """A run of two ranks, of which one is killed; what became of the other one."""
    other = 1 - killed
    blows: list[list | None] = [None, None]
    blows[killed] = ["SIGKILL", phase, 2]
    processes = begin_two_ranks(folder, FLAGS, nodes, blows)
    status = exit_code(processes[killed])
    assert status == -9, (folder / f"printed-{killed}").read_text()
    killed_at = time.monotonic()
    code = exit_code(processes[other])
    return {
        "code": code,
        "printed": (folder / f"printed-{other}").read_text(),
        "seconds": time.monotonic() - killed_at,
    }


def main(folder: Path, nodes: int, killed: int, phases: list[str]) -> None:
    ends = {}
    for phase in phases:
        of_phase = folder / phase
        of_phase.mkdir()
        ends[phase] = outlive(of_phase, nodes, killed, phase)
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
