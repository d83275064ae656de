"""The ring transport: each rank receives from its left neighbour and sends to its right one, chunk by chunk.

Gloo only: receives posted ahead of their sends would deadlock NCCL. A thread of its own forwards while the main
thread computes; one transport has one thread, so its operations run in the order they were issued.

[Note: order of chunks on a link]
Unshard: rank r's link carries the pieces of owners r, r-1, ..., r+2: its own first, then what arrives, and never those
of its right neighbour. Reduction: sums of owner o's pieces start at o+1 and end at o, so rank r's link carries owners
r-1, r-2, ..., r+1. Both ends of a link derive the same list, so messages need no tags, and sums are added in ring
order: two runs give the same bits.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.fsdp.streams import Work
from matrixtitan.fsdp.transports import Piece, Transport

CHUNK_BYTES = 256 * 1024
POSTED_AHEAD = 8
"""Receives of a reduction posted before their data is needed: gloo starts sending only into a posted receive."""


class Ring(Transport):
    """Bytes on a link: S - s_(r+1) to gather, S - s_r to reduce, whatever the balance between owners."""

    name = "ring"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._left = (self.rank - 1) % self.world_size
        self._right = (self.rank + 1) % self.world_size
        self._thread: _Worker | None = None

    def unshard(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        return [self._submit(lambda: self._unshard(pieces))]

    def reduce(self, pieces: Sequence[Piece]) -> Sequence[Work]:
        return [self._submit(lambda: self._reduce(pieces))]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _submit(self, task: Callable[[], None]) -> Work:
        if self._thread is None:
            self._thread = _Worker(f"ring of rank {self.rank}")
        return self._thread.submit(task)

    def _unshard(self, pieces: Sequence[Piece]) -> None:
        chunks = _chunks_by_owner(pieces, self.world_size)
        incoming = [
            (owner, chunk)
            for owner in self._owners_back_from(self._left)
            if owner != self.rank
            for chunk in chunks[owner]
        ]
        receives = [
            dist.irecv(chunk, group=self.group, group_src=self._left) for _, chunk in incoming
        ]
        sends = [self._send(chunk) for chunk in chunks[self.rank]]
        for (owner, chunk), receive in zip(incoming, receives, strict=True):
            _wait(receive)
            if owner != self._right:
                sends.append(self._send(chunk))
        for send in sends:
            _wait(send)

    def _reduce(self, pieces: Sequence[Piece]) -> None:
        chunks = _chunks_by_owner(pieces, self.world_size)
        sends = [self._send(chunk) for chunk in chunks[self._left]]  # sums that start here
        incoming = iter(
            [
                (owner, mine)
                for owner in self._owners_back_from((self.rank - 2) % self.world_size)
                if owner != self._left
                for mine in chunks[owner]
            ]
        )
        posted: deque[tuple[int, Tensor, Tensor, Work | None]] = deque()

        def post(count: int) -> None:
            for owner, mine in islice(incoming, count):
                space = torch.empty_like(mine)
                posted.append(
                    (owner, mine, space, dist.irecv(space, group=self.group, group_src=self._left))
                )

        post(POSTED_AHEAD)
        while posted:
            owner, mine, received, work = posted.popleft()
            _wait(work)
            mine.add_(received)
            post(1)
            if owner != self.rank:
                sends.append(self._send(mine))
        for send in sends:
            _wait(send)

    def _send(self, chunk: Tensor) -> Work | None:
        return dist.isend(chunk, group=self.group, group_dst=self._right)

    def _owners_back_from(self, first: int) -> Iterator[int]:
        return ((first - step) % self.world_size for step in range(self.world_size))


def _chunks_by_owner(pieces: Sequence[Piece], world_size: int) -> list[list[Tensor]]:
    chunks: list[list[Tensor]] = [[] for _ in range(world_size)]
    for owner, tensor in pieces:
        chunks[owner] += tensor.split(max(1, CHUNK_BYTES // tensor.itemsize))
    return chunks


def _wait(work: Work | None) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait()


class _Task:
    """A result to come; `wait` re-raises what the thread met."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


class _Worker:
    """One thread that runs tasks in order. A daemon, so that a dead peer cannot keep this process from ending."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], None]) -> _Task:
        task = _Task(run)
        self._tasks.put(task)
        return task

    def stop(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.run()
            except BaseException as error:  # handed to the waiting thread
                task.error = error
            task.done.set()
