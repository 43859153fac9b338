"""A rank that has caught signals, and waits in C++ for a key that nobody sets.

    python tests/waits_in_cpp.py

Prints "waiting", and then a line for each signal that it has got.
"""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from support.ranks import catch_signals


def report(signals: list[int]) -> None:
    reported = 0
    while True:
        for number in signals[reported:]:
            print(number, flush=True)
            reported += 1
        time.sleep(0.01)


store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
threading.Thread(target=report, args=(catch_signals(),), daemon=True).start()
print("waiting", flush=True)
store.wait(["never"], timedelta(minutes=10))
