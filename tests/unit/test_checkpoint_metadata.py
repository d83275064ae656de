"""No checkpoint can run code when read, and metadata that does not add up is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)

from matrixtitan.checkpoint import CheckpointError, CorruptCheckpointError, StoredCheckpoint
from matrixtitan.checkpoint.integrity import Checksums, digest
from matrixtitan.checkpoint.metadata import parse_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A checkpoint of two tensors in our format, made without a process group."""
    folder = tmp_path / "step-1"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(5)}
    dcp.save({"model": tensors}, checkpoint_id=folder)
    (folder / "meta.json").write_text(json.dumps({"format": 1, "contents": "full"}))
    seal(folder)
    return folder


def seal(folder: Path) -> None:
    """Checksums of the files as they are now, which anyone who can write the folder can make."""
    checksums = Checksums()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for item in metadata.storage_data.values():
        data = (folder / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
        checksums.chunks[item.relative_path, item.offset, item.length] = digest(data)
    reseal_files(folder, checksums)


def reseal_files(folder: Path, checksums: Checksums) -> None:
    for name in (".metadata", "meta.json"):
        checksums.files[name] = digest((folder / name).read_bytes())
    (folder / "checksums.json").write_bytes(checksums.to_bytes())


class RunsCommand:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


def dotted_name(module: str, name: str, argument: str) -> bytes:
    """A protocol 4 pickle that calls an attribute of an attribute of a module."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: Metadata({}, planner_data=evil)])
def test_code_in_metadata_is_refused_and_not_run(
    stored: Path, tmp_path: Path, wrap: Callable[[Any], Any]
) -> None:
    evil = pickle.dumps(wrap(RunsCommand(tmp_path / "ran")))
    (stored / ".metadata").write_bytes(evil)
    reseal_files(stored, Checksums.read(stored))
    with pytest.raises(CheckpointError, match="posix"):
        StoredCheckpoint.open(stored)
    assert not (tmp_path / "ran").exists()
    pickle.loads(evil)  # an ordinary load does run it
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch", "Size.__init__"),
        ("torch.hub", "load"),
    ],
)
def test_nothing_but_plain_data_classes_can_be_named(module: str, name: str) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint needs"):
        parse_metadata(dotted_name(module, name, "true"), "here/.metadata")


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"garbage", pickle.dumps({"a": 1})])
def test_what_is_not_metadata_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"here/\.metadata"):
        parse_metadata(data, "here/.metadata")


def test_code_in_a_tensor_file_is_refused_and_not_run(stored: Path, tmp_path: Path) -> None:
    """The attacker may have written the checksums too."""
    buffer = io.BytesIO()
    torch.save(RunsCommand(tmp_path / "ran"), buffer)
    metadata = pickle.loads((stored / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn == "model.b"]
    item = metadata.storage_data[index]
    path = stored / item.relative_path
    offset = path.stat().st_size
    path.write_bytes(path.read_bytes() + buffer.getvalue())
    metadata.storage_data[index] = dataclasses.replace(
        item, offset=offset, length=len(buffer.getvalue())
    )
    (stored / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(stored)
    with pytest.raises(CorruptCheckpointError, match="no tensor"):
        StoredCheckpoint.open(stored).read("model.b")
    assert not (tmp_path / "ran").exists()


def change_entry(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.b"] = BytesStorageMetadata()


def change_path(metadata: Metadata) -> None:
    for index, item in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(item, relative_path="../../etc/passwd")


def change_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a"].chunks = [
        ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([2, 3]))
    ]


def change_volume(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a"].chunks.pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_entry, "pickled bytes for model.b"),
        (change_path, "not a file of this folder"),
        (change_chunk, "outside its shape"),
        (change_volume, "0 of its 6 elements"),
    ],
)
def test_metadata_that_does_not_add_up_is_refused(
    stored: Path, change: Callable[[Metadata], None], message: str
) -> None:
    metadata = pickle.loads((stored / ".metadata").read_bytes())
    change(metadata)
    (stored / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal_files(stored, Checksums.read(stored))
    with pytest.raises(CheckpointError, match=message):
        StoredCheckpoint.open(stored)


def test_reads_a_tensor_without_process_group(stored: Path) -> None:
    checkpoint = StoredCheckpoint.open(stored)
    assert torch.equal(checkpoint.read("model.a"), torch.arange(6.0).reshape(2, 3))
    assert checkpoint.read("model.b").item() == 5


def test_missing_checksums_are_damage(stored: Path) -> None:
    (stored / "checksums.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"checksums\.json"):
        StoredCheckpoint.open(stored, allow_foreign=True)
