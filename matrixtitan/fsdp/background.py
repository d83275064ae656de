"""A thread that moves a transport's chunks while the main thread computes; gloo only.

Owns the thread, and how a tensor is cut into chunks. It knows neither owners nor groups, and sends
nothing itself. Next: `streams.py`.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from math import ceil

from torch import Tensor

CHUNK_BYTES = 256 * 1024
SMALLEST_CHUNK_BYTES = 24 * 1024


def chunk_bytes(total: int, world_size: int) -> int:
    """Chunk size in bytes for an operation that moves `total` bytes; the same on every rank.

    A chunk is forwarded, or added, while the next arrives. Small chunks keep all links busy, which
    slow links need. Large chunks cost fewer messages, and so less CPU time, which fast links need.
    """
    return min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, total // (8 * world_size)))


def chunks(tensor: Tensor, nbytes: int) -> Sequence[Tensor]:
    """Views of a 1-D tensor that is not empty, of at most `nbytes` each.

    Their lengths differ by at most one element.
    """
    return tensor.tensor_split(ceil(tensor.numel() / max(1, nbytes // tensor.itemsize)))


Steps = Iterator[bool]
"""The steps of a task: it yields before each wait, and yields True once the next task may begin."""


class Task:
    """A result to come; `wait` re-raises the thread's error."""

    def __init__(self, steps: Steps) -> None:
        self.steps: Steps | None = steps
        self.next_may_begin = False
        self.done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Called on the thread. It drops the task's reference to what was moved."""
        self.steps, self.error = None, error
        self.next_may_begin = True
        self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


class Background:
    """Begins tasks in the order given, on one thread that starts with the first task.

    Where a task allows it, the next begins before it is done. After an error all other tasks fail
    with the same error, because peers would take their messages for those that were not sent.
    It is a daemon thread, so that a dead peer cannot keep this process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._open: list[Task] = []
        """Submitted, and not yet seen to be done."""

    def submit(self, steps: Steps) -> Task:
        """Queue a task. RuntimeError where an earlier one failed."""
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        task = Task(steps)
        self._open = [other for other in self._open if not other.done.is_set()]
        self._open.append(task)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """End the thread.

        Where something is still in flight, an error or Ctrl-C broke a step off, and ranks may all
        wait for each other. So this does not wait for the thread then.
        """
        if self._thread is not None:
            self._tasks.put(None)
            if all(task.done.is_set() for task in self._open):
                self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        # the oldest advances; the others wait after their first step
        begun: deque[Task] = deque()
        while True:
            while not begun or begun[-1].next_may_begin:
                try:
                    task = self._tasks.get(block=not begun)
                except queue.Empty:
                    break
                if task is None:
                    for task in begun:
                        while not task.done.is_set():
                            self._advance(task)
                    return
                begun.append(task)
                self._advance(task)
                # otherwise the task would live until the next one comes
                del task
            self._advance(begun[0])
            if begun[0].done.is_set():
                begun.popleft()

    def _advance(self, task: Task) -> None:
        """Do one step of `task`, unless it is done."""
        if task.steps is None:
            return
        try:
            if self._error is not None:
                raise self._error
            task.next_may_begin = next(task.steps)
        except StopIteration:
            task.finish(None)
        except BaseException as error:
            # the task's waiter raises it; the frames hold tensors
            traceback.clear_frames(error.__traceback__)
            # set before the task is done, so that a thread that sees it done can submit no more
            self._error = error
            task.finish(error)
