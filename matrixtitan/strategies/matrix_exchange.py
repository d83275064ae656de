"""Muon steps on row-sharded weights: how the ranks bring each matrix together to orthogonalise it.

Owns three published ways: gather every update in turn (`GatherEach`), gather all at once
(`GatherOnce`), or exchange shards so that each rank gets some whole matrices and sends the results
back (`AllToAll`, as Dion, VeOmni and torchtitan's DistMuon do). Momentum stays on the shards, and
Newton-Schulz is `optim`'s own. It never touches forward or backward. Next: `fsdp2.py`, which calls
`MuonExchange.step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from matrixtitan.optim.base import ParamGroup, as_matrices, named_params
from matrixtitan.optim.batching import batch_indices, orthogonalize
from matrixtitan.optim.muon import (
    Muon,
    learning_rate_scale,
    momentum_update,
    newton_schulz_of,
)
from matrixtitan.optim.newton_schulz import NewtonSchulz
from matrixtitan.rules import MuonRule
from matrixtitan.strategies.fsdp2_collectives import TransportAllGather

BUCKETS = 4
"""Number of buckets that AllToAll cuts its matrices into, unless they would be too large. Some
travel while others are orthogonalised."""

MAX_BUCKET_BYTES = 25 << 20
"""A rank closes a bucket once its matrices in it have this many bytes, which bounds the memory."""

BUCKETS_AHEAD = 2
"""Buckets that are gathered at a time: the one that is orthogonalised, and the next."""


@dataclass(frozen=True)
class ShardedUpdate:
    """The update of one matrix (R, C), whose rows are cut as FSDP2 cuts them (`shard_bounds`).

    `local` advances the momentum and returns this rank's rows. It is called once, and only when the
    rows are sent, so that not all updates are alive at once. `shape` is (R, C). `block_rows`: rows
    that are orthogonalised together; None: all. `rule` prices the orthogonalisation.
    """

    fqn: str
    local: Callable[[], Tensor]
    shape: tuple[int, int]
    block_rows: int | None
    rule: MuonRule
    dtype: torch.dtype
    device: torch.device

    @property
    def matrices_shape(self) -> tuple[int, ...]:
        """Shape of what is orthogonalised: (R, C), or (blocks, block_rows, C)."""
        rows, cols = self.shape
        block = self.block_rows or rows
        return self.shape if block == rows else (rows // block, block, cols)

    @property
    def flops(self) -> int:
        rows = self.block_rows or self.shape[0]
        return self.shape[0] // rows * self.rule.flops(rows, self.shape[1])


def shard_bounds(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """[start, stop) of the rows that FSDP2 gives `rank`: ceil(R / N) each, fewer at the end."""
    chunk = ceil(rows / world_size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


class MuonExchange(ABC):
    """A Muon step on DTensors that are sharded by rows over a one-dimensional mesh.

    c below is (N - 1) / N, and P is the number of matrix elements.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank = self.group.rank()
        self.world_size = self.group.size()

    @torch.no_grad()
    def step(self, muon: Muon) -> None:
        """As `muon.step()` on whole matrices: the same momentum, iteration, scales and decay."""
        for group in muon.param_groups:
            settings, rule = newton_schulz_of(group), muon.rule_of(group)
            params, updates = [], []
            for fqn, param in named_params(group):
                if param.grad is None:
                    continue
                muon.allocate(param, group)
                local = partial(
                    _local_update, param, muon.state[param]["momentum_buffer"], group, settings
                )
                if param.ndim == 3:
                    # a rank's rows are whole matrices: nothing to bring together
                    if _local(param).numel():
                        _apply(
                            param,
                            orthogonalize([local()], settings)[0],
                            (param.size(1), param.size(2)),
                            group,
                        )
                    continue
                params.append(param)
                shape = (param.size(0), param.size(1))
                dtype = settings.compute_dtype(param)
                updates.append(
                    ShardedUpdate(fqn, local, shape, group["block_rows"], rule, dtype, param.device)
                )
            for index, rows in self.orthogonalized(updates, settings):
                shape = updates[index].shape
                _apply(
                    params[index], rows, (updates[index].block_rows or shape[0], shape[1]), group
                )

    @abstractmethod
    def orthogonalized(
        self, updates: Sequence[ShardedUpdate], settings: NewtonSchulz
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, this rank's rows of the orthogonalised update) for each update.

        The order is free, but the same on all ranks.
        """

    def _rows_here(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole matrix (R, C)."""
        start, stop = shard_bounds(whole.size(0), self.world_size, self.rank)
        return whole[start:stop]


class GatherEach(MuonExchange):
    """Each update becomes a full tensor on every rank, and every rank orthogonalises it.

    A rank sends c P elements, in one all-gather per matrix.
    """

    def orthogonalized(
        self, updates: Sequence[ShardedUpdate], settings: NewtonSchulz
    ) -> Iterator[tuple[int, Tensor]]:
        for index, update in enumerate(updates):
            sharded = DTensor.from_local(
                update.local(),
                self.mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size(update.shape),
                stride=(update.shape[1], 1),
            )
            whole = orthogonalize(
                [as_matrices(sharded.full_tensor(), update.block_rows)], settings
            )[0]
            yield index, self._rows_here(whole.reshape(update.shape))


class GatherOnce(MuonExchange):
    """One all-gather brings all updates to every rank, and every rank orthogonalises all.

    A rank sends c P elements, padded to equal rows. `all_gather`: that of a tuned FSDP2 on gloo;
    None: PyTorch's.
    """

    def __init__(self, mesh: DeviceMesh, all_gather: TransportAllGather | None = None) -> None:
        super().__init__(mesh)
        self._all_gather = all_gather

    def orthogonalized(
        self, updates: Sequence[ShardedUpdate], settings: NewtonSchulz
    ) -> Iterator[tuple[int, Tensor]]:
        if not updates:
            return
        gathered = self._gather(updates)
        shapes = [update.matrices_shape for update in updates]
        for batch in batch_indices(shapes, updates[0].device):
            wholes = [
                as_matrices(self._whole(gathered, updates, index), updates[index].block_rows)
                for index in batch
            ]
            for index, whole in zip(batch, orthogonalize(wholes, settings), strict=True):
                yield index, self._rows_here(whole.reshape(updates[index].shape))

    def _gather(self, updates: Sequence[ShardedUpdate]) -> Tensor:
        """Every rank's rows of all updates, (N, elements of a rank), padded to equal rows."""
        sizes = [self._padded_numel(update) for update in updates]
        first = updates[0]
        gathered = torch.empty(self.world_size, sum(sizes), dtype=first.dtype, device=first.device)
        mine = gathered[self.rank]
        for update, place in zip(updates, mine.split(sizes), strict=True):
            rows = update.local()
            place[: rows.numel()].copy_(rows.flatten())
        if self._all_gather is not None:
            self._all_gather(gathered, mine, self.group).wait()
        else:
            _all_gather_stock(gathered.view(-1), mine, self.group)
        return gathered

    def _padded_numel(self, update: ShardedUpdate) -> int:
        return ceil(update.shape[0] / self.world_size) * update.shape[1]

    def _whole(self, gathered: Tensor, updates: Sequence[ShardedUpdate], index: int) -> Tensor:
        start = sum(self._padded_numel(update) for update in updates[:index])
        columns = gathered[:, start : start + self._padded_numel(updates[index])]
        rows, cols = updates[index].shape
        return columns.reshape(-1, cols)[:rows]


class AllToAll(MuonExchange):
    """Shards are exchanged so that each rank gets some whole matrices; the results are sent back.

    One rank orthogonalises each matrix: see `assign_owners`. Messages are packed into buckets
    without padding, and a bucket travels while another is orthogonalised. A rank sends 2 c P / N
    elements.
    """

    def orthogonalized(
        self, updates: Sequence[ShardedUpdate], settings: NewtonSchulz
    ) -> Iterator[tuple[int, Tensor]]:
        buckets = make_buckets(updates, self.world_size)
        gathers = [self._gather(updates, bucket) for bucket in buckets[:BUCKETS_AHEAD]]
        returning: _Transfer | None = None
        for position, bucket in enumerate(buckets):
            results = self._orthogonal(updates, bucket[self.rank], gathers.pop(0), settings)
            if position + BUCKETS_AHEAD < len(buckets):
                gathers.append(self._gather(updates, buckets[position + BUCKETS_AHEAD]))
            arriving, returning = returning, self._scatter(updates, bucket, results)
            del results
            if arriving is not None:
                yield from self._rows(updates, buckets[position - 1], arriving)
        if returning is not None:
            yield from self._rows(updates, buckets[-1], returning)

    def _orthogonal(
        self,
        updates: Sequence[ShardedUpdate],
        mine: Sequence[int],
        gathered: _Transfer,
        settings: NewtonSchulz,
    ) -> list[Tensor]:
        wholes = self._wholes(updates, mine, gathered)
        matrices = [
            as_matrices(whole, updates[i].block_rows) for i, whole in zip(mine, wholes, strict=True)
        ]
        return [
            matrix.reshape(updates[i].shape)
            for i, matrix in zip(mine, orthogonalize(matrices, settings), strict=True)
        ]

    def _gather(self, updates: Sequence[ShardedUpdate], bucket: Bucket) -> _Transfer:
        """Send owners this rank's rows of their matrices; receive all rows of this rank's own."""
        sent = [[updates[index].local() for index in owned] for owned in bucket]
        received = [
            sum(self._numel_on(updates[index], peer) for index in bucket[self.rank])
            for peer in range(self.world_size)
        ]
        return self._exchange(updates[0], sent, received)

    def _scatter(
        self, updates: Sequence[ShardedUpdate], bucket: Bucket, results: Sequence[Tensor]
    ) -> _Transfer:
        """Send each rank its rows of this rank's results; receive this rank's rows in return."""
        sent = []
        for peer in range(self.world_size):
            bounds = [shard_bounds(result.size(0), self.world_size, peer) for result in results]
            sent.append(
                [result[start:stop] for result, (start, stop) in zip(results, bounds, strict=True)]
            )
        received = [
            sum(self._numel_on(updates[index], self.rank) for index in owned) for owned in bucket
        ]
        return self._exchange(updates[0], sent, received)

    def _exchange(
        self, like: ShardedUpdate, sent: Sequence[Sequence[Tensor]], received: list[int]
    ) -> _Transfer:
        splits = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        flat = [tensor.flatten() for tensors in sent for tensor in tensors]
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        outgoing = torch.cat(flat) if flat else empty
        incoming = empty.new_empty(sum(received))
        work = dist.all_to_all_single(
            incoming, outgoing, received, splits, group=self.group, async_op=True
        )
        assert work is not None, "this rank is not in the group"
        return _Transfer(work, outgoing, incoming.split(received))

    def _wholes(
        self, updates: Sequence[ShardedUpdate], mine: Sequence[int], transfer: _Transfer
    ) -> list[Tensor]:
        """This rank's matrices, put together from the rows of all ranks."""
        transfer.work.wait()
        by_peer = [
            part.split([self._numel_on(updates[index], peer) for index in mine])
            for peer, part in enumerate(transfer.incoming)
        ]
        return [
            torch.cat([rows[place] for rows in by_peer]).view(updates[index].shape)
            for place, index in enumerate(mine)
        ]

    def _rows(
        self, updates: Sequence[ShardedUpdate], bucket: Bucket, transfer: _Transfer
    ) -> Iterator[tuple[int, Tensor]]:
        """This rank's rows of a bucket's results, once they have arrived."""
        transfer.work.wait()
        for owned, part in zip(bucket, transfer.incoming, strict=True):
            sizes = [self._numel_on(updates[index], self.rank) for index in owned]
            for index, rows in zip(owned, part.split(sizes), strict=True):
                yield index, rows.view(-1, updates[index].shape[1])

    def _numel_on(self, update: ShardedUpdate, rank: int) -> int:
        start, stop = shard_bounds(update.shape[0], self.world_size, rank)
        return (stop - start) * update.shape[1]


class _Transfer(NamedTuple):
    """An exchange in flight.

    `outgoing` is only kept alive; `incoming` has one flat part for each peer.
    """

    work: dist.Work
    outgoing: Tensor
    incoming: tuple[Tensor, ...]


Bucket = list[list[int]]
"""For each rank, the indices of the matrices that it orthogonalises in this exchange."""


def assign_owners(costs: Sequence[tuple[str, int]], world_size: int) -> list[int]:
    """A rank for each (fqn, cost): longest processing time first, on the rank with least cost.

    Ties are broken by fqn, then by rank.
    """
    owners = [0] * len(costs)
    loads = [0] * world_size
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i][1], costs[i][0])):
        owners[index] = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += costs[index][1]
    return owners


def make_buckets(updates: Sequence[ShardedUpdate], world_size: int) -> list[Bucket]:
    """Cut the matrices of every rank into exchanges of about equal bytes.

    Costly matrices come first, and equal shapes together.
    """
    owners = assign_owners([(update.fqn, update.flops) for update in updates], world_size)
    queues = [
        sorted(
            (index for index, owner in enumerate(owners) if owner == rank),
            key=lambda i: (-updates[i].flops, updates[i].shape, updates[i].fqn),
        )
        for rank in range(world_size)
    ]
    cut = [_cut(queue, updates) for queue in queues]
    longest = max((len(slices) for slices in cut), default=0)
    return [[slices[k] if k < len(slices) else [] for slices in cut] for k in range(longest)]


def _cut(queue: Sequence[int], updates: Sequence[ShardedUpdate]) -> list[list[int]]:
    """One rank's matrices, bucket by bucket."""
    nbytes = {
        i: updates[i].shape[0] * updates[i].shape[1] * updates[i].dtype.itemsize for i in queue
    }
    limit = min(MAX_BUCKET_BYTES, ceil(sum(nbytes.values()) / BUCKETS))
    slices: list[list[int]] = []
    filled = limit
    for index in queue:
        if filled >= limit:
            slices.append([])
            filled = 0
        slices[-1].append(index)
        filled += nbytes[index]
    return slices


def _local_update(
    param: Tensor, buffer: Tensor, group: ParamGroup, settings: NewtonSchulz
) -> Tensor:
    """Momentum on this rank's rows; the result in the dtype that the iteration starts with."""
    assert param.grad is not None
    update = momentum_update(
        _local(param.grad), _local(buffer), group["momentum"], group["nesterov"]
    )
    return update.to(settings.compute_dtype(update))


def _apply(param: Tensor, rows: Tensor, matrix: tuple[int, int], group: ParamGroup) -> None:
    """Muon's decay and update on this rank's rows; `matrix`: the shape that was orthogonalised."""
    local = _local(param)
    if group["weight_decay"]:
        local.mul_(1 - group["lr"] * group["weight_decay"])
    local.add_(rows, alpha=-group["lr"] * learning_rate_scale(group["scale"], *matrix))


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor, as a view. TypeError for a plain tensor."""
    if not isinstance(tensor, DTensor):
        raise TypeError(
            "expected a DTensor sharded by FSDP2, got a plain tensor of shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.to_local()


def _all_gather_stock(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather into one tensor. PyTorch renamed the call, and 2.11 has the old name only."""
    renamed = hasattr(dist, "all_gather_single")
    (dist.all_gather_single if renamed else dist.all_gather_into_tensor)(
        gathered, mine, group=group
    )
