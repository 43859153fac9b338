#!/usr/bin/env bash
# Rows that hold lists of numbers, such as log-probabilities, lie in an Arrow file as
# plain memory. One would expect with_format("numpy") to make reading them much cheaper,
# since the plain format has to build a Python float of every number.
#
# Reading one row at a time, the plain format is the cheaper one: here it takes less
# than half of the CPU time that NumPy's format takes for lists of 500 numbers. The fixed
# work of NumPy's format per row costs more than building 500 Python floats.
#
# Source: NumpyArrowExtractor and NumpyFormatter in datasets/formatting. They turn each row
# into an array of arrays, inspect its elements, and build and convert a new array of them.
#
# If a loop over rows waits for data, measure both formats, or read large slices
# (dataset[a:b]) instead of rows. Choosing NumPy does not by itself save time.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile datasets==5.2.0 pyarrow==26.0.1 numpy==2.3.5
HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/env/bin/python" - <<'PYTHON'
import statistics
import time
from importlib.metadata import version

import numpy
from datasets import Dataset

for package in ("datasets", "pyarrow", "numpy"):
    print(package, version(package))
values = numpy.random.default_rng(0).random((1000, 500)).tolist()
plain = Dataset.from_dict({"logprobs": values})
formats = {"plain": plain, "numpy": plain.with_format("numpy")}


def seconds(dataset):
    start = time.process_time()
    for _row in dataset:
        pass
    return time.process_time() - start


for dataset in formats.values():
    seconds(dataset)
pairs = [[seconds(dataset) for dataset in formats.values()] for _ in range(7)]
ratio = statistics.median(numpy_s / plain_s for plain_s, numpy_s in pairs)
for name, times in zip(formats, zip(*pairs)):
    print(f"{name}: {1e6 * statistics.median(times) / 1000:.0f} microseconds per row")
print(f"CPU time of NumPy's format over the plain one: {ratio:.2f}")
assert 1.2 < ratio < 6, "the ratio left its band"
PYTHON
