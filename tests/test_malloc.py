"""Memory on a CPU: malloc keeps small blocks that are freed, and returns large ones."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE_FAULTS = """
import ctypes
import json
import resource
from support.malloc import keep_freed_memory

libc = ctypes.CDLL(None)
libc.aligned_alloc.restype = ctypes.c_void_p

def page_faults(blocks, megabytes):
    size = megabytes * 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = []
    for _ in range(blocks):
        held.append(libc.aligned_alloc(ctypes.c_size_t(64), ctypes.c_size_t(size)))
        libc.memset(ctypes.c_void_p(held[-1]), 1, ctypes.c_size_t(size))
    for block in held:
        libc.free(ctypes.c_void_p(block))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def of_the_last(blocks, megabytes):
    # Freed blocks do not fit for the next ones at once: glibc's alignment takes a
    # little more room, and it keeps up to seven such remains of each size.
    return [page_faults(blocks, megabytes) for _ in range(10)][-1]

by_default = of_the_last(4, 24)
keep_freed_memory()
# The large one first: it may well lie in what has been kept of others.
large = of_the_last(1, 64)
print(json.dumps([by_default, large, of_the_last(4, 24)]))
"""


def test_freed_memory_is_there_without_page_faults_unless_a_block_is_large():
    """A page has 4 kB, or 2 MB where the system has these."""
    ended = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    # Four blocks of 24 MB at first, then one of 64 MB, then the four again.
    by_default, large, kept = json.loads(ended.stdout)
    assert by_default >= 4 * 12
    assert large >= 32
    assert kept < 8
