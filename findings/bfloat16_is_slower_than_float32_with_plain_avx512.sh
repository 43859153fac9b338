#!/usr/bin/env bash
# torch.ops.mkldnn._is_mkldnn_bf16_supported() is True on any CPU that has AVX-512. One
# would expect a product of bfloat16 matrices to cost about as much as one of float32
# matrices there, and much less if the CPU also has bfloat16 instructions.
#
# With such instructions it does cost less. But on a CPU with AVX-512 and no bfloat16
# instructions, such as a Skylake, Cascade Lake or Ice Lake server, the product costs
# more than twice as much in bfloat16 as in float32. So True does not mean that bfloat16
# is fast.
#
# Source: oneDNN computes the products. Without the instructions of AVX512_BF16 it
# imitates them. ONEDNN_MAX_CPU_ISA limits the instructions that oneDNN may use, so a
# newer processor can stand for an older one here.
#
# If your code chooses the dtype of an engine on a CPU, look for avx512_bf16 or amx_bf16
# in /proc/cpuinfo, or time a product, instead of asking torch.
set -eu
if ! grep -qw avx512bw /proc/cpuinfo; then
    echo "not applicable: this CPU has no AVX-512"
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.3.5
cat > "$folder/product.py" <<'PYTHON'
import os
import statistics
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
inputs, weight = torch.randn(512, 1024), torch.randn(1024, 1024)
pairs = [(inputs.bfloat16(), weight.bfloat16()), (inputs, weight)]


def seconds(pair):
    start = time.process_time()
    F.linear(*pair)
    return time.process_time() - start


_ = [seconds(pair) for pair in pairs]
rounds = [[seconds(pair) for pair in pairs] for _ in range(9)]
ratio = statistics.median(bfloat16 / float32 for bfloat16, float32 in rounds)
supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all instructions")
print(f"torch {torch.__version__}, {isa}: bfloat16 over float32 {ratio:.2f}, {supported=}")
if isa == "AVX512_CORE":
    assert supported, "torch no longer calls it supported"
    assert 1.3 < ratio < 8, "the ratio left its band"
PYTHON
"$folder/env/bin/python" "$folder/product.py"
ONEDNN_MAX_CPU_ISA=AVX512_CORE "$folder/env/bin/python" "$folder/product.py"
