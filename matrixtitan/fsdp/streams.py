"""Where communication runs: a CUDA stream of its own, or the backend's worker threads on the CPU.

A Channel is one independent order of communications (unshards, reductions, replica all-reduces). It decides when they
may start and how a waiter waits; it issues nothing itself (`transports.py` does).

[Note: stream order instead of record_stream]
Every buffer that communication touches is allocated while the compute stream is current, and freed there too, after
the compute stream has waited for the communication. The allocator therefore reuses it in compute-stream order, and a
communication that starts after an event recorded on the compute stream sees it unused. No `record_stream` is needed,
whose deferred frees make peak memory depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Work(Protocol):
    """What a transport returns: something to wait for (a `torch.distributed.Work`, or a thread's result)."""

    def wait(self) -> object: ...


class Pending:
    """Communication in flight. `wait` makes the compute stream (CUDA) or this thread (CPU) wait for it, once.

    Once a part of it failed, `wait` raises at every call: what the buffers hold is not what was sent, and other parts
    may still be written into them, so they must not be freed for another use. Those are not waited for, since each
    may time out for itself.
    """

    def __init__(
        self,
        works: Sequence[Work],
        event: torch.cuda.Event | None,
        what: str,
        error: RuntimeError | None = None,
    ) -> None:
        self._works = deque(works)
        self._event = event
        self._what = what
        self._error = error

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(
                self._event
            )  # what comes next reads the received data
            self._event = None
        try:
            while self._error is None and self._works:
                self._works[0].wait()
                self._works.popleft()  # once is all that gloo's can be waited for
        except RuntimeError as error:
            self._error = error
        if self._error is not None:
            raise failure(self._what, self._error) from self._error


def failure(what: str, error: RuntimeError) -> RuntimeError:
    """What to raise where a communication ended with `error`, whose own text says nothing of its purpose."""
    return RuntimeError(f"{what} failed: another rank died, or timed out: {error}")


class Channel:
    """One order of communications on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, issue: Callable[[], Sequence[Work]], what: str) -> Pending:
        """Run `issue` after all that the compute stream has been given so far; `what` names it in errors."""
        if self._stream is None:
            try:
                return Pending(issue(), None, what)
            except RuntimeError as error:  # gloo's, on connections that an earlier failure closed
                return Pending((), None, what, error)
        self._stream.wait_stream(
            torch.cuda.current_stream()
        )  # buffers exist, owners' rows are written
        with torch.cuda.stream(self._stream):
            for work in issue():
                work.wait()  # makes this stream wait for the backend's own, not the CPU
            event = self._stream.record_event()
        return Pending((), event, what)
