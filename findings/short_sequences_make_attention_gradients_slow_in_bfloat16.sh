#!/usr/bin/env bash
# On a CPU with bfloat16 instructions, one would expect bfloat16 to change the time of
# scaled_dot_product_attention about equally forward and backward.
#
# Forward, the two dtypes are nearly equal. But on short sequences the backward pass
# takes several times as long in bfloat16: eight times with 16 tokens and heads of size
# 32, and three or four times with 32 to 128 tokens. With 512 tokens the two dtypes are
# nearly equal. An update of SmolLM2-135M on sequences of 65 tokens spent 0.16 of its
# time in this backward pass in bfloat16, and 0.04 in float32.
#
# If you train in bfloat16 on a CPU, cast queries, keys and values to float32 before the
# attention, and its result back.
set -eu
if ! grep -qw avx512_bf16 /proc/cpuinfo; then
    echo "not applicable: this CPU has no bfloat16 instructions"
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" - <<'PYTHON'
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
torch.set_num_threads(1)


def seconds(dtype, length):
    """Return the CPU time of a forward and of a backward pass."""
    shape = 4096 // length, 4, length, 32  # sequences, heads, tokens, size of a head
    states = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    start = time.process_time()
    output = scaled_dot_product_attention(*states, is_causal=True)
    middle = time.process_time()
    output.backward(torch.ones_like(output))
    return middle - start, time.process_time() - middle


def ratios(length):
    """Return the median ratios of bfloat16 to float32, forward and backward."""
    found = []
    for _ in range(25):
        both = seconds(torch.bfloat16, length), seconds(torch.float32, length)
        found.append([half / single for half, single in zip(*both)])
    return [statistics.median(column) for column in zip(*found[4:])]


by_length = {length: ratios(length) for length in (16, 32, 64, 128, 512)}
print("CPU time in bfloat16 / CPU time in float32:")
for length, (forward, backward) in by_length.items():
    print(f"  {length} tokens: forward {forward:.2f}, backward {backward:.2f}")
assert 0.4 < by_length[16][0] < 2, "the ratio of the forward pass left its band"
assert 3 < by_length[16][1] < 25, "the ratio of the backward pass left its band"
assert by_length[512][1] < by_length[16][1] / 2, "long sequences are slow, too"
PYTHON
