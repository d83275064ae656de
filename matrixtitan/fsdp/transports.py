"""How a unit's segments travel between owners and the rest: the only file here that calls collectives.

A transport moves a list of Pieces in one direction: `unshard` sends each from its owner to all ranks of the group,
`reduce` sums each over all ranks onto its owner (elsewhere the contents are then undefined). Pieces are listed in the
same order on every rank. Ranks are group ranks throughout. `plan/transports.py` has the registry: names, prices, and
the rule of `auto`. `ring.py` is the third transport.
"""

from __future__ import annotations

import importlib
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from threading import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.fsdp.background import Background, Steps, Task, chunks
from matrixtitan.fsdp.streams import Work
from matrixtitan.plan.transports import choose_transport, transport_spec

logger = logging.getLogger(__name__)

ADD_BYTES, ADDS_AHEAD = 1 << 20, 4
"""What a star's reduction receives at a time, and receives posted before their data is needed: gloo starts sending
only into a posted receive. Together they bound its buffers, however many peers there are."""


class Piece(NamedTuple):
    """A contiguous 1-D tensor that lies whole on `owner` (a group rank). Never empty."""

    owner: int
    tensor: Tensor


def ranks_on_this_machine(world_size: int) -> int:
    """As torchrun says; all of the group where there is no launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


class Transport(ABC):
    """Moves pieces one way inside one process group of its own, so that no other traffic can cross its messages.

    Several operations may be in flight; the next may begin before the last is over.
    """

    name: str

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.on_nccl = dist.get_backend(group) == "nccl"

    @abstractmethod
    def unshard(self, pieces: Sequence[Piece]) -> Sequence[Work]: ...

    @abstractmethod
    def reduce(self, pieces: Sequence[Piece]) -> Sequence[Work]: ...

    def close(self) -> None:  # noqa: B027 - most transports have nothing to release
        """Stop threads, if any; the process group is its creator's."""


class Grouped(Transport):
    """One broadcast (or reduce) per piece, all at once: concurrent on gloo, one coalesced launch on NCCL.

    Two gloo ranks send to each other as in a star. Gloo runs two collectives in opposite directions at once or one
    after the other, as chance has it, and its reduce sends half as much again.
    """

    name = "grouped"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._pair = Star(group) if self.world_size == 2 and not self.on_nccl else None

    def unshard(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        if self._pair:
            return self._pair.unshard(pieces)
        if self.on_nccl:
            with _coalesced(self.group, pieces) as launch:
                for owner, tensor in pieces:
                    dist.broadcast(tensor, group=self.group, group_src=owner, async_op=True)
            return launch.works
        return [
            _issued(dist.broadcast(tensor, group=self.group, group_src=owner, async_op=True))
            for owner, tensor in pieces
        ]

    def reduce(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        if self._pair:
            return self._pair.reduce(pieces)
        if self.on_nccl:
            with _coalesced(self.group, pieces) as launch:
                for owner, tensor in pieces:
                    dist.reduce(tensor, group=self.group, group_dst=owner, async_op=True)
            return launch.works
        return [
            _issued(dist.reduce(tensor, group=self.group, group_dst=owner, async_op=True))
            for owner, tensor in pieces
        ]

    def close(self) -> None:
        if self._pair:
            self._pair.close()


class Star(Transport):
    """Owners send to every peer; in a reduction peers send to the owner, which adds in a fixed order."""

    name = "star"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._background = Background(f"star of rank {self.rank}")
        self._sender = Background(f"sends of the star of rank {self.rank}")
        self._across_machines = self.world_size > ranks_on_this_machine(self.world_size)
        self._adding: Task | None = None  # the last reduction's

    def unshard(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        receives = [_Message(dist.irecv, t, owner) for owner, t in pieces if owner != self.rank]
        # each owner starts with its right-hand neighbour, so that senders spread over receivers
        sends = [
            _Message(dist.isend, tensor, (self.rank + step) % self.world_size)
            for step in range(1, self.world_size)
            for owner, tensor in pieces
            if owner == self.rank
        ]
        if self.on_nccl:
            return self._exchange(receives + sends)
        return self._exchange(receives) + self._send(sends)

    def reduce(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        if self.on_nccl:
            return self._reduce_at_once(pieces)
        by_owner = chunks_by_owner(pieces, self.world_size, ADD_BYTES)
        mine = by_owner[self.rank]
        # [Note: order of a star's reduction]
        # Chunk by chunk, nearest peer first, on both sides: owner o adds from o + 1, o + 2, ..., rank r sends to r - 1,
        # r - 2, ... So receivers never share a link, and none waits for a sender that waits for another.
        sends = [
            _Message(dist.isend, by_owner[owner][index], owner)
            for index in range(max(map(len, by_owner)))
            for owner in (
                (self.rank - step) % self.world_size for step in range(1, self.world_size)
            )
            if index < len(by_owner[owner])
        ]
        works: list[Work] = []
        if mine:
            idle, posted = self._adding is None or self._adding.done.is_set(), Event()
            self._adding = self._background.submit(self._add_peers(mine, posted))
            works.append(self._adding)
            if idle:
                posted.wait()  # receives before sends, as in `_exchange`
        return works + self._send(sends)

    def close(self) -> None:
        self._background.close()
        self._sender.close()

    def _send(self, sends: list[_Message]) -> list[Work]:
        """Across machines one after another. All at once they would leave in the order in which peers happen to be
        ready, which is the same for all ranks: they would meet at one peer's link after another's.
        """
        if not (sends and self._across_machines):
            return self._exchange(sends)

        return [self._sender.submit(self._send_in_turn(sends))]

    def _send_in_turn(self, sends: list[_Message]) -> Steps:
        for message in sends:
            for work in self._exchange([message]):
                yield False
                work.wait()

    def _add_peers(self, mine: list[Tensor], first_posted: Event) -> Steps:
        """Add what peers send; see [Note: order of a star's reduction]."""
        incoming = (
            (chunk, (self.rank + step) % self.world_size)
            for chunk in mine
            for step in range(1, self.world_size)
        )
        posted: deque[tuple[Tensor, Tensor, Work]] = deque()

        def post(count: int) -> None:
            for chunk, peer in islice(incoming, count):
                space = torch.empty_like(chunk)
                work = dist.irecv(space, group=self.group, group_src=peer)
                posted.append((chunk, space, _issued(work)))

        try:
            post(ADDS_AHEAD)
        finally:
            first_posted.set()
        while posted:
            chunk, space, work = posted.popleft()
            yield False
            work.wait()
            chunk.add_(space)
            post(1)

    def _reduce_at_once(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        """One launch, since NCCL's sends and receives would wait for each other; a buffer for every peer."""
        mine = [tensor for owner, tensor in pieces if owner == self.rank]
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        received = [(tensor, peer, torch.empty_like(tensor)) for tensor in mine for peer in peers]
        messages = [
            _Message(dist.isend, tensor, owner) for owner, tensor in pieces if owner != self.rank
        ]
        messages += [_Message(dist.irecv, space, peer) for _, peer, space in received]
        return [
            _AddAfter(self._exchange(messages), [(tensor, space) for tensor, _, space in received])
        ]

    def _exchange(self, messages: list[_Message]) -> list[Work]:
        if not messages:
            return []
        if self.on_nccl:  # one launch: NCCL's sends would wait for each other one by one
            operations = [
                dist.P2POp(m.call, m.tensor, group=self.group, group_peer=m.peer) for m in messages
            ]
            return list(dist.batch_isend_irecv(operations))
        # without tags: between two ranks gloo matches messages in order, each way for itself. Receives come first: a
        # sender waits for word of them, which would queue behind what this rank sends
        messages = sorted(messages, key=lambda m: m.call is dist.isend)
        return [
            _issued(dist.isend(m.tensor, group=self.group, group_dst=m.peer))
            if m.call is dist.isend
            else _issued(dist.irecv(m.tensor, group=self.group, group_src=m.peer))
            for m in messages
        ]


class DryRun(Transport):
    """For PyTorch's fake backend, where one process stands for all: what others own reads as zeros."""

    name = "dry run"

    def unshard(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        for owner, tensor in pieces:
            if owner != self.rank:
                tensor.zero_()
        return ()

    def reduce(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        return ()


def transport_class(name: str, world_size: int, per_host: int, backend: str) -> type[Transport]:
    """The class that the registry has for `name`, or for what "auto" comes to.

    ValueError for a name that is not registered, or a transport that does not run on `backend`.
    """
    if backend == "fake":
        return DryRun
    if name == "auto":
        name = choose_transport(world_size, backend, per_host)
        logger.info(
            "transport: %s (auto: %d ranks, %d on a machine, %s)",
            name,
            world_size,
            per_host,
            backend,
        )
    spec = transport_spec(name)
    if not spec.runs_on(backend):
        raise ValueError(
            f"transport {name!r} works on {' and '.join(spec.backends or ())} alone, "
            f"this group's backend is {backend}: use {choose_transport(world_size, backend, per_host)!r}"
        )
    return runtime_class(name)


def runtime_class(name: str) -> type[Transport]:
    """What moves the bytes of a registered transport, imported on demand; RuntimeError where its entry is wrong."""
    module, _, attribute = transport_spec(name).runtime.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"transport {name!r}: its runtime {module}:{attribute} cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise RuntimeError(
            f"transport {name!r}: its runtime {module}:{attribute} is no {Transport.__module__}.Transport"
        )
    return found


def chunks_by_owner(pieces: Sequence[Piece], world_size: int, nbytes: int) -> list[list[Tensor]]:
    """Each owner's pieces in order, cut into chunks of at most `nbytes`."""
    by_owner: list[list[Tensor]] = [[] for _ in range(world_size)]
    for owner, tensor in pieces:
        by_owner[owner] += chunks(tensor, nbytes)
    return by_owner


class _Message(NamedTuple):
    call: Callable[..., Any]  # dist.isend or dist.irecv
    tensor: Tensor
    peer: int


class _AddAfter:
    """Waits for the received gradients, then adds them in rank order, so that two runs give the same bits."""

    def __init__(self, works: Sequence[Work], additions: list[tuple[Tensor, Tensor]]) -> None:
        self._works = works
        self._additions = additions

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for total, addend in self._additions:
            total.add_(addend)
        self._additions = []


def _issued(work: Work | None) -> Work:
    assert work is not None, "this rank is not in the group"
    return work


def _coalesced(group: dist.ProcessGroup, pieces: Sequence[Piece]):  # type: ignore[no-untyped-def]
    """One NCCL group call around several collectives; its `works` holds the one work of all of them.

    Private in PyTorch up to 2.15 and without a public counterpart for broadcast and reduce: `batch_isend_irecv`
    covers point-to-point only. This is the one place that uses it. The collectives must be asynchronous: a
    synchronous coalesced launch goes to the current stream, and NCCL's watchdog, which looks at the group's own, takes
    it for done at once, so that a stalled peer would never time out.
    """
    return dist.distributed_c10d._coalescing_manager(
        group=group, device=pieces[0].tensor.device, async_ops=True
    )
