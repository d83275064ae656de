"""Saving and loading on several ranks: any world size and cut, DTensors both ways, whole or nothing, pauses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from matrixtitan.checkpoint import Checkpointer, CheckpointError, CorruptCheckpointError, StoredCheckpoint, TrainState
from tests.lib.checkpoint_fakes import PARAMS, FakeRun, expected, fake_config
from tests.lib.distributed import run_distributed


def make(folder: str, *, bias: int = 0, filled: bool = True, **keys: Any) -> tuple[Checkpointer, FakeRun]:
    run = FakeRun(dist.get_rank(), dist.get_world_size(), bias=bias, filled=filled)
    config = fake_config(folder, **keys)
    return Checkpointer(config.checkpoint, config, run, run), run  # type: ignore[arg-type]


def save(folder: str, step: int = 2, offset: float = 0.0, **keys: Any) -> None:
    checkpointer, run = make(folder, **keys)
    with checkpointer:
        run.fill(offset)
        checkpointer.save(step, TrainState(step, step * 10, step * 80))


def load_and_check(folder: str, offset: float = 0.0, **keys: Any) -> TrainState | None:
    checkpointer, run = make(folder, bias=3, filled=False, **keys)
    with checkpointer:
        state = checkpointer.load()
        run.check(offset)
    return state


@pytest.fixture(scope="module")
def saved_by_4(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    run_distributed(save, 4, folder)
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_any_world_size_and_cut_loads_what_four_saved(saved_by_4: str, world_size: int) -> None:
    states = run_distributed(load_and_check, world_size, saved_by_4)
    assert states == [TrainState(2, 20, 160)] * world_size
