#!/usr/bin/env bash
# A sampler computes the softmax of the logits and draws one token per row. One would
# expect torch.multinomial(probabilities, 1) to cost up to ten times as much as the softmax,
# because one random number and one pass over the probabilities are enough to draw a token.
#
# On a CPU it costs about thirty times as much: for a vocabulary of 49,152 tokens it takes
# about a millisecond of one core per token, far more than the softmax.
#
# Source: multinomial_out in aten/src/ATen/native/Distributions.cpp. To draw a single
# token it fills a tensor as large as the probabilities with exponential random numbers,
# divides by them, and takes the argmax. The random numbers are nearly all of the cost.
#
# If you sample on a CPU, compare one uniform number per row with the cumulative sum of
# the probabilities instead: that costs less than two softmaxes.
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
logits = torch.randn(64, 49152)
probabilities = logits.softmax(-1)
noise = torch.empty_like(probabilities)


def search():
    sums = probabilities.cumsum(-1)
    return torch.searchsorted(sums, torch.rand(64, 1) * sums[:, -1:])


functions = {
    "softmax": lambda: logits.softmax(-1),
    "multinomial": lambda: torch.multinomial(probabilities, 1),
    "exponential random numbers": lambda: noise.exponential_(),
    "cumulative sum and search": search,
}


def seconds(function):
    start = time.process_time()
    function()
    return time.process_time() - start


_ = [seconds(function) for function in functions.values()]
rounds = [[seconds(function) for function in functions.values()] for _ in range(7)]
for name, column in zip(functions, zip(*rounds)):
    ratio = statistics.median(c / row[0] for c, row in zip(column, rounds))
    print(f"{name}: {1000 * statistics.median(column):.2f} ms, {ratio:.1f} softmaxes")
ratio = statistics.median(row[1] / row[0] for row in rounds)
assert 12 < ratio < 90, "the ratio left its band"
PYTHON
