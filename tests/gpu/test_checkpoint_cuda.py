"""Saving from a GPU: pinned copies hold the moment of the save; a save and a load agree."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from matrixtitan.checkpoint import Checkpointer, TrainState
from matrixtitan.checkpoint.stager import HostStager
from matrixtitan.fsdp.row_segment import RowSegment
from tests.lib.checkpoint_fakes import FakeRun, run_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"file://{os.path.join(folder, 'store')}",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", 0),
        )
        yield
        dist.destroy_process_group()


def test_pinned_copies_are_of_the_moment() -> None:
    stager = HostStager(pinned=True)
    whole = torch.ones(1 << 24, device="cuda")
    rows = torch.ones(2, 3, device="cuda")
    staged, copied = stager.stage({"whole": whole, "rows": RowSegment(rows, (4, 3), 1)})
    stager.before_change()
    whole.zero_()  # waits for the copies
    rows.zero_()
    copied()
    assert staged["whole"].is_pinned()
    assert staged["whole"].sum() == 1 << 24
    segment = staged["rows"]
    assert isinstance(segment, RowSegment)
    assert segment.rows.sum() == 6


@pytest.mark.parametrize("async_mode", ["disabled", "async", "async_with_pinned_mem"])
@pytest.mark.usefixtures("group")
def test_save_and_load_on_the_gpu(tmp_path: Path, async_mode: str) -> None:
    run = FakeRun(0, 1)
    for param in run.params:
        param.tensor.data = param.tensor.data.cuda()
    run.states = [state._replace(tensor=state.tensor.cuda()) for state in run.states]
    tensors = [param.tensor.data for param in run.params] + [state.tensor for state in run.states]
    saved = [tensor.cpu().clone() for tensor in tensors]
    config = run_config(str(tmp_path), async_mode=async_mode)
    with Checkpointer(config, run, run) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(2, TrainState(2))
        for tensor in tensors:
            tensor.fill_(-1)
        assert checkpointer.load() == TrainState(2)
    for tensor, value in zip(tensors, saved, strict=True):
        assert torch.equal(tensor.cpu(), value)
