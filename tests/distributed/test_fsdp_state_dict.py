"""State dicts of a sharded model: saved by DCP, gathered on rank 0, and loaded again."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from matrixtitan.fsdp import MatrixFSDP, fully_shard
from tests.lib.distributed import run_distributed
from tests.lib.toy import Toy, make_toy, toy_units


def tied_toy(seed: int) -> Toy:
    """A tied model with buffers of a float and of a whole number."""
    model = make_toy(seed, tied=True)
    model.register_buffer("scale", torch.full((3,), float(seed)))
    model.blocks[1].register_buffer("count", torch.tensor(seed))
    return model


def sharded_toy(seed: int, replicas: int = 1) -> tuple[Toy, MatrixFSDP]:
    model = tied_toy(seed)
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return model, fully_shard(model, units=toy_units(tied=True), mesh=mesh)


def check_rows(model: nn.Module, handle: MatrixFSDP, expected: dict[str, Tensor]) -> None:
    for local in handle.local_parameters():
        want = expected[local.fqn][local.start : local.start + local.tensor.shape[0]]
        assert torch.equal(local.tensor.detach(), want), local.fqn
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def check_full(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def message(call: Callable[[], object], error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def save_and_load(folder: str, replicas: int) -> None:
    plain = tied_toy(1).state_dict()
    model, handle = sharded_toy(1, replicas)
    sd = model.state_dict()
    assert list(sd) == list(plain)
    assert [value.shape for value in sd.values()] == [value.shape for value in plain.values()]
    dcp.save(sd, checkpoint_id=folder)

    found = handle.state_dict(full=True)
    check_full(found, plain if dist.get_rank() == 0 else {})
    if found:
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()

    for load in (
        lambda other, other_handle: load_dcp(other, folder),
        lambda other, other_handle: other.load_state_dict(plain),
        lambda other, other_handle: other.load_state_dict(sd),
        lambda other, other_handle: other_handle.load_state_dict(plain),
        lambda other, other_handle: other_handle.load_state_dict(handle.state_dict()),
        lambda other, other_handle: other_handle.load_state_dict(found, from_rank_0=True),
    ):
        other, other_handle = sharded_toy(2, replicas)
        load(other, other_handle)
        check_rows(other, other_handle, plain)

    refusals(model, handle, plain)


def load_dcp(model: nn.Module, folder: str) -> None:
    sd = get_model_state_dict(model)
    dcp.load(sd, checkpoint_id=folder)
    model.load_state_dict(sd)


def refusals(model: nn.Module, handle: MatrixFSDP, plain: dict[str, Tensor]) -> None:
    segment = model.state_dict()["blocks.0.up.weight"]
    for refused in (
        lambda: torch.save(segment, io.BytesIO()),
        lambda: segment.to("cpu"),
        lambda: segment * 2,
    ):
        assert "handle.state_dict(full=True)" in message(refused, RuntimeError)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        said = message(lambda o=options: get_model_state_dict(model, options=o), RuntimeError)
        assert "handle.state_dict(full=True)" in said

    wrong = plain | {"blocks.0.up.weight": torch.zeros(5, 8)}
    said = message(lambda: model.load_state_dict(wrong), ValueError)
    assert "blocks.0.up.weight" in said and "(5, 8)" in said and "(12, 8)" in said

    missing = {key: value for key, value in plain.items() if key != "scale"} | {"extra": plain}
    rank = dist.get_rank()
    for from_rank_0 in (False, True):
        # only rank 0 has a mistake, and all ranks raise
        given = (missing, plain)[min(rank, 1)]
        said = message(
            lambda g=given, f=from_rank_0: handle.load_state_dict(g, from_rank_0=f),
            (ValueError, RuntimeError)[min(rank, 1)],
        )
        assert ("['scale']" in said and "['extra']" in said) if rank == 0 else "another" in said


def on_two_ranks(folder: str) -> None:
    save_and_load(folder, replicas=1)
    # two replicas of one rank
    save_and_load(folder + "-replicas", replicas=2)


def on_three_ranks(folder: str) -> None:
    model, handle = sharded_toy(2)
    sd = model.state_dict()
    dcp.load(sd, checkpoint_id=folder)
    model.load_state_dict(sd)
    check_rows(model, handle, tied_toy(1).state_dict())


def test_state_dicts_save_and_load(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run_distributed(on_two_ranks, 2, folder)
    plain = tied_toy(2)
    sd = plain.state_dict()
    dcp.load(sd, checkpoint_id=folder, no_dist=True)
    check_full(sd, tied_toy(1).state_dict())
    run_distributed(on_three_ranks, 3, folder)
