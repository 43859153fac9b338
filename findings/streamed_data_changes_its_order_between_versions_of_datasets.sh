#!/usr/bin/env bash
# IterableDataset.shuffle takes a seed. One would expect an upgrade of datasets to keep the
# order of the examples, as it does for Dataset.shuffle.
#
# The order changed twice. Version 4.8.5 reads one shard after another, and 5.0.0 reads
# several in turn if shuffle was called. Both exchange one example of the buffer at a time;
# 5.2.0 shuffles the full buffer and gives out half of it. NumPy is the same in all three.
#
# Source: BufferShuffledExamplesIterable in datasets/iterable_dataset.py. Its __iter__
# draws integers in the older versions and a permutation of the buffer in the newest.
#
# If you stream training data, pin datasets for the whole run and record its version. A seed
# alone does not repeat a run, and two runs that are compared must use the same version.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
for version in 4.8.5 5.0.0 5.2.0; do
    "$folder/env/bin/pip" install -q --no-compile datasets==$version pyarrow==26.0.1 \
        numpy==2.3.5
    HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/env/bin/python" - >> "$folder/orders" <<'PYTHON'
import json

import datasets

rows = datasets.Dataset.from_dict({"number": list(range(1000))})
order = {"version": datasets.__version__}
order["not streamed"] = list(rows.shuffle(seed=42)["number"])
for shards in (1, 4):
    stream = rows.to_iterable_dataset(shards).shuffle(seed=42, buffer_size=100)
    order[f"{shards} shard(s)"] = [row["number"] for row in stream]
print(json.dumps(order))
PYTHON
done
"$folder/env/bin/python" - "$folder/orders" <<'PYTHON'
import json
import sys

orders = [json.loads(line) for line in open(sys.argv[1])]
for order in orders:
    print("datasets", order.pop("version"))
    for name, numbers in order.items():
        assert sorted(numbers) == list(range(1000))
        print(f"  {name}: {numbers[:8]} ...")
first, second, third = orders
assert first["not streamed"] == second["not streamed"] == third["not streamed"]
assert first["1 shard(s)"] == second["1 shard(s)"] != third["1 shard(s)"]
assert first["4 shard(s)"] != second["4 shard(s)"] != third["4 shard(s)"]
PYTHON
