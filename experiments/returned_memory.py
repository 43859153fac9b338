"""train.py with a malloc that returns freed memory to the system, as glibc's does.

    python experiments/returned_memory.py --out_dir runs/returned

On a CPU train.py has it keep that memory (support/malloc.py). experiments/bench.py runs
both, in turn.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import rollout
import train

if __name__ == "__main__":
    rollout.keep_freed_memory = lambda: None  # init_distributed calls it by this name
    train.main()
