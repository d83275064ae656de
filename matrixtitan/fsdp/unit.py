"""One unit's life: SHARDED -> (unshard) -> UNSHARDED -> (reshard) -> SHARDED, and its gradients' way to their owners.

Owns the unit's buffers and its parameters' state. It is told when to do what by `hooks.py` and moves bytes through
`transports.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrixtitan.fsdp.buffers import Layout, TransientBuffer, alias, element_alignment, lay_out
from matrixtitan.fsdp.param import ShardedParam
from matrixtitan.fsdp.streams import Channel, Pending, Work
from matrixtitan.fsdp.transports import Piece, Transport

PACK_BELOW = 64 * 1024
"""Bytes. Smaller gradients with the same owner are reduced in one message; larger ones go as autograd made them, which
saves the copy."""

FillRows = Callable[[str, tuple[int, ...], int, Tensor], None]
"""(fqn, full_shape, start, out): write rows [start, start + len(out)) of the parameter's value into `out`."""


@dataclass(frozen=True)
class Communication:
    """What all units share: who we are and how bytes move. `unshard`/`reduce` are None in a group of one rank."""

    rank: int
    world_size: int
    device: torch.device
    unshard: Transport | None
    reduce: Transport | None
    replicas: dist.ProcessGroup | None
    unshard_channel: Channel
    reduce_channel: Channel
    replica_channel: Channel
    gradient_divisor: int


class Unit:
    """Parameters gathered and freed together."""

    def __init__(
        self,
        name: str,
        modules: list[nn.Module],
        params: list[ShardedParam],
        communication: Communication,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.modules = modules
        self.params = params
        self.state: Literal["sharded", "unsharding", "unsharded"] = "sharded"
        self._comm = communication
        self.stored_dtype = params[0].dtype if params else torch.get_default_dtype()
        self.compute_dtype = param_dtype or self.stored_dtype
        self.reduce_dtype = reduce_dtype or self.compute_dtype
        self._pending: Pending | None = None
        self._transient: TransientBuffer | None = None
        self._pieces: list[Piece] = []
        self._copies: list[
            tuple[Tensor, Tensor]
        ] = []  # (into the transient buffer, from the owner buffer)

    # --- storage ---------------------------------------------------------------------------------------------------

    def materialize(self, fill_rows: FillRows | None) -> None:
        """Allocate the owner buffer and make both lives of every parameter real."""
        comm = self._comm
        smallest = min(self.stored_dtype, self.compute_dtype, key=lambda dtype: dtype.itemsize)
        layout = lay_out(
            [param.shard for param in self.params],
            comm.rank,
            comm.world_size,
            element_alignment(comm.device, smallest),
            own_region_in_place=self.compute_dtype == self.stored_dtype,
        )
        owned = torch.zeros(layout.owner_numel, dtype=self.stored_dtype, device=comm.device)
        self._transient = TransientBuffer(layout.transient_numel, self.compute_dtype, comm.device)
        self._prepare_messages(layout, owned, self._transient.flat)
        for param in self.params:
            shard, segment = param.shard, param.segment
            if not shard.is_whole:
                full = self._transient.flat[layout.split_at[shard.fqn] :]
            elif shard.owner in layout.region_at:
                full = self._transient.flat[
                    layout.region_at[shard.owner] + layout.in_region[shard.fqn] :
                ]
            else:
                full = owned[layout.in_region[shard.fqn] :]
            rows = owned[layout.owned_at.get(shard.fqn, 0) :]
            rows = rows[: segment.rows * shard.row_numel if segment else 0]
            param.bind(
                alias(rows).view(shard.local_shape(comm.rank)),
                alias(full[: shard.numel]).view(shard.shape),
            )
            if fill_rows is not None and segment is not None:
                fill_rows(param.fqn, shard.shape, segment.start, param.sharded.data)
        self._transient.free()

    def _prepare_messages(self, layout: Layout, owned: Tensor, transient: Tensor) -> None:
        """What an unshard sends, and what it first copies into the transient buffer: rows of split parameters, and
        this rank's own region where it is cast."""
        rank = self._comm.rank
        self._pieces, self._copies = [], []
        for owner, numel in enumerate(layout.region_numel):
            if not numel:
                continue
            if owner in layout.region_at:
                tensor = transient[layout.region_at[owner] :][:numel]
                if owner == rank:
                    self._copies.append((tensor, owned[:numel]))
            else:
                tensor = owned[:numel]
            self._pieces.append(Piece(owner, tensor))
        for param in self.params:
            shard = param.shard
            if len(shard.segments) < 2:
                continue
            full = transient[layout.split_at[shard.fqn] :][: shard.numel]
            for segment in shard.segments:
                rows = full[segment.start * shard.row_numel : segment.stop * shard.row_numel]
                self._pieces.append(Piece(segment.rank, rows))
                if segment.rank == rank:
                    mine = layout.owned_at[shard.fqn]
                    self._copies.append((rows, owned[mine : mine + rows.numel()]))

    @property
    def transient_nbytes(self) -> int:
        """Bytes of gathered weights alive now, on this rank."""
        return self._transient.nbytes if self._transient is not None else 0

    def check_materialized(self) -> None:
        for param in self.params:
            if param.sharded.is_meta:
                raise RuntimeError(
                    f"{param.fqn} is still on the meta device at the first forward; call materialize() on what "
                    "fully_shard returned before running the model"
                )

    # --- weights ---------------------------------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Begin to gather; a no-op unless SHARDED. All ranks must call it in the same order."""
        if self.state != "sharded":
            return
        self.state = "unsharding"
        if not self.params:
            return
        self.check_materialized()
        transient, pieces, copies = self._transient, self._pieces, self._copies
        assert transient is not None
        transport = self._comm.unshard
        transient.allocate()

        def issue() -> Sequence[Work]:
            with torch.no_grad():
                for target, source in copies:
                    # my rows of split parameters, and the one cast to compute dtype
                    target.copy_(source)
            return transport.unshard(pieces) if transport is not None and pieces else ()

        self._pending = self._comm.unshard_channel.submit(issue, f"gathering {self.name}")

    def finish_unshard(self) -> None:
        """Wait for the weights and put them into the modules."""
        self.start_unshard()
        if self.state == "unsharded":
            return
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        for param in self.params:
            param.use_unsharded()
        self.state = "unsharded"

    def reshard(self) -> None:
        """Free the gathered weights and put the sharded parameters back."""
        if self.state == "sharded":
            return
        self.finish_unshard()  # a prefetch in flight still writes into the buffer
        for param in self.params:
            param.use_sharded()
        if self._transient is not None:
            self._transient.free()
        self.state = "sharded"

    # --- gradients -------------------------------------------------------------------------------------------------

    @property
    def trainable(self) -> bool:
        return any(param.trainable for param in self.params)

    def keep_gradients(self) -> None:
        """End a backward without reducing: full gradients stay here, in reduce dtype."""
        for param in self.params:
            if param.trainable:
                param.keep_gradient(self.reduce_dtype)

    def drop_gradients(self) -> None:
        """Forget full gradients that were not reduced."""
        for param in self.params:
            if param.trainable:
                param.take_gradient()

    def start_reduce(self) -> Reduction:
        """Send every gradient to its owner. A parameter unused on this rank counts as zeros, so that ranks agree on
        what is sent."""
        pieces: list[Piece] = []
        mine: list[tuple[ShardedParam, Tensor]] = []
        small: dict[int, list[tuple[ShardedParam, Tensor]]] = {}
        for param in self.params:
            if not param.trainable:
                continue
            shard = param.shard
            grad = param.take_gradient()
            if grad is None:
                grad = torch.zeros(shard.shape, dtype=self.reduce_dtype, device=self._comm.device)
            grad = grad.to(self.reduce_dtype).contiguous()
            if shard.is_whole and grad.numel() * grad.itemsize < PACK_BELOW:
                small.setdefault(shard.owner, []).append((param, grad))
                continue
            rows = grad.view(-1)
            for segment in shard.segments:
                part = rows[segment.start * shard.row_numel : segment.stop * shard.row_numel]
                pieces.append(Piece(segment.rank, part))
                if segment.rank == self._comm.rank:
                    mine.append((param, part))
        for owner, group in sorted(small.items()):
            flat = torch.cat([grad.view(-1) for _, grad in group])
            pieces.append(Piece(owner, flat))
            if owner == self._comm.rank:
                parts = flat.split([grad.numel() for _, grad in group])
                mine += [(param, part) for (param, _), part in zip(group, parts, strict=True)]
        pieces = [piece for piece in pieces if piece.tensor.numel()]
        transport = self._comm.reduce

        def issue() -> Sequence[Work]:
            return transport.reduce(pieces) if transport is not None and pieces else ()

        pending = self._comm.reduce_channel.submit(issue, f"reducing the gradients of {self.name}")
        return Reduction(self, pending, pieces, mine)


class Reduction:
    """Gradients of one unit on their way. Holds every buffer until the compute stream has waited for it."""

    def __init__(
        self,
        unit: Unit,
        pending: Pending,
        pieces: list[Piece],
        mine: list[tuple[ShardedParam, Tensor]],
    ) -> None:
        self._unit = unit
        self._pending: Pending | None = pending
        self._replicas: Pending | None = None
        self._pieces = pieces
        self._mine = mine

    @property
    def accumulates(self) -> bool:
        """Its sums will be added to gradients that are there already, instead of becoming them."""
        return any(param.sharded.grad is not None for param, _ in self._mine)

    def wait_for_owners(self) -> None:
        """The sums are on their owners and full gradients are freed; with replicas, their all-reduce has begun."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        self._pieces = []
        comm = self._unit._comm
        # rows of a larger gradient move out of it, so that it can be freed
        self._mine = [
            (param, part.clone() if part.numel() < param.shard.numel else part)
            for param, part in self._mine
        ]
        if comm.replicas is not None and self._mine:
            replicas, parts = comm.replicas, [part for _, part in self._mine]

            def issue() -> list[dist.Work]:
                works = [dist.all_reduce(part, group=replicas, async_op=True) for part in parts]
                return [work for work in works if work is not None]

            self._replicas = comm.replica_channel.submit(
                issue, f"all-reducing the gradients of {self._unit.name} over replicas"
            )

    def drop(self) -> None:
        """Wait, and forget the sums."""
        mine, self._mine = self._mine, []
        self.finish()
        del mine  # a buffer lives until what writes into it was waited for

    def finish(self) -> None:
        """Add the sums to the sharded parameters' `.grad`, in their stored dtype."""
        self.wait_for_owners()
        if self._replicas is not None:
            self._replicas.wait()
        divisor = self._unit._comm.gradient_divisor
        for param, part in self._mine:
            if divisor != 1:
                part.div_(divisor)
            grad = part.view(param.sharded.shape).to(param.dtype)
            if param.sharded.grad is None:
                param.sharded.grad = grad
            else:
                param.sharded.grad += grad
        self._mine = []
