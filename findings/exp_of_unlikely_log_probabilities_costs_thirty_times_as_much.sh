#!/usr/bin/env bash
# The probability of a token whose log-probability is between -103 and -87.3 is a denormal
# float32 number. One would expect torch.exp to cost a few times as much for such tokens,
# as operations on denormal numbers do on many CPUs, and set_flush_denormal(True) to
# remove this cost.
#
# torch.exp takes about 34 times as long for a value between -88 and -103 as for an
# ordinary one, and 11 times as long below -103. set_flush_denormal changes neither. Minus
# infinity costs over three times as much as an ordinary value.
#
# Source: aten/src/ATen/cpu/vml.h calls MKL's exponential function with VML_FTZDAZ_OFF,
# which overrides the processor's flag. torch.softmax has an exponential of its own.
#
# If you need probabilities on a CPU, call softmax. For a sharp policy, log_softmax and
# exp cost over ten times as much. Clamp log-probabilities at -87 before you call exp.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" - <<'PYTHON'
import statistics
import sys
import time

import torch

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
if not torch.backends.mkl.is_available():
    sys.exit(print("not applicable: this build of torch has no MKL"))
torch.set_num_threads(1)
result = torch.empty(100_000)
logits = 100 * torch.randn(5, 20_000)
functions = {}
for value in (-9.0, -87.0, -90.0, -200.0, float("-inf")):
    log_p = torch.full_like(result, value)
    functions[f"exp({value:g})"] = lambda log_p=log_p: torch.exp(log_p, out=result)
functions["log_softmax, exp"] = lambda: logits.log_softmax(-1).exp()
functions["softmax"] = lambda: logits.softmax(-1)


def seconds(function):
    start = time.process_time()
    for _ in range(10):
        function()
    return time.process_time() - start


for flush in (False, True):
    torch.set_flush_denormal(flush)
    _ = [seconds(function) for function in functions.values()]
    rounds = [[seconds(function) for function in functions.values()] for _ in range(9)]
    print(f"CPU time in units of exp(-9), set_flush_denormal({flush}):")
    base, *_ = columns = list(zip(*rounds))
    for name, column in zip(functions, columns):
        print(f"  {name}: {statistics.median(column) / statistics.median(base):.2f}")
    ratio = statistics.median(row[2] / row[0] for row in rounds)
    assert 6 < ratio < 200, "the ratio of exp(-90) left its band"
PYTHON
