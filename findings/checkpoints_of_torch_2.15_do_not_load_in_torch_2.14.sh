#!/usr/bin/env bash
# torch.distributed.checkpoint (DCP) keeps tensors in files of their own and describes them
# in a file called .metadata. One would expect torch 2.14 and 2.15 to load each other's
# checkpoints, as they do with the files of torch.save.
#
# Version 2.15 loads the checkpoints of 2.14, but 2.14 cannot read those of 2.15. The error
# mentions neither version. It says that the metadata is None, and that there were "too many
# values to unpack (expected 5)".
#
# Source: TensorProperties in torch/distributed/checkpoint/metadata.py. The file .metadata
# is a pickle of such objects. In 2.15 an object also stores the tensor's strides. Its
# __setstate__ accepts both forms in 2.15, and only the shorter one in 2.14 and 2.13.
#
# If you upgrade to torch 2.15 during a run, keep a checkpoint that the older version wrote,
# because the older version cannot continue from a newer checkpoint.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # Needs 12 GB on x86-64, as torch 2.14 and 2.15 come with CUDA.
for version in 2.15.0 2.14.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-compile torch==$version numpy==2.3.5 || {
        echo "not applicable: pip does not install torch $version on this machine"
        exit 0
    }
done
cat > "$folder/run.py" <<'PYTHON'
import logging
import pathlib
import sys

import torch
import torch.distributed.checkpoint as dcp

logging.disable(logging.WARNING)
mode, path = sys.argv[1], pathlib.Path(sys.argv[2])
weight = torch.arange(6.0).reshape(2, 3)
if mode == "save":
    torch.save({"weight": weight}, path / "file")
    dcp.save({"weight": weight}, checkpoint_id=path / "checkpoint")
    sys.exit()
assert torch.load(path / "file")["weight"].equal(weight)
state = {"weight": torch.zeros(2, 3)}
try:
    dcp.load(state, checkpoint_id=path / "checkpoint")
    assert state["weight"].equal(weight)
    result = "loads"
except dcp.api.CheckpointException as error:
    result = "does not load"
    print(str(error).strip().splitlines()[-1].split(";")[1].strip())
print(f"torch {torch.__version__} {result} the checkpoint of torch {path.name}")
assert result == sys.argv[3], "DCP behaves differently"
PYTHON
run() { "$folder/$1/bin/python" -W ignore "$folder/run.py" "${@:2}"; }
mkdir "$folder/of" "$folder/of/2.14.1" "$folder/of/2.15.0"
run 2.14.1 save "$folder/of/2.14.1"
run 2.15.0 save "$folder/of/2.15.0"
run 2.15.0 load "$folder/of/2.14.1" loads
run 2.14.1 load "$folder/of/2.15.0" "does not load"
