"""How a unit's segments travel between owners and the rest: the only file here that calls collectives.

A transport moves a list of Pieces in one direction: `unshard` sends each from its owner to all ranks of the group,
`reduce` sums each over all ranks onto its owner (elsewhere the contents are then undefined). Pieces are listed in the
same order on every rank. Ranks are group ranks throughout. `plan/cost.py` has the formula behind `auto`;
`ring.py` is the third transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.fsdp.streams import Work


class Piece(NamedTuple):
    """A contiguous 1-D tensor that lies whole on `owner` (a group rank). Never empty."""

    owner: int
    tensor: Tensor


class Transport(ABC):
    """Moves pieces inside one process group of its own, so that no other traffic can cross its messages."""

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
    """One broadcast (or reduce) per piece, all at once: concurrent on gloo, one coalesced launch on NCCL."""

    name = "grouped"

    def unshard(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        if self.on_nccl:
            with _coalesced(self.group, pieces):
                for owner, tensor in pieces:
                    dist.broadcast(tensor, group=self.group, group_src=owner)
            return ()
        return [
            _issued(dist.broadcast(tensor, group=self.group, group_src=owner, async_op=True))
            for owner, tensor in pieces
        ]

    def reduce(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        if self.on_nccl:
            with _coalesced(self.group, pieces):
                for owner, tensor in pieces:
                    dist.reduce(tensor, group=self.group, group_dst=owner)
            return ()
        return [
            _issued(dist.reduce(tensor, group=self.group, group_dst=owner, async_op=True))
            for owner, tensor in pieces
        ]


class Star(Transport):
    """Owners send to every peer; for a reduction every peer sends to the owner, which adds in rank order."""

    name = "star"

    def unshard(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        messages = []
        for tag, (owner, tensor) in enumerate(pieces):
            if owner == self.rank:
                # each owner starts with its right-hand neighbour, so that senders spread over receivers
                messages += [
                    _Message(dist.isend, tensor, (self.rank + step) % self.world_size, tag)
                    for step in range(1, self.world_size)
                ]
            else:
                messages.append(_Message(dist.irecv, tensor, owner, tag))
        return self._exchange(messages)

    def reduce(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        messages = []
        sums: list[tuple[Tensor, list[Tensor]]] = []
        for tag, (owner, tensor) in enumerate(pieces):
            if owner != self.rank:
                messages.append(_Message(dist.isend, tensor, owner, tag))
                continue
            received = [
                tensor if peer == self.rank else torch.empty_like(tensor)
                for peer in range(self.world_size)
            ]
            messages += [
                _Message(dist.irecv, received[peer], peer, tag)
                for peer in range(self.world_size)
                if peer != self.rank
            ]
            sums.append((tensor, received))
        return [_SumAfter(self._exchange(messages), sums)]

    def _exchange(self, messages: list[_Message]) -> list[Work]:
        if not messages:
            return []
        if self.on_nccl:  # one launch: NCCL's sends would wait for each other one by one
            operations = [
                dist.P2POp(m.call, m.tensor, group=self.group, group_peer=m.peer) for m in messages
            ]
            return list(dist.batch_isend_irecv(operations))
        return [
            _issued(dist.isend(m.tensor, group=self.group, group_dst=m.peer, tag=m.tag))
            if m.call is dist.isend
            else _issued(dist.irecv(m.tensor, group=self.group, group_src=m.peer, tag=m.tag))
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


class _Message(NamedTuple):
    call: Callable[..., Any]  # dist.isend or dist.irecv
    tensor: Tensor
    peer: int
    tag: int


class _SumAfter:
    """Waits for the received gradients, then adds them in rank order, so that two runs give the same bits."""

    def __init__(self, works: Sequence[Work], sums: list[tuple[Tensor, list[Tensor]]]) -> None:
        self._works = works
        self._sums = sums

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for target, addends in self._sums:
            total = addends[
                0
            ]  # the target itself on rank 0, elsewhere a receive buffer that is ours to overwrite
            for addend in addends[1:]:
                total.add_(addend)
            if total is not target:
                target.copy_(total)
        self._sums = []


def _issued(work: Work | None) -> Work:
    assert work is not None, "this rank is not in the group"
    return work


def _coalesced(group: dist.ProcessGroup, pieces: Sequence[Piece]):  # type: ignore[no-untyped-def]
    """One NCCL group call around several collectives.

    Private in PyTorch up to 2.15 and without a public counterpart for broadcast and reduce: `batch_isend_irecv`
    covers point-to-point only. This is the one place that uses it.
    """
    return dist.distributed_c10d._coalescing_manager(group=group, device=pieces[0].tensor.device)
