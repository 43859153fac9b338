#!/usr/bin/env bash
# torch.optim.AdamW is not fused on a CPU unless fused=True is given. One would expect the
# default, which runs about a dozen operations per parameter tensor, to cost about three
# times as much as the fused one.
#
# With large tensors it costs much more. A good part of its time is spent by the kernel of
# the operating system on page faults: each temporary tensor above the allocator's
# threshold (at most 32 MiB in glibc) is mapped anew, cleared, and returned at once.
#
# Source: _single_tensor_adam in torch/optim/adam.py (temporary tensors for the square
# root, its scaling and the sum with eps), and M_MMAP_THRESHOLD in mallopt(3).
#
# If you train on a CPU, use fused=True. A checkpoint's param_groups carry this
# setting too, so loading a default optimizer's state sets fused back to None.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" - <<'PYTHON'
import platform
import resource
import statistics
import time

import torch

print("torch", torch.__version__, " ".join(platform.libc_ver()))
torch.set_num_threads(1)
parameters = [torch.nn.Parameter(torch.randn(3072, 4096)) for _ in range(4)]
for parameter in parameters:
    parameter.grad = torch.randn_like(parameter)
optimizers = [torch.optim.AdamW(parameters, fused=fused) for fused in (None, True)]


def measure(optimizer):
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    optimizer.step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    kernel = after.ru_stime - before.ru_stime
    return time.process_time() - start, kernel, after.ru_minflt - before.ru_minflt


for each in optimizers:
    measure(each)
rounds = [[measure(each) for each in optimizers] for _ in range(5)]
for name, results in zip(("default", "fused"), zip(*rounds)):
    total, kernel, faults = (statistics.median(column) for column in zip(*results))
    print(f"{name}: {total:.3f} s, of it {kernel:.3f} in the kernel, {faults} page faults")
ratio = statistics.median(default[0] / fused[0] for default, fused in rounds)
print(f"CPU time of the default step over the fused one: {ratio:.1f}")
assert 3.5 < ratio < 20, "the ratio left its band"
PYTHON
