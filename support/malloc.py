"""Memory on a CPU: glibc's malloc keeps what is freed, as torch does on a GPU.

vLLM advises another malloc for that, tcmalloc. It has to be installed apart, and named
in LD_PRELOAD before Python starts.
"""

import ctypes

# Parameters of mallopt, as in glibc's malloc.h.
TRIM_THRESHOLD = -1
MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Let malloc keep what this process frees, for what it allocates next.

    By default it returns large blocks to the system, and what an update allocates in
    their place costs page faults.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_MAX, 0)  # No block is one of its own, returned when it is freed.
    libc.mallopt(TRIM_THRESHOLD, -1)  # Nor is the end of the heap.
