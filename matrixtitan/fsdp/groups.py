"""Process groups: those of the mesh, and a new one for each transport.

Owns which ranks talk to each other, and over which backend. It sends nothing, and does not choose
the transport (`api.py` does). Next: `assignment.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Groups:
    """The groups of one rank, and its place in them. The default is that of a single process."""

    shard: dist.ProcessGroup | None = None
    """Ranks that share one copy of the weights. None: a single process."""
    replicas: dist.ProcessGroup | None = None
    """Ranks that hold the same rows of different copies. None: there is one copy."""
    shard_rank: int = 0
    shard_ranks: int = 1
    all_ranks: int = 1
    """Shards times replicas."""


def mesh_or_default(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """`mesh`; for None one that shards over all ranks, or None without a process group.

    ValueError for a mesh of more than two axes.
    """
    if mesh is None:
        if not dist.is_initialized():
            return None
        return dist.init_device_mesh(
            "cuda" if "nccl" in dist.get_backend_config() else "cpu",
            (dist.get_world_size(),),
            mesh_dim_names=("dp_shard",),
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard got a mesh of {mesh.ndim} axes; give it one axis (shard) or two "
            "(replicate, shard)"
        )
    return mesh


def groups_of(mesh: DeviceMesh | None) -> Groups:
    """This rank's groups in a mesh of one axis (shard) or two (replicate, shard)."""
    if mesh is None:
        return Groups()
    shard = mesh.get_group(mesh.ndim - 1)
    return Groups(
        shard=shard,
        replicas=mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None,
        shard_rank=dist.get_rank(shard),
        shard_ranks=mesh.size(mesh.ndim - 1),
        all_ranks=mesh.size(),
    )


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries `device`'s tensors.

    A group may have several, such as "cpu:gloo,cuda:nccl".
    """
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends[device.type]


def new_group_like(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None
) -> dist.ProcessGroup:
    """A new group of the same ranks, for `device`'s tensors alone. All ranks of `group` call it.

    `timeout` None: PyTorch's default.
    """
    backend = backend_of(group, device)
    return dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout,
        backend=backend,
        pg_options=_ahead_of_compute(timeout) if backend == "nccl" else None,
        use_local_synchronization=True,
    )


def _ahead_of_compute(timeout: timedelta | None) -> object:
    """Options that let NCCL's kernels run before those of compute that are queued already.

    Without them a communication would wait for the whole queue.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        # new_group sets it too, and warns where the options have another
        options._timeout = timeout
    return options
