"""What a process sets before a model exists, and how it leaves its group. CUDA is simulated."""

from __future__ import annotations

import os
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from matrixtitan.config import CommConfig
from matrixtitan.mesh import World, _set_cuda_environment

SYNONYMS = [
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
]


def leave(device: str, fails: bool) -> None:
    world = World(0, 1, 0, torch.device(device), cast(DeviceMesh, None), owns_group=True)
    with world:
        if fails:
            raise ValueError("this rank's own")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_that_fails_on_a_gpu_does_not_wait_for_its_peers(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(device))
    monkeypatch.setattr("atexit.register", lambda _: None)
    leave(device, fails=False)
    assert destroyed == [device]
    with pytest.raises(ValueError, match="own"):
        leave(device, fails=True)
    assert len(destroyed) == (2 if device == "cpu" else 1)


@pytest.mark.parametrize("names", SYNONYMS)
@pytest.mark.parametrize("users", [None, 0, 1])
def test_a_users_setting_stays_under_either_name(
    names: tuple[str, str], users: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {} if users is None else {names[users]: "theirs"}
    environment = dict(theirs)
    monkeypatch.setattr(os, "environ", environment)
    _set_cuda_environment(CommConfig())
    found = {name: environment[name] for name in names if name in environment}
    if users is None:
        assert list(found) == [names[0]]
    else:
        assert found == theirs
