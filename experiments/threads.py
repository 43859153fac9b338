"""Whether it helps to bind the threads to cores.

experiments/bench.py runs this and writes what it finds. Engine and trainer compute in
one process, with the same threads. vLLM binds threads in its worker processes alone,
which there are none of here. OMP_PROC_BIND would bind the process to one core before
init_distributed counts its cores. So the threads are bound by the system call, when
they are there. That can be undone, and what is compared runs in turn in one process.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DeviceMesh

from experiments.speed import Products, first_step, gradient_of, in_turn, ratios
from rollout import Engine
from train import Config

# Binding changes little: many turns.
THREAD_TURNS = 6


def processor_seconds() -> dict[int, float]:
    """What each thread of this process has had of a core, by the thread's number."""
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            text = Path(f"/proc/self/task/{thread}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since
        # The name before the last bracket may have spaces. From there on, the 12th and
        # 13th numbers are ticks in the program and in the system.
        fields = text.rpartition(")")[2].split()
        seconds[int(thread)] = (int(fields[11]) + int(fields[12])) / ticks_a_second
    return seconds


def computing_threads() -> list[int]:
    """The threads that torch divides a product among: those that work during one."""
    product = Products("float32", "cpu")
    before = processor_seconds()
    product()
    after = processor_seconds()
    worked = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
    busiest = sorted(worked, key=worked.__getitem__, reverse=True)
    return busiest[: torch.get_num_threads()]


def free_threads(cores: list[int]) -> None:
    """Let the threads of this process run on any of the cores."""
    for thread in processor_seconds():
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(thread, cores)


def bind_threads(threads: list[int], cores: list[int]) -> None:
    """Give each of these threads a core of its own."""
    for thread, core in zip(threads, cores, strict=True):
        os.sched_setaffinity(thread, [core])


def compare_binding(act: Callable[[], Any]) -> dict[str, float]:
    """The time of an act with threads that are bound to cores, beside free ones."""
    cores = sorted(os.sched_getaffinity(0))
    threads = computing_threads()

    def free() -> None:
        free_threads(cores)
        act()

    def bound() -> None:
        bind_threads(threads, cores)
        act()

    seconds = in_turn(THREAD_TURNS, free=free, bound=bound)
    free_threads(cores)
    return ratios(seconds["bound"], seconds["free"])


def measure_threads(
    cfg: Config, mesh: DeviceMesh, engines: list[Engine]
) -> dict[str, Any]:
    """The rollout and the gradient of a step of one model, on a CPU of several cores.

    Its engine is put into `engines`: one that is freed takes the process group along.
    """
    policy, engine, rollouts, prompts = first_step(cfg, mesh, engines)
    rollout = partial(
        engine.sample,
        prompts,
        cfg.group_size,
        [0] * len(prompts),
        max_tokens=cfg.max_response_tokens,
    )
    return {
        "rollout": compare_binding(rollout),
        "gradient": compare_binding(gradient_of(policy, rollouts, cfg)),
    }
