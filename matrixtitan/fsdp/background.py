"""A thread that moves a transport's chunks while the main thread computes; gloo only.

Owns the thread and how a tensor is cut into chunks. It knows neither pieces nor groups. Next: `ring.py`.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

CHUNK_BYTES = 256 * 1024
SMALLEST_CHUNK_BYTES = 16 * 1024


def chunk_bytes(total: int, world_size: int) -> int:
    """Chunk size for an operation that moves `total` bytes; the same on every rank.

    A chunk is forwarded, or added, while the next arrives: several to a rank's share keep all links busy, and large
    ones cost fewer messages.
    """
    return min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, total // (8 * world_size)))


def chunks(tensor: Tensor, nbytes: int) -> Sequence[Tensor]:
    """Views of a 1-D tensor, at most `nbytes` each."""
    return tensor.split(max(1, nbytes // tensor.itemsize))


Steps = Iterator[bool]
"""A task's own course: it yields before each wait, True from where the next task may begin beside it."""


class Task:
    """A result to come; `wait` re-raises what the thread met."""

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps | None = steps
        self.next_may_begin = False
        self.done = threading.Event()
        self.error: BaseException | None = None

    def advance(self) -> None:
        """One step, on the thread. What it moved is not kept alive beyond the last."""
        assert self._steps is not None
        try:
            self.next_may_begin = next(self._steps)
        except BaseException as error:
            if not isinstance(error, StopIteration):
                self.error = error  # handed to the waiting thread
            self._steps = None
            self.next_may_begin = True
            self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


class Background:
    """Runs tasks in the order given, on one thread that starts with the first.

    A daemon thread, so that a dead peer cannot keep this process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, steps: Steps) -> Task:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        task = Task(steps)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        begun: deque[Task] = deque()  # the oldest goes on; the others wait after their first step
        closing = False
        while begun or not closing:
            while not closing and (not begun or begun[-1].next_may_begin):
                try:
                    task = self._tasks.get(block=not begun)
                except queue.Empty:
                    break
                if task is None:
                    closing = True
                else:
                    task.advance()
                    begun.append(task)
                    del task  # else it would live until the next one comes
            while begun and begun[0].done.is_set():
                begun.popleft()
            if begun:
                begun[0].advance()
