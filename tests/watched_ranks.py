"""Three ranks, of which rank 2 is killed while the others are busy.

    python tests/watched_ranks.py FOLDER

They are busy in C++, with something that is no collective, as in a long rollout. They
know rank 0 by an address that is not the one it calls its own. Prints a JSON list, for
each rank: {"code": its exit code, "printed": what it printed}.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from launch import exit_code

from support import ranks

RANKS = 3


def be_rank(rank: int, folder: Path) -> None:
    file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    address = "127.0.0.1" if rank == 0 else "127.0.0.2"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR=address)
    meeting = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS)
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    ranks.GRACE = 0.1
    with ranks.watch_ranks():
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["never"], timedelta(minutes=10))


def main(folder: Path) -> None:
    processes = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                be_rank(rank, folder)
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
