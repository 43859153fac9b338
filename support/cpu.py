"""What differs on a CPU: the dtypes, the share of the cores, the kept memory."""

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


def default_dtype(dtype: str) -> str:
    """What the trainer and an evaluation compute in: "auto" is bfloat16 on CUDA.

    On a CPU it is float32, in which neither the number of ranks nor the batch matters.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if torch.cuda.is_available() else "float32"


def default_rollout_dtype(dtype: str) -> str:
    """What rollouts are sampled in: "auto" is bfloat16 where that is fast.

    A CPU that multiplies bfloat16 itself (AVX-512 BF16, AMX) samples the embedded
    policy in 0.8 of the time that float32 takes. Any other multiplies it in a plain
    loop, and takes twice as long.
    """
    if dtype == "auto" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bfloat16"
    return default_dtype(dtype)


# Fields of a configuration that hold what "auto" stands for on this machine.
Choice = Literal["auto", "float32", "bfloat16"]
# Also where the field is not given.
OnUse = Field(validate_default=True)
Dtype = Annotated[Choice, AfterValidator(default_dtype), OnUse]
RolloutDtype = Annotated[Choice, AfterValidator(default_rollout_dtype), OnUse]


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
