"""How a rank ends: when it is asked to, or because another one has ended.

A collective waits for all ranks, 30 minutes if need be, and a rank that waits in C++
runs no Python: no signal handler, and no exception. So a thread of each rank takes its
signals, and another one watches a connection to the other processes.
"""

import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from support.flags import OneRankFailed, Refused

# What torchrun and a shell send more than once for one wish comes within this time.
ONE_WISH = 2.0  # seconds
CONNECT_WITHIN = 60.0  # seconds
# A rank that learns from a collective that another one has ended says so itself. One
# that does not is ended after this time: torchrun would kill it after 30 seconds.
GRACE = 20.0  # seconds


def catch_signals() -> list[int]:
    """The signals that ask the run to stop, in a list that grows when they come.

    The step that they interrupt is finished and saved. A second Ctrl-C, ONE_WISH after
    the first or later, ends the process at once, even where it waits for another rank.
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
    """Within, this process ends soon after another rank has, on whatever node it was.

    Entering is a collective. Leaving is none: where all is done, ranks end one by one.
    """
    connections = connect_ranks()
    is_over = threading.Event()

    def watch() -> None:
        ended = wait_for_end(connections)
        if not is_over.wait(GRACE):
            say(f"rank {ended} has ended, and so does this one")
            os._exit(1)

    if connections:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def connect_ranks() -> dict[int, socket.socket]:
    """Connections between rank 0 and each other one, by the other end's rank.

    They stay open for as long as both processes are there: the system closes them when
    one ends, however it does. A collective. Raises OneRankFailed where a rank cannot be
    reached.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return {}
    listener = None
    told: list = [None]
    if rank == 0:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        told = [(listener.getsockname()[1], secrets.token_bytes(16))]
    dist.broadcast_object_list(told)
    port, key = told[0]
    try:
        if listener is None:
            address = (os.environ["MASTER_ADDR"], port)
            connection = socket.create_connection(address, CONNECT_WITHIN)
            connection.sendall(key + rank.to_bytes(4))
            connections = {0: connection}
        else:
            connections = accept_ranks(listener, world - 1, key)
    except OSError as error:
        raise OneRankFailed(
            f"no connection to the other ranks at {os.environ['MASTER_ADDR']}, port "
            f"{port}: {error}; open the ports between the nodes"
        ) from error
    for connection in connections.values():
        connection.settimeout(None)
        # A machine that is gone closes nothing: it is asked, and is gone after 30 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    return connections


def accept_ranks(
    listener: socket.socket, count: int, key: bytes
) -> dict[int, socket.socket]:
    """The connections of so many ranks. Whoever else connects has no key."""
    connections: dict[int, socket.socket] = {}
    with listener:
        listener.settimeout(CONNECT_WITHIN)
        while len(connections) < count:
            connection, _ = listener.accept()
            connection.settimeout(CONNECT_WITHIN)
            with suppress(TimeoutError, ConnectionError):  # of a stranger
                greeting = connection.recv(len(key) + 4, socket.MSG_WAITALL)
                if greeting.startswith(key):
                    connections[int.from_bytes(greeting[len(key) :])] = connection
    return connections


def wait_for_end(connections: dict[int, socket.socket]) -> int:
    """Wait until another rank has ended, and return which. Rank 0 tells the others."""
    readable, _, _ = select.select(list(connections.values()), [], [])
    [other] = [rank for rank, each in connections.items() if each is readable[0]]
    try:
        message = connections[other].recv(4, socket.MSG_WAITALL)
    except OSError:  # of a machine that does not answer any more
        message = b""
    ended = int.from_bytes(message) if message else other
    is_rank_0 = 0 not in connections
    for rank, connection in connections.items():
        if is_rank_0 and rank != ended:
            with suppress(OSError):  # It has ended as well.
                connection.sendall(ended.to_bytes(4))
    return ended


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is not there any more."""
    if isinstance(error, dist.DistError):
        return True
    return "gloo/transport" in str(error) and "Timed out" not in str(error)


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
