#!/usr/bin/env bash
# A replay buffer may be a Dataset to which concatenate_datasets appends the rows of each
# step. One would expect the cost of a step to grow with the buffer, about eightfold over
# 500 steps, because each call builds a new table of all parts so far.
#
# It only doubles. Much of a call is spent on copies of the features and on a new
# fingerprint, which do not depend on the number of parts. Reading random rows from the
# buffer of 500 parts costs about a fifth more than from a single table.
#
# Source: ConcatenationTable in datasets/table.py keeps the parts and copies no rows. Tables
# in memory are joined to one pyarrow table of many chunks. A row is found by
# interpolation search over the offsets, not by going through the parts.
#
# If you keep old rollouts in a Dataset, simply append them once per step. Do not use
# add_item: it needs about as long for one row as concatenate_datasets for a batch.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile datasets==5.2.0 pyarrow==26.0.1 numpy==2.3.5
HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/env/bin/python" - <<'PYTHON'
import random
import statistics
import time
from importlib.metadata import version

from datasets import Dataset, concatenate_datasets

print("datasets", version("datasets"), " pyarrow", version("pyarrow"))


def rollouts(number):
    return Dataset.from_dict({"tokens": [[number] * 50] * 32, "reward": [1.0] * 32})


def seconds(function):
    start = time.process_time()
    function()
    return time.process_time() - start


parts = [rollouts(number) for number in range(500)]
buffers = [parts[0]]
for part in parts[1:]:
    buffers.append(concatenate_datasets([buffers[-1], part]))
steps = [lambda b=buffers[i]: concatenate_datasets([b, parts[0]]) for i in (25, 475)]
pairs = [[seconds(step) for step in steps] for _ in range(41)]
growth = statistics.median(late / early for early, late in pairs)
early, late = (1000 * statistics.median(times) for times in zip(*pairs))
print(f"a concatenation at step 25: {early:.2f} ms, at step 475: {late:.2f} ms")
print(f"CPU time at step 475 over that at step 25: {growth:.2f}")
table = Dataset.from_dict(buffers[-1].to_dict())
rows = random.Random(0).choices(range(len(table)), k=500)
readers = [lambda d=d: [d[row] for row in rows] for d in (buffers[-1], table)]
pairs = [[seconds(reader) for reader in readers] for _ in range(7)]
reading = statistics.median(many / one for many, one in pairs)
print(f"reading a row from {len(parts)} parts over reading it from one: {reading:.2f}")
assert 1 < growth < 4.5 and reading < 3, "a ratio left its band"
PYTHON
