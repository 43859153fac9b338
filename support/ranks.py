"""How a rank ends: when it is asked to, or because another one has ended.

A collective waits for all ranks, for half an hour if it must, and a rank that waits in
C++ runs no Python: no signal handler, and no exception. So a thread of each rank takes
its signals, and another one watches the other processes.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from support.flags import OneRankFailed, Refused

# What torchrun and a shell send more than once for one wish comes within this time.
ONE_WISH = 2.0  # seconds
WATCH_EVERY = 1.0  # seconds
# A rank that learns from a collective that another one has ended says so itself. One
# that does not is ended after this time: torchrun would kill it after 30 seconds.
GRACE = 20.0  # seconds


def catch_signals() -> list[int]:
    """The signals that ask the run to stop, in a list that grows when they come.

    The step that they interrupt is finished and saved. A second Ctrl-C ends the process
    at once, even where it waits for another rank.
    """
    signals: list[int] = []
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def take() -> None:
        first_at = 0.0
        while True:
            [number] = os.read(read_end, 1)
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if signals and time.monotonic() - first_at > ONE_WISH:
                os._exit(128 + number)
            if not signals:
                first_at = time.monotonic()
            signals.append(number)

    # Python writes the number of each signal that has a handler to this pipe, whatever
    # the main thread is doing.
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    threading.Thread(target=take, daemon=True).start()
    return signals


@contextmanager
def watch_ranks() -> Iterator[None]:
    """Within, this process ends soon after another rank of its node has.

    Entering is a collective. Leaving is none: where all is done, ranks end one by one.
    """
    node = os.environ.get("GROUP_RANK", "0")
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (node, os.getpid()))
    neighbors = {
        rank: pid
        for rank, (node_of_rank, pid) in enumerate(of_ranks)
        if node_of_rank == node and rank != dist.get_rank()
    }
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(WATCH_EVERY):
            ended = [rank for rank, pid in neighbors.items() if not is_alive(pid)]
            if ended and not is_over.wait(GRACE):
                say(f"rank {ended[0]} has ended, and so does this one")
                os._exit(1)

    if neighbors:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and more than the entry that it leaves."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    state = stat.rpartition(")")[2].split()[0]
    return state not in ("Z", "X")


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is not there any more."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def run_script(main: Callable[[], None]) -> int:
    """A script's main; returns the exit status. What ends it is said in one sentence,
    on every rank, if it is nothing that a traceback would tell more about.
    """
    try:
        main()
    except (Refused, FloatingPointError, OneRankFailed) as error:
        say(str(error))
        return 1
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        say("another rank has ended, and so does this one")
        return 1
    return 0


def say(sentence: str) -> None:
    """One line on stderr: which script, which rank if not 0, and what it says."""
    script = Path(sys.argv[0]).name
    rank = int(os.environ.get("RANK", 0))
    where = f"rank {rank}: " if rank > 0 else ""
    print(f"{script}: {where}{sentence}", file=sys.stderr, flush=True)
