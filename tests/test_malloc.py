"""Memory on a CPU: malloc keeps what is freed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE_FAULTS = """
import resource
import torch
from support.malloc import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# glibc keeps up to seven small remains of each size, and blocks do not grow over them.
for _ in range(10):
    by_default = page_faults()
keep_freed_memory()
for _ in range(10):
    kept = page_faults()
print(by_default, kept)
"""


def test_freed_memory_is_there_without_page_faults():
    """64 MB are 16,384 pages of 4 kB, or 32 of 2 MB where the system has these."""
    ended = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    by_default, kept = map(int, ended.stdout.split())
    assert by_default >= 32
    assert kept < 8
