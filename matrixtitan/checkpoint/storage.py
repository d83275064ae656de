"""DCP's file reader and writer, with a checksum for each chunk that is written or read.

The files have DCP's own format, so `torch.distributed.checkpoint.load` and its tools read them
without this module. Only tensors are read, with `weights_only`. A byte entry, which DCP would
unpickle, is refused. Next: `checkpointer.py`.
"""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from matrixtitan.checkpoint.collective import reason_of
from matrixtitan.checkpoint.errors import CheckpointError, CorruptCheckpointError
from matrixtitan.checkpoint.integrity import Checksums, Chunk, digest_of_range


class ChecksummedWriter(FileSystemWriter):
    """Writes and fsyncs one file per rank. `chunks` then has the checksums of that file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._folder = folder
        self.chunks: dict[Chunk, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            future = super().write_data(plan, planner)
        except Exception as error:  # DCP sends it to all ranks by pickle, which loses the cause
            raise CheckpointError(reason_of(error)) from error
        by_file: dict[str, list[WriteResult]] = defaultdict(list)
        for result in future.value():
            by_file[result.storage_data.relative_path].append(result)
        for name, results in by_file.items():
            with (self._folder / name).open("rb") as file:
                for result in results:
                    chunk = (name, result.storage_data.offset, result.storage_data.length)
                    self.chunks[chunk] = digest_of_range(file, chunk[1], chunk[2])
        return future

    def storage_meta(self) -> StorageMeta | None:
        # without the path: the folder is renamed when it is complete
        return StorageMeta(save_id=self.save_id)


class VerifyingReader(FileSystemReader):
    """Reads tensors of one checkpoint folder, whose metadata has been parsed before.

    `checksums` is None for a checkpoint of another program, which has none.
    """

    def __init__(self, folder: Path, metadata: Metadata, checksums: Checksums | None) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata
        self._checksums = checksums

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise CheckpointError(
                f"{self._folder} has one metadata file per rank, which is not supported"
            )
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[Chunk, list[ReadItem]] = defaultdict(list)
        for request in plan.items:
            if request.type != LoadItemType.TENSOR:
                raise CheckpointError(
                    f"{self._folder}: {request.dest_index.fqn} is not a tensor; it is not read"
                )
            item = self._metadata.storage_data[request.storage_index]
            wanted[item.relative_path, item.offset, item.length].append(request)
        # each file from front to back
        for chunk in sorted(wanted):
            stored = self.read_chunk(chunk)
            for request in wanted[chunk]:
                _copy_overlap(stored, request, planner, f"{self._folder / chunk[0]}")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_chunk(self, chunk: Chunk) -> Tensor:
        """One stored chunk, on the CPU. Its bytes are verified before anything interprets them."""
        name, offset, length = chunk
        path = self._folder / name
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing") from None
        if self._checksums is not None:
            self._checksums.verify_chunk(self._folder, chunk, data)
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch.load raises, these bytes are no tensor
            raise CorruptCheckpointError(
                f"{path}: no tensor at bytes {offset} to {offset + length}: {error}"
            ) from error
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{path}: a {type(tensor).__name__} at byte {offset}, not a tensor"
            )
        return tensor


def _copy_overlap(stored: Tensor, request: ReadItem, planner: LoadPlanner, where: str) -> None:
    part = stored
    for dim, (start, length) in enumerate(
        zip(request.storage_offsets, request.lengths, strict=True)
    ):
        if start + length > part.shape[dim]:
            raise CorruptCheckpointError(
                f"{where}: {request.storage_index.fqn} is smaller than the metadata says"
            )
        part = part.narrow(dim, start, length)
    target = planner.resolve_tensor(request).detach()
    target.copy_(part)
    planner.commit_tensor(request, target)


class TensorLoadPlanner(DefaultLoadPlanner):
    """Loads tensors in place, by key, and nothing else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(
            f"{read_item.dest_index.fqn} is stored as pickled bytes; only tensors are read"
        )
