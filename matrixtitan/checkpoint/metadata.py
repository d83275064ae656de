"""Reads DCP's `.metadata` without running code from it.

DCP writes `.metadata` by pickle, and ordinary unpickling runs whatever code a file names. Here a
file can name only the plain data classes that DCP itself writes. Then the result is checked field
by field, so that later code may rely on it. Next: `storage.py`, which reads tensors.
"""

from __future__ import annotations

import io
import pickle
from math import prod
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from matrixtitan.checkpoint.errors import CheckpointError, CorruptCheckpointError

METADATA_FILE = ".metadata"


class _StoredItem:
    """Stands in for DCP's private `_StorageInfo`: where the bytes of one tensor chunk are."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


def _layout(name: str) -> torch.layout:
    """Stands in for torch's private function that returns the layout of a name."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"tensor layout {name!r}; only dense tensors are stored")
    return torch.strided


def _pure_path(*parts: str) -> str:
    """Stands in for `pathlib.PosixPath`: the folder that a checkpoint was written in."""
    return str(PurePath(*parts))


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (dcp_metadata.__name__, name): getattr(dcp_metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StoredItem,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _pure_path,
    ("pathlib._local", "PosixPath"): _pure_path,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no checkpoint needs"
            ) from None


def parse_metadata(data: bytes, where: str) -> Metadata:
    """DCP's metadata from the bytes of `.metadata`. `where` names the file in errors.

    Raises CheckpointError for bytes that would run code or are not DCP's metadata, and
    CorruptCheckpointError for metadata whose chunks do not cover a tensor.
    """
    try:
        metadata = _RestrictedUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # arbitrary bytes can fail in any way; none of them ran code
        raise CheckpointError(
            f"{where} cannot be read as a checkpoint's metadata: {error}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{where} holds a {type(metadata).__name__}, not DCP's Metadata")
    entries, stored = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{where} lacks its tables of tensors and of storage")
    for key, entry in entries.items():
        _check_entry(key, entry, where)
    for index, item in stored.items():
        _check_item(index, item, where)
    return metadata


def _sizes(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(type(size) is int and size >= 0 for size in value)


def _check_entry(key: Any, entry: Any, where: str) -> None:
    if isinstance(entry, BytesStorageMetadata):
        # reading it is refused
        return
    if (
        not isinstance(key, str)
        or not isinstance(entry, TensorStorageMetadata)
        or not _sizes(entry.size)
    ):
        raise CheckpointError(f"{where}: {key!r} does not describe a tensor")
    volume = 0
    for chunk in entry.chunks:
        if not (
            isinstance(chunk, ChunkStorageMetadata)
            and _sizes(chunk.offsets)
            and _sizes(chunk.sizes)
            and len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
            and all(
                o + s <= full
                for o, s, full in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            )
        ):
            raise CheckpointError(
                f"{where}: {key} has a chunk outside its shape {tuple(entry.size)}"
            )
        volume += prod(chunk.sizes)
    if volume != prod(entry.size):
        raise CorruptCheckpointError(
            f"{where}: the chunks of {key} hold {volume} of its {prod(entry.size)} elements"
        )


def _check_item(index: Any, item: Any, where: str) -> None:
    if not isinstance(index, MetadataIndex) or not isinstance(item, _StoredItem):
        raise CheckpointError(f"{where}: {index!r} has no place in storage")
    path, offset, length = (
        getattr(item, name, None) for name in ("relative_path", "offset", "length")
    )
    if not isinstance(path, str) or PurePath(path).name != path:
        raise CheckpointError(
            f"{where}: {index.fqn} is said to lie in {path!r}, which is not a file of this folder"
        )
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CheckpointError(
            f"{where}: {index.fqn} is said to lie at bytes {offset!r} + {length!r} of {path}"
        )
    if getattr(item, "transform_descriptors", None):
        raise CheckpointError(
            f"{where}: {index.fqn} is stored with a transform; only plain storage is read"
        )
