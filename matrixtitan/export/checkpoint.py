"""The weights of one of our checkpoints, and a checkpoint of weights alone.

Reads and writes through DCP, one tensor at a time, with the checksums of `matrixtitan/checkpoint/`.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from matrixtitan.checkpoint import StoredCheckpoint, TrainState
from matrixtitan.checkpoint import folder as folders
from matrixtitan.checkpoint.integrity import Checksums
from matrixtitan.checkpoint.reading import CONFIG_FILE, FORMAT_VERSION, META_FILE, find_checkpoint
from matrixtitan.checkpoint.state import nested
from matrixtitan.checkpoint.storage import ChecksummedWriter
from matrixtitan.checkpoint.writing import complete
from matrixtitan.export.weights import Weights, checked, model_of
from matrixtitan.in_place import in_place


def open_matrixtitan(path: Path, step: int | None) -> Weights:
    stored = StoredCheckpoint.open(_step_folder(path, step))
    entries = {
        key.removeprefix("model."): entry
        for key, entry in stored.tensors.items()
        if key.startswith("model.")
    }
    shapes = {fqn: entry.size for fqn, entry in entries.items()}
    dtypes = {fqn: entry.properties.dtype for fqn, entry in entries.items()}
    model = model_of(stored.read_json(CONFIG_FILE), shapes, stored.path)
    weights = Weights(model, dtypes, lambda fqn: stored.read(f"model.{fqn}"))
    return checked(weights, shapes, stored.path)


def _step_folder(path: Path, step: int | None) -> Path:
    if step is None:
        return find_checkpoint(path)
    for folder in (path, path / "checkpoint"):
        complete, _ = folders.list_steps(folder)
        if step in complete:
            return folders.step_folder(folder, step)
    raise ValueError(f"--step {step}: {path} has no complete checkpoint of that step")


def write_matrixtitan(weights: Weights, output: Path) -> None:
    """Write a folder for checkpoint.initial_load_path: one checkpoint, `step-0`, of the model."""
    meta = {
        "format": FORMAT_VERSION,
        "contents": "model",
        "world_size": 1,
        "torch": torch.__version__,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "train_state": dataclasses.asdict(TrainState()),
    }
    tensors = {
        f"model.{fqn}": torch.empty(shape, dtype=weights.dtypes[fqn], device="meta")
        for fqn, shape in weights.shapes.items()
    }
    with in_place(output) as written:
        step = folders.make_writing_folder(written, 0)
        writer = ChecksummedWriter(step)
        # DCP keeps all tensors of a file until the file is done, so each has a file of its own.
        writer.single_file_per_rank = False
        planner = _ReadWhenWritten(weights.read)
        try:
            with warnings.catch_warnings():
                # DCP warns that there is one process only
                warnings.simplefilter("ignore", UserWarning)
                dcp.save(nested(tensors), storage_writer=writer, planner=planner, no_dist=True)
        except dcp.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        contents = {META_FILE: meta, CONFIG_FILE: weights.model.to_config()}
        side_files = {name: json.dumps(c, indent=1).encode() for name, c in contents.items()}
        complete(written, 0, step, Checksums(writer.chunks), side_files)


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans from meta tensors. Each tensor is read from its source when DCP writes it."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix("model."))
