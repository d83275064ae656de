"""Storage of a unit: the owner buffer, which lives as long as the unit, and the transient buffer.

Owns layouts and allocation. It never communicates and knows no module. Next: `transports.py`, which
sends what lies in these buffers.

[Note: regions]
All whole parameters of a unit with the same owner lie one after the other, in the same order and
with the same alignment on every rank. They are the owner's *region*. A region travels as one
tensor. On the owner it lies in the owner buffer, on the other ranks in the transient buffer, and
nothing is copied out of either. A parameter that is cut between ranks must be contiguous when
gathered. So it lies outside the regions, and each of its segments travels as a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from matrixtitan.plan.shard import MatrixShard

CPU_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""
CUDA_ALIGNMENT = 256
"""Bytes: what the caching allocator guarantees for a tensor of its own."""


@dataclass(frozen=True)
class Layout:
    """Where one rank keeps a unit's parameters, in elements.

    Regions are laid out alike on every rank.
    """

    region_numel: tuple[int, ...]
    """Size of each rank's region."""
    in_region: dict[str, int]
    """Offset of a whole parameter inside its owner's region."""
    owned_at: dict[str, int]
    """Offset of this rank's rows in its owner buffer: its region, then rows of split parameters."""
    owner_numel: int
    region_at: dict[int, int]
    """Offset of an owner's region in the transient buffer.

    This rank's own is absent where it is used in place, in the owner buffer.
    """
    split_at: dict[str, int]
    """Offset of a gathered split parameter in the transient buffer."""
    transient_numel: int


def align_up(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


def element_alignment(device: torch.device, dtype: torch.dtype) -> int:
    """Alignment in elements of `dtype`."""
    return (CUDA_ALIGNMENT if device.type == "cuda" else CPU_ALIGNMENT) // dtype.itemsize


def lay_out(
    shards: Sequence[MatrixShard],
    rank: int,
    world_size: int,
    alignment: int,
    own_region_in_place: bool,
) -> Layout:
    """Place one unit's `shards`, in order; `alignment` is in elements."""
    in_region: dict[str, int] = {}
    region_numel = [0] * world_size
    for shard in shards:
        if shard.is_whole:
            in_region[shard.fqn] = region_numel[shard.owner]
            region_numel[shard.owner] += align_up(shard.numel, alignment)

    owned_at: dict[str, int] = {}
    owner_numel = region_numel[rank]
    for shard in shards:
        if (segment := shard.segment(rank)) is None:
            continue
        if shard.is_whole:
            owned_at[shard.fqn] = in_region[shard.fqn]
        else:
            owned_at[shard.fqn] = owner_numel
            owner_numel += align_up(segment.rows * shard.row_numel, alignment)

    region_at: dict[int, int] = {}
    split_at: dict[str, int] = {}
    transient_numel = 0
    for owner, numel in enumerate(region_numel):
        if not (own_region_in_place and owner == rank):
            region_at[owner] = transient_numel
            transient_numel += numel
    for shard in shards:
        if len(shard.segments) > 1:
            split_at[shard.fqn] = transient_numel
            transient_numel += align_up(shard.numel, alignment)
    return Layout(
        tuple(region_numel), in_region, owned_at, owner_numel, region_at, split_at, transient_numel
    )


class TransientBuffer:
    """One flat tensor whose storage exists only between `allocate` and `free`.

    Views of it, the unsharded parameters and the tensors that transports fill, are made once,
    before the first `free`. They stay valid, because the storage is resized and never replaced. So
    what autograd saved for backward sees the refilled values.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = numel * dtype.itemsize

    def allocate(self) -> None:
        """Call it with the compute stream current.

        See [Note: stream order instead of record_stream] in `streams.py`.
        """
        self.flat.untyped_storage().resize_(self._nbytes)

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return self.flat.untyped_storage().nbytes()


def alias(tensor: Tensor) -> Tensor:
    """The same storage under a version counter of its own.

    [Note: refilling does not touch autograd's version counter]
    Autograd refuses a saved tensor whose version changed since it was saved. A gathered weight is
    freed after forward and refilled before backward with the same values, which is no change. So
    the parameter that autograd sees and the tensors that the runtime writes through share their
    storage and not their counter. `.data` gives that, and `.detach()` does not.
    """
    return tensor.data
