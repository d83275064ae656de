"""Writes one checkpoint: all ranks their tensors, then rank 0 the small files and the rename."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from matrixtitan.checkpoint import folder as folders
from matrixtitan.checkpoint.collective import from_dcp, from_rank_0
from matrixtitan.checkpoint.errors import CheckpointError
from matrixtitan.checkpoint.integrity import CHECKSUMS_FILE, Checksums, Chunk, digest
from matrixtitan.checkpoint.metadata import METADATA_FILE
from matrixtitan.checkpoint.state import Tensors, nested
from matrixtitan.checkpoint.storage import ChecksummedWriter


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Tensors,
    side_files: Mapping[str, bytes],
    group: dist.ProcessGroup,
) -> Path:
    """Collective on a gloo group: write `step-N` whole. Returns its path.

    A failure raises CheckpointError on all ranks and leaves nothing of the checkpoint. Each rank
    gives the tensors that it holds. One rank writes a tensor that several hold. Rank 0's
    `side_files` are written.
    """
    written = from_rank_0(
        group,
        f"making a folder for step {step} in {folder}",
        lambda: folders.make_writing_folder(folder, step),
    )
    try:
        writer = ChecksummedWriter(written)
        try:
            dcp.save(nested(tensors), storage_writer=writer, process_group=group)
        except dcp.CheckpointException as error:
            raise from_dcp(f"writing {written}", error) from error
        chunks = _gather_chunks(writer, group)
        return from_rank_0(
            group,
            f"completing {written}",
            lambda: complete(folder, step, written, Checksums(chunks), side_files),
        )
    except CheckpointError:
        if dist.get_rank(group) == 0:
            # what failed may be the lack of this space
            folders.discard(written)
        raise


def _gather_chunks(writer: ChecksummedWriter, group: dist.ProcessGroup) -> dict[Chunk, str]:
    """On rank 0 the checksums of all ranks' chunks; elsewhere an empty table."""
    gathered: list[dict[Chunk, str]] | None = None
    if dist.get_rank(group) == 0:
        gathered = [{} for _ in range(dist.get_world_size(group))]
    dist.gather_object(writer.chunks, gathered, group=group, group_dst=0)
    return {chunk: value for chunks in gathered or () for chunk, value in chunks.items()}


def complete(
    folder: Path, step: int, written: Path, checksums: Checksums, side_files: Mapping[str, bytes]
) -> Path:
    """Add the small files to `written`, and make it `step-N` of `folder`."""
    for name, data in side_files.items():
        folders.write_file(written / name, data)
        checksums.files[name] = digest(data)
    checksums.files[METADATA_FILE] = digest((written / METADATA_FILE).read_bytes())
    folders.write_file(written / CHECKSUMS_FILE, checksums.to_bytes())
    return folders.publish(folder, step, written)
