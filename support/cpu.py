"""What differs on a CPU: the default dtype, the share of the cores, kept memory."""

import ctypes
import os
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field

# Parameters of mallopt, as in glibc's malloc.h.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# Larger blocks are returned to the system when they are freed. glibc allows no more.
LARGEST_KEPT = 32 * 2**20  # bytes


def resolve_dtype(dtype: str) -> str:
    """What trainer or engine compute in: "auto" is bfloat16 on CUDA, else float32.

    A CPU without AVX-512 multiplies bfloat16 in a plain loop, several times slower.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if torch.cuda.is_available() else "float32"


# A field of a configuration that holds what "auto" stands for.
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    AfterValidator(resolve_dtype),
    Field(validate_default=True),
]


def prepare_cpu(ranks_of_node: int) -> None:
    """Give this rank its share of the cores, and let malloc keep what is freed.

    torchrun gives each of several ranks one thread, and the engine would keep it. By
    default glibc returns freed memory to the system, and what the next update allocates
    in its place costs page faults.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // ranks_of_node))
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(TRIM_THRESHOLD, -1)
    # With a log-probability vLLM counts the token's rank, in a function that it has
    # compiled. The compiler takes ten seconds or more, and the count itself no time.
    torch.compiler.set_stance("force_eager")
