#!/usr/bin/env bash
# Muon replaces AdamW's elementwise update of a matrix by a few matrix products. One would
# expect its step to cost some twenty times as much as a step of fused AdamW on a CPU.
#
# For square matrices of 1,000 rows it costs more than a hundred times as much on one
# thread, and the factor grows with the width of the matrices.
#
# Source: torch/optim/_muon.py. Five Newton-Schulz iterations of three products each need
# about 30 d^3 operations for a d x d matrix. A forward and backward pass needs
# 6 d^2 per token, so that a step of Muon costs as much as the passes over 5 d tokens.
#
# If you train on a CPU with fewer tokens per step than five times the width, Muon spends
# most of each step in the optimizer. It always computes the products in bfloat16.
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
parameters = [torch.nn.Parameter(torch.randn(1000, 1000)) for _ in range(2)]
for parameter in parameters:
    parameter.grad = torch.randn_like(parameter)
optimizers = [torch.optim.Muon(parameters), torch.optim.AdamW(parameters, fused=True)]


def seconds(optimizer):
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


for each in optimizers:
    seconds(each)
pairs = [[seconds(each) for each in optimizers] for _ in range(3)]
for name, times in zip(("Muon", "fused AdamW"), zip(*pairs)):
    print(f"{name}: {1000 * statistics.median(times):.2f} ms of CPU time per step")
ratio = statistics.median(first / second for first, second in pairs)
print(f"CPU time of a step of Muon over one of fused AdamW: {ratio:.0f}")
assert 60 < ratio < 2000, "the ratio left its band"
PYTHON
