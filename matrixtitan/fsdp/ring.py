"""The ring transport: each rank receives from its left neighbour and sends to its right one, chunk by chunk.

Gloo only: receives posted ahead of their sends would deadlock NCCL. A thread of its own forwards while the main
thread computes; one transport has one thread, so its operations begin in the order they were issued.

[Note: order of chunks on a link]
Unshard: rank r's link carries the pieces of owners r, r-1, ..., r+2: its own first, then what arrives, and never those
of its right neighbour. Reduction: sums of owner o's pieces start at o+1 and end at o, so rank r's link carries owners
r-1, r-2, ..., r+1. Both ends of a link derive the same list, so messages need no tags, and sums are added in ring
order: two runs give the same bits.

[Note: where the next operation begins]
A rank that owns little of a unit must receive most of it, so one link or another carries more than the rest, each unit
another one. A rank may begin the next operation, if it is there, when it has sent all of the last and posted all its
receives (both must keep their order on a link), while what goes no further still arrives. So links wait for each other
mostly where their sums over several units differ. It is not perfect: a reduction posts 2 MB of receives ahead, to save
memory, so its last own sums must be near; and the thread looks for the next operation between two chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.fsdp.background import Background, Steps, chunk_bytes
from matrixtitan.fsdp.streams import Work
from matrixtitan.fsdp.transports import Piece, Transport, chunks_by_owner

POSTED_BYTES = 2 << 20
"""What each reduction's receives take that are posted before their data is needed: gloo starts sending only into a
posted receive, and a neighbour that has no core for a while must not stop the link. 8 chunks of the largest, 85 of the
smallest size."""


class Ring(Transport):
    """Bytes on a link: S - s_(r+1) to gather, S - s_r to reduce, whatever the balance between owners."""

    name = "ring"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._left = (self.rank - 1) % self.world_size
        self._right = (self.rank + 1) % self.world_size
        self._background = Background(f"ring of rank {self.rank}")

    def unshard(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        return [self._background.submit(self._unshard(pieces))]

    def reduce(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        return [self._background.submit(self._reduce(pieces))]

    def close(self) -> None:
        self._background.close()

    def _unshard(self, pieces: Sequence[Piece]) -> Steps:
        by_owner = chunks_by_owner(pieces, self.world_size, self._chunk_bytes(pieces))
        incoming = [
            (owner, chunk)
            for owner in self._owners_back_from(self._left)
            if owner != self.rank
            for chunk in by_owner[owner]
        ]
        receives = [
            dist.irecv(chunk, group=self.group, group_src=self._left) for _, chunk in incoming
        ]
        sends = [self._send(chunk) for chunk in by_owner[self.rank]]
        for (owner, chunk), receive in zip(incoming, receives, strict=True):
            yield owner == self._right  # these come last and go no further
            _wait(receive)
            if owner != self._right:
                sends.append(self._send(chunk))
        for send in sends:
            yield True
            _wait(send)

    def _reduce(self, pieces: Sequence[Piece]) -> Steps:
        size = self._chunk_bytes(pieces)
        by_owner = chunks_by_owner(pieces, self.world_size, size)
        incoming = deque(
            (owner, mine)
            for owner in self._owners_back_from((self.rank - 2) % self.world_size)
            if owner != self._left
            for mine in by_owner[owner]
        )
        posted: deque[tuple[int, Tensor, Tensor, Work | None]] = deque()

        def post(count: int) -> None:
            for _ in range(min(count, len(incoming))):
                owner, mine = incoming.popleft()
                space = torch.empty_like(mine)
                posted.append(
                    (owner, mine, space, dist.irecv(space, group=self.group, group_src=self._left))
                )

        post(POSTED_BYTES // size)  # first: word of it would queue behind what this rank sends
        sends = [self._send(chunk) for chunk in by_owner[self._left]]  # sums that start here
        while posted:
            owner, mine, received, work = posted.popleft()
            yield not incoming and owner == self.rank  # sums of this rank's own come last
            _wait(work)
            mine.add_(received)
            post(1)
            if owner != self.rank:
                sends.append(self._send(mine))
        for send in sends:
            yield True
            _wait(send)

    def _chunk_bytes(self, pieces: Sequence[Piece]) -> int:
        return chunk_bytes(sum(tensor.nbytes for _, tensor in pieces), self.world_size)

    def _send(self, chunk: Tensor) -> Work | None:
        return dist.isend(chunk, group=self.group, group_dst=self._right)

    def _owners_back_from(self, first: int) -> Iterator[int]:
        return ((first - step) % self.world_size for step in range(self.world_size))


def _wait(work: Work | None) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait()
