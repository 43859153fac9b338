#!/usr/bin/env bash
# The log-probability of a sampled token is its logit minus the logsumexp of all logits.
# One would expect torch.logsumexp, which returns one number per row, to cost less than
# log_softmax, which computes the same normalizer and then writes a whole row.
#
# On a CPU it costs about twice as much, and the advantage of a smaller result is lost.
#
# Source: logsumexp_out_impl in aten/src/ATen/native/ReduceOps.cpp is composed of separate
# operations (maximum, difference, exponential, sum, logarithm), and the difference is a
# temporary tensor as large as the logits. log_softmax is one kernel that works on a row
# while it is in the cache.
#
# If you write a trainer, do not replace log_softmax and gather by logsumexp to save
# time or memory on a CPU: it takes more time, and the temporary tensor takes the memory.
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
logits = torch.randn(128, 32000)
functions = {
    "logsumexp": lambda: logits.logsumexp(-1),
    "log_softmax": lambda: logits.log_softmax(-1),
}


def seconds(function):
    start = time.process_time()
    function()
    return time.process_time() - start


for function in functions.values():
    seconds(function)
pairs = [[seconds(function) for function in functions.values()] for _ in range(15)]
for name, times in zip(functions, zip(*pairs)):
    print(f"{name}: {1000 * statistics.median(times):.2f} ms of CPU time")
ratio = statistics.median(first / second for first, second in pairs)
print(f"CPU time of logsumexp over log_softmax: {ratio:.2f}")
assert 1.2 < ratio < 5, "the ratio left its band"
PYTHON
