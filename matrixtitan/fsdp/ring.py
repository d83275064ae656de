"""The ring transport: each rank receives chunks from its left neighbour and sends to its right one.

Owns the order of chunks on a link. Gloo only, since it posts receives ahead of their sends: see
[Note: NCCL's messages go in one launch] in `transports.py`. It never runs on the main thread: one
thread per transport forwards while the main thread computes, and operations begin in the order in
which they were issued. Next: `background.py`, that thread.

[Note: order of chunks on a link]
Unshard: rank r's link carries the tensors of owners r, r-1, ..., r+2: its own first, then what
arrives, and never those of its right neighbour. Reduction: sums of owner o's tensors start at o+1
and end at o, so rank r's link carries those of owners r-1, r-2, ..., r+1. Both ends of a link
derive the same list, so messages need no tags. Sums are added in ring order, so two runs are
bitwise identical.

[Note: where the next operation begins]
A rank that owns little of a unit must receive most of it. So in each unit one link carries more
than the others, and it is another link in another unit. A rank may begin the next operation, if it
has been issued, when it has issued all sends and posted all receives of the last operation: sends
and receives must keep their order on a link. Chunks that this rank does not forward may still
arrive then. So a link is idle mainly if other links carry more bytes over several units. A
reduction posts only 2 MB of receives ahead, to save memory, so the next operation cannot begin
before the last of this one's receives are posted. And the thread looks for the next operation only
between two chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.fsdp.background import Background, Steps, chunk_bytes
from matrixtitan.fsdp.streams import Work
from matrixtitan.fsdp.transports import OwnedTensor, Transport, chunks_by_owner

POSTED_BYTES = 2 << 20
"""Bytes of the receives that each reduction posts before it needs their data.

With fewer, a neighbour that has no core for a while would stop the link: see
[Note: gloo sends into posted receives] in `transports.py`. These are 8 chunks of the largest size,
or 85 of the smallest.
"""


class Ring(Transport):
    """Rank r sends S - s_(r+1) bytes to unshard and S - s_r bytes to reduce, whatever the balance.

    S is a unit's bytes, and s_r is the part of them that rank r owns.
    """

    name = "ring"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._left = (self.rank - 1) % self.world_size
        self._right = (self.rank + 1) % self.world_size
        self._background = Background(f"ring of rank {self.rank}")

    def unshard(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        return [self._background.submit(self._unshard(tensors))]

    def reduce(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        return [self._background.submit(self._reduce(tensors))]

    def close(self) -> None:
        self._background.close()

    def _unshard(self, tensors: Sequence[OwnedTensor]) -> Steps:
        by_owner = chunks_by_owner(tensors, self.world_size, self._chunk_bytes(tensors))
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
            # the right neighbour's own chunks come last, and this rank does not forward them
            yield owner == self._right
            _wait(receive)
            if owner != self._right:
                sends.append(self._send(chunk))
        for send in sends:
            yield True
            _wait(send)

    def _reduce(self, tensors: Sequence[OwnedTensor]) -> Steps:
        size = self._chunk_bytes(tensors)
        by_owner = chunks_by_owner(tensors, self.world_size, size)
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

        # receives come first: see [Note: gloo sends into posted receives]
        post(POSTED_BYTES // size)
        # the sums for the left neighbour start at this rank
        sends = [self._send(chunk) for chunk in by_owner[self._left]]
        while posted:
            owner, mine, received, work = posted.popleft()
            # the sums that this rank owns come last, and it does not forward them
            yield not incoming and owner == self.rank
            _wait(work)
            mine.add_(received)
            post(1)
            if owner != self.rank:
                sends.append(self._send(mine))
        for send in sends:
            yield True
            _wait(send)

    def _chunk_bytes(self, tensors: Sequence[OwnedTensor]) -> int:
        return chunk_bytes(sum(tensor.nbytes for _, tensor in tensors), self.world_size)

    def _send(self, chunk: Tensor) -> Work | None:
        return dist.isend(chunk, group=self.group, group_dst=self._right)

    def _owners_back_from(self, first: int) -> Iterator[int]:
        return ((first - step) % self.world_size for step in range(self.world_size))


def _wait(work: Work | None) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait()
