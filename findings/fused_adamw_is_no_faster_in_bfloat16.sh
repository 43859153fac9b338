#!/usr/bin/env bash
# An optimizer step mostly reads and writes memory, so one would expect fused AdamW to take
# about half of the time if parameters, gradients and moments are bfloat16.
#
# On a CPU the step takes longer in bfloat16 than in float32: 1.1 to 1.3 times as long
# on one thread of a processor that has AVX-512 and bfloat16 instructions.
#
# Source: aten/src/ATen/native/cpu/FusedAdamKernel.cpp. AVX512_BF16 has no
# elementwise arithmetic, so each vector is converted to float32 and back. With
# one thread these conversions cost more than the memory traffic that they save.
#
# If you train on a CPU, bfloat16 parameters save memory, but no time in the optimizer.
# Small updates are also lost by rounding, so float32 parameters are the better choice.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" - <<'PYTHON'
import statistics
import time

import torch

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
torch.set_num_threads(1)


def optimizer(dtype):
    shapes = [(1000, 1000)] * 16
    parameters = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(parameters, fused=True)


optimizers = [optimizer(torch.bfloat16), optimizer(torch.float32)]


def seconds(optimizer):
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


for each in optimizers:
    seconds(each)
pairs = [[seconds(each) for each in optimizers] for _ in range(15)]
for name, times in zip(("bfloat16", "float32"), zip(*pairs)):
    print(f"{name}: {1000 * statistics.median(times):.2f} ms of CPU time per step")
ratio = statistics.median(first / second for first, second in pairs)
print(f"CPU time of a step in bfloat16 over float32: {ratio:.2f}")
assert 0.8 < ratio < 8, "the ratio left its band"
PYTHON
