"""Where communication runs: on a CUDA stream of its own, or on the backend's threads for the CPU.

Owns the Channel, one independent order of communications (unshards, reductions, or all-reduces over
replicas). It decides when they may start and how a waiter waits. It issues nothing itself:
`transports.py` does. This is the last file of the package.

[Note: stream order instead of record_stream]
Every buffer that communication touches is allocated while the compute stream is current. It is
freed there too, after the compute stream has waited for the communication. The allocator therefore
reuses the buffer in compute-stream order. A communication that starts after an event recorded on
the compute stream finds the buffer unused. So `record_stream` is not needed, whose deferred frees
make peak memory depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Work(Protocol):
    """What a transport returns to wait for: a `torch.distributed.Work`, or a thread's task."""

    def wait(self) -> object: ...


class Pending:
    """Communication in flight, for the compute stream (CUDA) or this thread (CPU) to wait for.

    It is waited for once. After a part has failed, `wait` raises at every call: the buffers do not
    hold what was sent, and other parts may still write into them, so they must not be freed for
    another use. The other parts are not waited for, since each may take its own timeout.
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
            # what compute does next reads the received data
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None
        try:
            while self._error is None and self._works:
                self._works[0].wait()
                # gloo's works can be waited for only once
                self._works.popleft()
        except RuntimeError as error:
            self._error = error
        if self._error is not None:
            raise failure(self._what, self._error) from self._error


def failure(what: str, error: RuntimeError) -> RuntimeError:
    """The error to raise where `what` ended with `error`, which does not name its purpose."""
    return RuntimeError(f"{what} failed: another rank died, or timed out: {error}")


class Channel:
    """One order of communications on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, issue: Callable[[], Sequence[Work]], what: str) -> Pending:
        """Run `issue` after all that the compute stream has been given so far.

        `what` names the communication in errors.
        """
        if self._stream is None:
            try:
                return Pending(issue(), None, what)
            except RuntimeError as error:
                # gloo raises it at once on connections that an earlier failure closed
                return Pending((), None, what, error)
        # by then buffers exist and owners' rows are written
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for work in issue():
                # makes this stream wait for the backend's stream; the CPU does not wait
                work.wait()
            event = self._stream.record_event()
        return Pending((), event, what)
