"""Reads one checkpoint: opens it verified, says what it holds, loads tensors of it in place.

Where the caller allows it, this also opens a checkpoint that other programs wrote with DCP. The
same restrictions hold for its metadata, but it has no checksums. `checkpointer.py` decides which
checkpoint to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from matrixtitan.checkpoint.collective import from_dcp, on_all_ranks
from matrixtitan.checkpoint.errors import CheckpointError, CorruptCheckpointError
from matrixtitan.checkpoint.folder import list_steps, step_folder
from matrixtitan.checkpoint.integrity import CHECKSUMS_FILE, Checksums
from matrixtitan.checkpoint.metadata import METADATA_FILE, parse_metadata
from matrixtitan.checkpoint.state import Tensors
from matrixtitan.checkpoint.storage import TensorLoadPlanner, VerifyingReader

META_FILE, CONFIG_FILE, PLAN_FILE = "meta.json", "config.json", "plan.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint folder, opened: small files are verified and parsed, no tensor is read yet.

    `meta` is what this project stores beside the tensors (step, contents, world size, ...). For a
    checkpoint of another program `meta` is empty and `checksums` is None.
    """

    path: Path
    metadata: Metadata
    checksums: Checksums | None
    meta: dict[str, Any]

    @staticmethod
    def open(path: Path, *, allow_foreign: bool = False) -> StoredCheckpoint:
        """Open `path`. CorruptCheckpointError or CheckpointError, naming the file, if it fails."""
        if (
            allow_foreign
            and not (path / CHECKSUMS_FILE).exists()
            and not (path / META_FILE).exists()
        ):
            if not (path / METADATA_FILE).exists():
                raise CheckpointError(f"{path} is not a checkpoint: it has no {METADATA_FILE}")
            metadata = parse_metadata(
                (path / METADATA_FILE).read_bytes(), str(path / METADATA_FILE)
            )
            return StoredCheckpoint(path, metadata, None, {})
        checksums = Checksums.read(path)
        meta = json.loads(checksums.read_file(path, META_FILE))
        if meta["format"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {meta['format']}; this version reads {FORMAT_VERSION}"
            )
        metadata = parse_metadata(
            checksums.read_file(path, METADATA_FILE), str(path / METADATA_FILE)
        )
        stored = StoredCheckpoint(path, metadata, checksums, meta)
        pickled = [
            key for key, entry in metadata.state_dict_metadata.items() if not _is_tensor(entry)
        ]
        if pickled:
            raise CheckpointError(
                f"{path} holds pickled bytes for {', '.join(pickled[:5])}; only tensors are read"
            )
        return stored

    def read_json(self, name: str) -> Any:
        """The verified content of a side file; CheckpointError if there is none."""
        if self.checksums is None:
            raise CheckpointError(f"{self.path} has no {name}: this project did not write it")
        return json.loads(self.checksums.read_file(self.path, name))

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape, dtype and chunks of each stored tensor."""
        return {
            key: entry
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def stored_key(self, key: str) -> str:
        """The key under which this checkpoint stores `key`.

        Other programs may store a bare model, without the prefix "model.".
        """
        bare = not any(name.startswith("model.") for name in self.metadata.state_dict_metadata)
        return key.removeprefix("model.") if self.checksums is None and bare else key

    def load(self, tensors: Tensors, group: dist.ProcessGroup) -> None:
        """Collective: fill `tensors` (this rank's, by key) in place, however they were cut when
        saved.

        Raises the same CheckpointError on all ranks, before anything is read, for keys that are not
        stored or have another shape. Raises CorruptCheckpointError for damaged bytes; some tensors
        may then have been filled already.
        """
        on_all_ranks(group, f"loading {self.path}", lambda: self._check_wanted(tensors))
        wanted = {self.stored_key(key): tensor for key, tensor in tensors.items()}
        try:
            dcp.load(
                wanted,
                storage_reader=VerifyingReader(self.path, self.metadata, self.checksums),
                planner=TensorLoadPlanner(),
                process_group=group,
            )
        except dcp.CheckpointException as error:
            raise from_dcp(f"loading {self.path}", error) from error

    def chunks(self, key: str) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The stored chunks of one tensor with their offsets, one by one, on the CPU, verified."""
        stored_key = self.stored_key(key)
        reader = VerifyingReader(self.path, self.metadata, self.checksums)
        for chunk in self.tensors[stored_key].chunks:
            item = self.metadata.storage_data[MetadataIndex(stored_key, chunk.offsets)]
            part = reader.read_chunk((item.relative_path, item.offset, item.length))
            if part.shape != chunk.sizes:
                raise CorruptCheckpointError(
                    f"{self.path / item.relative_path}: {key} is {tuple(part.shape)}, not "
                    f"{tuple(chunk.sizes)}"
                )
            yield tuple(chunk.offsets), part

    def read(self, key: str) -> Tensor:
        """One whole tensor, on the CPU. Needs no process group."""
        entry = self.tensors[self.stored_key(key)]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        for offsets, part in self.chunks(key):
            target = tensor
            for dim, offset in enumerate(offsets):
                target = target.narrow(dim, offset, part.shape[dim])
            target.copy_(part)
        return tensor

    def _check_wanted(self, tensors: Tensors) -> None:
        missing, differing = [], []
        for key, tensor in tensors.items():
            entry = self.metadata.state_dict_metadata.get(self.stored_key(key))
            if entry is None:
                missing.append(key)
            elif not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{key} is stored as pickled bytes; only tensors are read")
            elif entry.size != tensor.shape:
                differing.append(
                    f"{key} is {tuple(tensor.shape)} here and {tuple(entry.size)} in the checkpoint"
                )
        if missing:
            raise CheckpointError(
                f"it lacks {_some(missing)}. If they are to start afresh, name them in "
                "checkpoint.exclude_from_loading; "
                "for weights alone, checkpoint.initial_load_model_only = true"
            )
        if differing:
            raise CheckpointError(f"shapes differ: {_some(differing)}")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest complete one in it or in its checkpoint/ folder.

    CheckpointError if there is none.
    """
    if (path / METADATA_FILE).exists() or (path / CHECKSUMS_FILE).exists():
        return path
    for folder in (path, path / "checkpoint"):
        complete, _ = list_steps(folder)
        if complete:
            return step_folder(folder, complete[0])
    raise CheckpointError(
        f"no checkpoint at {path}: it has neither {METADATA_FILE} nor a complete step-N, in it or "
        "in its checkpoint/"
    )


def _is_tensor(entry: Any) -> bool:
    return not isinstance(entry, BytesStorageMetadata)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
