"""Checkpoints are read as data: nothing that is written in one is ever run.

torch.distributed.checkpoint pickles its index and every value that is no tensor, and a
pickle can name any function to be called. Here the index may name its own classes
alone, the other values are loaded as torch.load does with weights_only, and no file
outside the checkpoint's folder is opened.
"""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    Metadata,
)

# What an index consists of, by module. A path is pathlib's own from Python 3.13 on.
INDEX_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class IndexUnpickler(pickle.Unpickler):
    """Unpickles an index. Raises UnpicklingError where it names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if not is_dtype and name not in INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"its index names {module}.{name}")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reads the index of a checkpoint, and opens the files that it has itself."""

    def read_metadata(self, *arguments: Any, **keywords: Any) -> Metadata:
        index = Path(self.path, ".metadata").read_bytes()
        metadata = IndexUnpickler(BytesIO(index)).load()
        for stored in metadata.storage_data.values():
            name = str(stored.relative_path)
            if name != Path(name).name or name == "..":
                raise pickle.UnpicklingError(f"its index names the file {name!r}")
        # What torch's own reader does besides, of an index that is harmless by now.
        return super().read_metadata(*arguments, **keywords)


class SafePlanner(DefaultLoadPlanner):
    """Loads the values that are no tensors with weights_only."""

    def load_bytes(self, read_item: Any, value: BytesIO) -> None:
        torch.load(value, weights_only=True)
        # It is harmless; torch's own planner puts it where it belongs.
        value.seek(0)
        super().load_bytes(read_item, value)
