"""How a unit's weights and gradients travel between their owners and the other ranks.

Owns the interface `Transport`, and the messages of `Grouped` and `Star`. A transport moves a list
of OwnedTensors in one direction: `unshard` sends each from its owner to all ranks of the group,
`reduce` sums each over all ranks onto its owner. On the other ranks the contents are undefined
after a reduction. The list has the same order on every rank. Ranks are group ranks throughout.
This module never decides what travels or when: `unit.py` (`Unit.start_reduce`) and `hooks.py` do.
Names, prices and the rule of "auto" are in `plan/transport_registry.py`. Next: `ring.py`, the third
transport, and `streams.py`.

[Note: gloo sends into posted receives]
Gloo starts to send a message only when the receiver has posted the receive and its notice has
arrived. So receives are posted before their data is needed, but only so many at a time, since each
needs a buffer. And a rank posts its receives before its sends: the notice would queue behind the
bytes that it sends to the same peer.

[Note: NCCL's messages go in one launch]
NCCL's sends and receives are kernels that wait for the matching kernel of the peer. Issued one by
one, they could deadlock. So on NCCL all messages of an operation go in one launch
(`batch_isend_irecv`, or one coalesced group of collectives), and nothing is posted ahead.
"""

from __future__ import annotations

import logging
import os
import pkgutil
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
from matrixtitan.plan.transport_registry import choose_transport, transport_spec

logger = logging.getLogger(__name__)

ADD_BYTES, ADDS_AHEAD = 1 << 20, 4
"""Bytes that a star's reduction receives at a time, and receives that it posts ahead on gloo.

The two bound the reduction's buffers, however many peers there are: see
[Note: gloo sends into posted receives].
"""


class OwnedTensor(NamedTuple):
    """A contiguous 1-D tensor, never empty, that lies whole on `owner`, a group rank."""

    owner: int
    tensor: Tensor


def ranks_on_this_machine(world_size: int) -> int:
    """The number that torchrun gives; without a launcher all `world_size` ranks of the group."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


class Transport(ABC):
    """Moves tensors in a process group of its own, so that no other traffic can cross its messages.

    An instance is used in one direction. Several of its operations may be in flight: the next may
    begin before the last is over. Until the caller has waited for the works that it got, it keeps
    the tensors alive and leaves them alone.
    """

    name: str

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.on_nccl = dist.get_backend(group) == "nccl"

    @abstractmethod
    def unshard(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        """Begin to copy each tensor from its owner to all ranks. All ranks call it in one order."""

    @abstractmethod
    def reduce(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        """Begin to sum each tensor over all ranks, in place on its owner.

        The other ranks' tensors serve as work space. All ranks call it in one order.
        """

    def close(self) -> None:  # noqa: B027 - most transports have nothing to release
        """Stop threads, if any. The process group belongs to whoever made it."""


class Grouped(Transport):
    """One broadcast, or one reduce, per tensor, all at once.

    The collectives run concurrently on gloo, and as one coalesced launch on NCCL. Two gloo ranks
    use a Star instead: between two ranks gloo runs collectives in opposite directions sometimes at
    once and sometimes one after the other, and its reduce sends half as much again.
    """

    name = "grouped"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._pair = Star(group) if self.world_size == 2 and not self.on_nccl else None

    def unshard(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        if self._pair:
            return self._pair.unshard(tensors)
        if self.on_nccl:
            with _coalesced(self.group, tensors) as launch:
                for owner, tensor in tensors:
                    dist.broadcast(tensor, group=self.group, group_src=owner, async_op=True)
            return launch.works
        return [
            _issued(dist.broadcast(tensor, group=self.group, group_src=owner, async_op=True))
            for owner, tensor in tensors
        ]

    def reduce(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        if self._pair:
            return self._pair.reduce(tensors)
        if self.on_nccl:
            with _coalesced(self.group, tensors) as launch:
                for owner, tensor in tensors:
                    dist.reduce(tensor, group=self.group, group_dst=owner, async_op=True)
            return launch.works
        return [
            _issued(dist.reduce(tensor, group=self.group, group_dst=owner, async_op=True))
            for owner, tensor in tensors
        ]

    def close(self) -> None:
        if self._pair:
            self._pair.close()


class Star(Transport):
    """Owners send to all peers; in a reduction all peers send to the owner.

    The owner adds in a fixed order, so two runs are bitwise identical.
    """

    name = "star"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._background = Background(f"star of rank {self.rank}")
        self._sender = Background(f"sends of the star of rank {self.rank}")
        self._across_machines = self.world_size > ranks_on_this_machine(self.world_size)
        self._adding: Task | None = None
        """Where the last reduction's sums are added."""

    def unshard(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        receives = [_Message(dist.irecv, t, owner) for owner, t in tensors if owner != self.rank]
        # each owner starts with its right neighbour, so that senders spread over receivers
        sends = [
            _Message(dist.isend, tensor, (self.rank + step) % self.world_size)
            for step in range(1, self.world_size)
            for owner, tensor in tensors
            if owner == self.rank
        ]
        if self.on_nccl:
            return self._exchange(receives + sends)
        return self._exchange(receives) + self._send(sends)

    def reduce(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        if self.on_nccl:
            return self._reduce_at_once(tensors)
        by_owner = chunks_by_owner(tensors, self.world_size, ADD_BYTES)
        mine = by_owner[self.rank]
        # [Note: order of a star's reduction]
        # Chunk by chunk, nearest peer first, on both sides: owner o adds from o + 1, o + 2, ...,
        # and rank r sends to r - 1, r - 2, ... So no two senders share a receiver's link, and no
        # owner waits for a sender that still waits for another owner.
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
                # receives come first: see [Note: gloo sends into posted receives]
                posted.wait()
        return works + self._send(sends)

    def close(self) -> None:
        self._background.close()
        self._sender.close()

    def _send(self, sends: list[_Message]) -> list[Work]:
        """Send, across machines one message after another.

        Messages issued all at once leave in the order in which peers become ready, which is the
        same for all ranks. All ranks would send to the same peer at the same time, and its link
        would be congested.
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
        """Add what peers send to this rank's `mine`, in [Note: order of a star's reduction].

        Sets `first_posted` once the first receives are posted, or could not be.
        """
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

    def _reduce_at_once(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        """All messages in one launch: see [Note: NCCL's messages go in one launch].

        So it needs a receive buffer for every peer at once.
        """
        mine = [tensor for owner, tensor in tensors if owner == self.rank]
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        received = [(tensor, peer, torch.empty_like(tensor)) for tensor in mine for peer in peers]
        messages = [
            _Message(dist.isend, tensor, owner) for owner, tensor in tensors if owner != self.rank
        ]
        messages += [_Message(dist.irecv, space, peer) for _, peer, space in received]
        return [
            _AddAfter(self._exchange(messages), [(tensor, space) for tensor, _, space in received])
        ]

    def _exchange(self, messages: list[_Message]) -> list[Work]:
        if not messages:
            return []
        if self.on_nccl:
            # see [Note: NCCL's messages go in one launch]
            operations = [
                dist.P2POp(m.call, m.tensor, group=self.group, group_peer=m.peer) for m in messages
            ]
            return list(dist.batch_isend_irecv(operations))
        # No tags: between two ranks gloo matches messages in order, in each direction. Receives
        # come first: see [Note: gloo sends into posted receives].
        messages = sorted(messages, key=lambda m: m.call is dist.isend)
        return [
            _issued(dist.isend(m.tensor, group=self.group, group_dst=m.peer))
            if m.call is dist.isend
            else _issued(dist.irecv(m.tensor, group=self.group, group_src=m.peer))
            for m in messages
        ]


class FakeTransport(Transport):
    """Sends nothing: for PyTorch's fake backend, where one process stands for all ranks.

    What other ranks own reads as zeros. See `strategies/dry_run.py`.
    """

    name = "fake"

    def unshard(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        for owner, tensor in tensors:
            if owner != self.rank:
                tensor.zero_()
        return ()

    def reduce(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        return ()


def transport_class(name: str, world_size: int, per_host: int, backend: str) -> type[Transport]:
    """The class that the registry has for `name`, or for what "auto" comes to.

    ValueError for a name that is not registered, or a transport that does not run on `backend`.
    """
    if backend == "fake":
        return FakeTransport
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
        instead = choose_transport(world_size, backend, per_host)
        raise ValueError(
            f"transport {name!r} works on {' and '.join(spec.backends or ())} alone, "
            f"this group's backend is {backend}: use {instead!r}"
        )
    return runtime_class(name)


def runtime_class(name: str) -> type[Transport]:
    """The class that moves the bytes of a registered transport, imported on demand.

    Raises RuntimeError where the registry's entry names no such class.
    """
    runtime = transport_spec(name).runtime
    try:
        found = pkgutil.resolve_name(runtime)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"transport {name!r}: its runtime {runtime} cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise RuntimeError(
            f"transport {name!r}: its runtime {runtime} is no {Transport.__module__}.Transport"
        )
    return found


def chunks_by_owner(
    tensors: Sequence[OwnedTensor], world_size: int, nbytes: int
) -> list[list[Tensor]]:
    """Each owner's tensors in order, cut into chunks of at most `nbytes`."""
    by_owner: list[list[Tensor]] = [[] for _ in range(world_size)]
    for owner, tensor in tensors:
        by_owner[owner] += chunks(tensor, nbytes)
    return by_owner


class _Message(NamedTuple):
    call: Callable[..., Any]
    """`dist.isend` or `dist.irecv`."""
    tensor: Tensor
    peer: int


class _AddAfter:
    """Waits for the received gradients, then adds them in rank order.

    `wait` is called with the communication stream current, so the adds run after the messages.
    """

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


def _coalesced(group: dist.ProcessGroup, tensors: Sequence[OwnedTensor]) -> Any:
    """One NCCL group call around several collectives; its `works` holds one work for all.

    `_coalescing_manager` is private in PyTorch up to 2.15. It has no public counterpart for
    broadcast and reduce: `batch_isend_irecv` covers point-to-point only. It is used only here.

    The collectives must be asynchronous. A synchronous coalesced launch goes to the current stream,
    while NCCL's watchdog looks at the group's own stream. The watchdog would take the launch for
    done at once, and a stalled peer would never time out.
    """
    return dist.distributed_c10d._coalescing_manager(
        group=group, device=tensors[0].tensor.device, async_ops=True
    )
