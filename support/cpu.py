"""What differs on a CPU: the dtypes, the share of the cores, the kept memory."""

import ctypes
import os

import torch

# Parameters of mallopt, as in glibc's malloc.h.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# Larger blocks are returned to the system when they are freed. glibc allows no more.
LARGEST_KEPT = 32 * 2**20  # bytes


def default_dtype() -> str:
    """What trainer and evaluation compute in: bfloat16 on CUDA, float32 on a CPU.

    In float32 neither the number of ranks nor the size of a batch changes a result.
    """
    return "bfloat16" if torch.cuda.is_available() else "float32"


def bfloat16_is_slow() -> bool:
    """Whether this is a CPU that multiplies bfloat16, and fp8, in a plain loop.

    A CPU that does it itself (AVX-512 BF16, AMX) samples the embedded policy in 0.8 of
    the time that float32 takes. Any other takes twice as long, and for fp8 has taken 20
    times as long.
    """
    on_cpu = not torch.cuda.is_available()
    return on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def default_rollout_dtype(quantization: str) -> str:
    """What rollouts are sampled in: bfloat16 where that is fast, or is all there is.

    vLLM has fp8 beside bfloat16 alone.
    """
    return "float32" if bfloat16_is_slow() and quantization == "none" else "bfloat16"


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
