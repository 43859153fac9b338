"""train.py with log pi_b as vLLM records it by default: before temperature, top-p and
top-k.

    python experiments/raw_logprobs.py --temperature 0.6 --out_dir runs/raw

The samples are the same, but no objective can see that they are off-policy. The
authors' public code leaves vLLM at this default; that their published runs did so is an
inference.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import vllm

import train

if __name__ == "__main__":

    class RawLLM(vllm.LLM):
        def __init__(self, model: str, **options: Any) -> None:
            super().__init__(model, **options | {"logprobs_mode": "raw_logprobs"})

    vllm.LLM = RawLLM  # rollout.py imports it when it builds its engine
    train.main()
