#!/usr/bin/env bash
# Trainers that compare two policies over the K most likely tokens call topk on rows of the
# whole vocabulary. One would expect topk(20) to cost about five times as much as the
# maximum, since it has to keep twenty candidates instead of one.
#
# On a CPU it costs less than twice as much as max(-1), which also returns indices. A sort
# of the rows, which gives the same numbers, costs more than fifty times as much.
#
# Source: topk_impl_loop in aten/src/ATen/native/TopKImpl.h. If K is at most a 64th of the
# row, it is a partial sort, which compares nearly every element only with the smallest
# of the K candidates.
#
# The cost of topk is no reason for a small K. Avoid sorts: a top-p filter that
# sorts the vocabulary costs far more than one that looks at the K most likely tokens.
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
functions = {
    "max": lambda: logits.max(-1),
    "topk(20)": lambda: logits.topk(20),
    "sort": lambda: logits.sort(-1),
}


def seconds(function):
    start = time.process_time()
    function()
    return time.process_time() - start


for function in functions.values():
    seconds(function)
rounds = [[seconds(function) for function in functions.values()] for _ in range(7)]
ratios = {}
for index, name in enumerate(functions):
    ratios[name] = statistics.median(row[index] / row[0] for row in rounds)
    times = [row[index] for row in rounds]
    print(f"{name}: {1000 * statistics.median(times):.2f} ms, {ratios[name]:.1f} maxima")
assert 0.6 < ratios["topk(20)"] < 3 and ratios["sort"] > 20, "the ratios left their bands"
PYTHON
