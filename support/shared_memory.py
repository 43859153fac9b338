"""vLLM's shared memory on CPU: of one run alone, and gone when its processes are.

The ranks that share an engine exchange tensors through segments of shared memory. vLLM
names these after their ranks and nothing else, so two runs on a machine would meet in
one segment. And a segment outlives a process that is killed: the next run would find
the name taken.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

SEGMENTS = Path("/dev/shm")  # where Linux keeps them, by name


@contextmanager
def own_segments() -> Iterator[None]:
    """The segments of an engine that is built within have names of this run.

    Afterwards they have none: all ranks have them open by then, and the system frees
    them with the last process. A collective.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    run = [uuid.uuid4().hex]
    dist.broadcast_object_list(run)
    shared = cpu_communicator._CPUSHMDistributed
    name_by_ranks = shared.make_group_name

    def name_by_run(communicator: cpu_communicator.CpuCommunicator) -> str:
        return run[0] + name_by_ranks(communicator).replace("/", "")

    shared.make_group_name = staticmethod(name_by_run)
    try:
        yield
    finally:
        shared.make_group_name = staticmethod(name_by_ranks)
        for segment in SEGMENTS.glob(f"*{run[0]}*"):
            segment.unlink(missing_ok=True)
