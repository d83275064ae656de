"""One unit's life, SHARDED -> (unshard) -> UNSHARDED -> (reshard) -> SHARDED, and its reductions.

Owns the unit's buffers and the state of its parameters. A gradient is summed onto its owner by
`Unit.start_reduce` and the `Reduction` that it returns. This module never decides when: `hooks.py`
does. Next: `param.py` and `buffers.py`, what a unit consists of; `transports.py`, how its bytes
move.

[Note: who frees what, and when]
A unit has three kinds of storage. Each is freed in one place, or never.
- The owner buffer is allocated by `materialize` and never freed or moved while the unit lives. The
  sharded parameters are views of it.
- The transient buffer holds gathered weights. `start_unshard` alone allocates it, and `reshard`
  alone frees it, after it has waited for a gather that still writes into the buffer. The schedule
  calls `reshard` after the unit's forward (unless the unit is kept for backward), after its
  backward, and before anything else sees the sharded parameters: a state dict, a step, the next
  forward.
- Full gradients are allocated by autograd, or by the packing of small ones. A `Reduction` holds
  the only references until `wait_for_owners`, since the communication reads and writes them until
  then. What this rank owns of a split parameter is a view of the full gradient: it is copied out
  at that point, so that the full gradient is freed. The schedule bounds how many reductions are
  under way.
On a GPU, memory may be freed before kernels that use it have run: see
[Note: stream order instead of record_stream] in `streams.py`.

[Note: labels in a trace]
A trace of torch.profiler shows spans that carry the unit's name: `matrix_fsdp::unshard` and
`matrix_fsdp::reduce` where the communication is issued, `matrix_fsdp::unshard_wait` and
`matrix_fsdp::reduce_wait` where compute waits for it, and with replicas `matrix_fsdp::all_reduce`
where that is issued. All lie outside compiled regions.

[Note: a gradient of negative zeros means that no rank used the parameter]
Where no rank used a parameter in a backward, its `.grad` is left as it is, since weight decay and
momentum would move the parameter on a gradient of zeros. A rank knows its own use only. A rank that
did not use the parameter therefore contributes negative zeros, and no message is added: a sum of
negative zeros is -0.0, and any +0.0 in it makes +0.0. The first element of each piece of a used
gradient has 0.0 added, so that a used gradient never consists of negative zeros alone. The owner
reads the sum only where its own contribution was unused, and with replicas after their all-reduce,
so that all replicas decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from matrixtitan.fsdp.buffers import Layout, TransientBuffer, alias, element_alignment, lay_out
from matrixtitan.fsdp.guard import ShardedGradient, refuse_deepcopy
from matrixtitan.fsdp.mixed_precision import MixedPrecisionPolicy
from matrixtitan.fsdp.param import ShardedParam, post_accumulate_grad_hooks
from matrixtitan.fsdp.streams import Channel, Pending, Work
from matrixtitan.fsdp.transports import OwnedTensor, Transport

PACK_BELOW = 64 * 1024
"""Bytes. Smaller whole gradients are packed by owner and reduced as one tensor. Others are reduced
in place, or from a cast copy where compute and reduce dtype differ."""

InitRows = Callable[[str, tuple[int, ...], int, Tensor], None]
"""(fqn, full_shape, start, out): write rows [start, start + len(out)) of the parameter's initial
value into `out`."""


@dataclass(frozen=True)
class Communication:
    """What all units share: this rank's place in the shard group, and how bytes move."""

    rank: int
    world_size: int
    device: torch.device
    unshard: Transport | None
    """None in a shard group of one rank."""
    reduce: Transport | None
    """None in a shard group of one rank."""
    replicas: dist.ProcessGroup | None
    unshard_channel: Channel
    reduce_channel: Channel
    replica_channel: Channel
    gradient_divisor: int
    """What sums of gradients are divided by on their owner: 1 for a sum, the number of ranks of the
    mesh for a mean."""


class Unit:
    """Parameters gathered and freed together."""

    def __init__(
        self,
        name: str,
        modules: list[nn.Module],
        params: list[ShardedParam],
        communication: Communication,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self.name = name
        self.modules = modules
        self.params = params
        self.state: Literal["sharded", "unsharding", "unsharded"] = "sharded"
        self._comm = communication
        self.stored_dtype = params[0].dtype if params else torch.get_default_dtype()
        self.compute_dtype = mp_policy.param_dtype or self.stored_dtype
        self.reduce_dtype = mp_policy.reduce_dtype or self.compute_dtype
        self.labels = Labels(name)
        self._pending: Pending | None = None
        self._transient: TransientBuffer | None = None
        self._gathered: list[OwnedTensor] = []
        """What an unshard sends and receives, in the same order on every rank."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """(into the transient buffer, from the owner buffer): done before an unshard sends."""

    __deepcopy__ = refuse_deepcopy

    # --- storage -------------------------------------------------------------------------------

    def materialize(self, init_rows: InitRows | None) -> None:
        """Allocate the owner buffer, and give storage to the sharded and the unsharded parameters.

        `init_rows` writes the values of this rank's rows. None leaves zeros.
        """
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
        self._prepare_unshard(layout, owned, self._transient.flat)
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
            if init_rows is not None and segment is not None:
                init_rows(param.fqn, shard.shape, segment.start, param.sharded.data)
        self._transient.free()

    def _prepare_unshard(self, layout: Layout, owned: Tensor, transient: Tensor) -> None:
        """List what an unshard sends, and what it copies into the transient buffer before.

        It copies this rank's rows of split parameters, and this rank's region where compute dtype
        differs from stored dtype.
        """
        rank = self._comm.rank
        self._gathered, self._copies = [], []
        for owner, numel in enumerate(layout.region_numel):
            if not numel:
                continue
            if owner in layout.region_at:
                tensor = transient[layout.region_at[owner] :][:numel]
                if owner == rank:
                    self._copies.append((tensor, owned[:numel]))
            else:
                tensor = owned[:numel]
            self._gathered.append(OwnedTensor(owner, tensor))
        for param in self.params:
            shard = param.shard
            if len(shard.segments) < 2:
                continue
            full = transient[layout.split_at[shard.fqn] :][: shard.numel]
            for segment in shard.segments:
                rows = full[segment.start * shard.row_numel : segment.stop * shard.row_numel]
                self._gathered.append(OwnedTensor(segment.rank, rows))
                if segment.rank == rank:
                    mine = layout.owned_at[shard.fqn]
                    self._copies.append((rows, owned[mine : mine + rows.numel()]))

    @property
    def transient_nbytes(self) -> int:
        """Bytes of gathered weights alive now, on this rank."""
        return self._transient.nbytes if self._transient is not None else 0

    def check_materialized(self) -> None:
        """RuntimeError where a parameter is still on the meta device."""
        for param in self.params:
            if param.sharded.is_meta:
                raise RuntimeError(
                    f"{param.fqn} is still on the meta device at the first forward; call "
                    "materialize() on what fully_shard returned before running the model"
                )

    # --- weights -------------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Begin to gather the weights; a no-op unless the unit is sharded.

        All ranks must call it in the same order of units.
        """
        if self.state != "sharded":
            return
        self.state = "unsharding"
        if not self.params:
            return
        self.check_materialized()
        transient, gathered, copies = self._transient, self._gathered, self._copies
        assert transient is not None
        transport = self._comm.unshard

        def issue() -> Sequence[Work]:
            with torch.no_grad():
                for target, source in copies:
                    # the only place where weights are cast to compute dtype
                    target.copy_(source)
            return transport.unshard(gathered) if transport is not None and gathered else ()

        with record_function(self.labels.unshard):
            transient.allocate()
            self._pending = self._comm.unshard_channel.submit(issue, f"gathering {self.name}")

    def finish_unshard(self) -> None:
        """Wait for the weights and put them into the modules."""
        self.start_unshard()
        if self.state == "unsharded":
            return
        if self._pending is not None:
            with record_function(self.labels.unshard_wait):
                self._pending.wait()
            self._pending = None
        for param in self.params:
            param.use_unsharded()
        self.state = "unsharded"

    def reshard(self) -> None:
        """Put the sharded parameters back and free the gathered weights."""
        if self.state == "sharded":
            return
        # see [Note: who frees what, and when]
        self.finish_unshard()
        for param in self.params:
            param.use_sharded()
        if self._transient is not None:
            self._transient.free()
        self.state = "sharded"

    def write_back(self) -> None:
        """Copy this rank's rows from the gathered weights into the sharded parameters.

        Compute dtype and stored dtype must be equal: weights would be rounded otherwise.
        """
        assert self.compute_dtype == self.stored_dtype and self.state == "unsharded"
        for param in self.params:
            if param.segment is not None:
                assert param.unsharded is not None
                rows = param.unsharded.detach()[param.segment.start : param.segment.stop]
                param.sharded.detach().copy_(rows)

    # --- gradients -----------------------------------------------------------------------------

    @property
    def trainable(self) -> bool:
        """Whether any parameter needs a gradient."""
        return any(param.trainable for param in self.params)

    def keep_gradients(self) -> None:
        """End a backward without reducing: full gradients stay on this rank, in reduce dtype."""
        for param in self.params:
            if param.trainable:
                param.keep_gradient(self.reduce_dtype)

    def drop_gradients(self) -> None:
        """Forget full gradients that were not reduced."""
        for param in self.params:
            if param.trainable:
                param.take_gradient()

    def start_reduce(self) -> Reduction:
        """Begin to sum every gradient onto its owner, the rank that steps the parameter.

        Each rank's gradient of a parameter has the full shape, in reduce dtype on the wire. Every
        segment's rows go to the rank that owns the segment. A parameter that this rank did not use
        counts as negative zeros, so that all ranks send the same list: see
        [Note: a gradient of negative zeros means that no rank used the parameter]. All ranks must
        call this in the same order of units.
        """
        with record_function(self.labels.reduce):
            return self._start_reduce()

    def _start_reduce(self) -> Reduction:
        reduced: list[OwnedTensor] = []
        mine: list[tuple[ShardedParam, Tensor]] = []
        small: dict[int, list[tuple[ShardedParam, Tensor]]] = {}
        unused: set[ShardedParam] = set()
        alone = self._comm.reduce is None and self._comm.replicas is None
        for param in self.params:
            if not param.trainable:
                continue
            shard = param.shard
            grad = param.take_gradient()
            if grad is None:
                if alone:
                    continue
                unused.add(param)
                grad = torch.full(
                    shard.shape, -0.0, dtype=self.reduce_dtype, device=self._comm.device
                )
            grad = grad.to(self.reduce_dtype).contiguous()
            if param not in unused and not alone:
                for segment in shard.segments:
                    grad.view(-1)[segment.start * shard.row_numel :][:1] += 0.0
            if shard.is_whole and grad.numel() * grad.itemsize < PACK_BELOW:
                small.setdefault(shard.owner, []).append((param, grad))
                continue
            rows = grad.view(-1)
            for segment in shard.segments:
                part = rows[segment.start * shard.row_numel : segment.stop * shard.row_numel]
                reduced.append(OwnedTensor(segment.rank, part))
                if segment.rank == self._comm.rank:
                    mine.append((param, part))
        for owner, group in sorted(small.items()):
            flat = torch.cat([grad.view(-1) for _, grad in group])
            reduced.append(OwnedTensor(owner, flat))
            if owner == self._comm.rank:
                parts = flat.split([grad.numel() for _, grad in group])
                mine += [(param, part) for (param, _), part in zip(group, parts, strict=True)]
        reduced = [owned for owned in reduced if owned.tensor.numel()]
        transport = self._comm.reduce

        def issue() -> Sequence[Work]:
            return transport.reduce(reduced) if transport is not None and reduced else ()

        pending = self._comm.reduce_channel.submit(issue, f"reducing the gradients of {self.name}")
        return Reduction(self, pending, reduced, mine, unused)


class Labels:
    """Names of one unit's spans in a trace; see [Note: labels in a trace]."""

    def __init__(self, unit: str) -> None:
        self.unshard = f"matrix_fsdp::unshard {unit}"
        self.unshard_wait = f"matrix_fsdp::unshard_wait {unit}"
        self.reduce = f"matrix_fsdp::reduce {unit}"
        self.reduce_wait = f"matrix_fsdp::reduce_wait {unit}"
        self.all_reduce = f"matrix_fsdp::all_reduce {unit}"


class Reduction:
    """Gradients of one unit on their way to their owners, then over the replicas, then to `.grad`.

    It holds every buffer until the compute stream has waited for the communication: see
    [Note: who frees what, and when].
    """

    def __init__(
        self,
        unit: Unit,
        pending: Pending,
        reduced: list[OwnedTensor],
        mine: list[tuple[ShardedParam, Tensor]],
        unused: set[ShardedParam],
    ) -> None:
        self._unit = unit
        self._pending: Pending | None = pending
        self._replicas: Pending | None = None
        self._reduced = reduced
        self._mine = mine
        self._unused = unused
        """Parameters that this rank did not use."""

    @property
    def accumulates(self) -> bool:
        """Whether a parameter already has a gradient, to which `finish` will add the sum."""
        return any(param.sharded.grad is not None for param, _ in self._mine)

    def wait_for_owners(self) -> None:
        """Wait until the sums are on their owners, and free the full gradients.

        With replicas it also begins the all-reduce of the sums over them.
        """
        if self._pending is None:
            return
        with record_function(self._unit.labels.reduce_wait):
            self._pending.wait()
        self._pending = None
        self._reduced = []
        comm = self._unit._comm
        # rows of a split parameter are copied out of the full gradient, which is freed with that
        self._mine = [
            (param, part.clone() if part.numel() < param.shard.numel else part)
            for param, part in self._mine
        ]
        if comm.replicas is not None and self._mine:
            replicas, parts = comm.replicas, [part for _, part in self._mine]

            def issue() -> list[dist.Work]:
                works = [dist.all_reduce(part, group=replicas, async_op=True) for part in parts]
                return [work for work in works if work is not None]

            with record_function(self._unit.labels.all_reduce):
                self._replicas = comm.replica_channel.submit(
                    issue, f"all-reducing the gradients of {self._unit.name} over replicas"
                )

    def drop(self) -> None:
        """Wait for the communication, and forget the sums."""
        mine, self._mine = self._mine, []
        self.finish()
        # the buffers had to live until here, since the communication wrote into them
        del mine

    def finish(self) -> None:
        """Add the sums to the sharded parameters' `.grad`, in their stored dtype.

        Then run the parameters' post-accumulate-grad hooks.
        """
        self.wait_for_owners()
        if self._replicas is not None:
            self._replicas.wait()
        divisor = self._unit._comm.gradient_divisor
        for param, part in self._mine:
            if param in self._unused and (part == 0).all() and part.signbit().all():
                # no rank used it
                continue
            if divisor != 1:
                part.div_(divisor)
            grad = part.view(param.sharded.shape).to(param.dtype)
            if param.sharded.grad is None:
                param.sharded.grad = ShardedGradient(grad, param.fqn)
            else:
                param.sharded.grad += grad
            with torch.no_grad():
                for hook in post_accumulate_grad_hooks(param.sharded):
                    hook(param.sharded)
        self._mine = []
