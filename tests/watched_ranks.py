"""Three ranks on two nodes, of which rank 2 is killed while the others are busy.

    python tests/watched_ranks.py FOLDER

They are busy in C++, with something that is no collective, as in a long rollout. Prints
a JSON list, for each rank: {"code": its exit code, "printed": what it printed}.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from launch import exit_code, free_port

from support import ranks

NODE_OF_RANK = [0, 0, 1]


def be_rank(rank: int, port: int, output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="3", GROUP_RANK=str(NODE_OF_RANK[rank])
    )
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    ranks.GRACE = 0.1
    with ranks.watch_ranks():
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["never"], timedelta(minutes=10))


def main(folder: Path) -> None:
    port = free_port()
    processes = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            try:
                be_rank(rank, port, folder / str(rank))
            finally:  # which only an error reaches
                sys.excepthook(*sys.exc_info())
                os._exit(2)
        processes.append(child)
    codes = [exit_code(process) for process in processes]
    ends = [
        {"code": code, "printed": (folder / str(rank)).read_text()}
        for rank, code in enumerate(codes)
    ]
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
