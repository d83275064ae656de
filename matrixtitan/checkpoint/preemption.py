"""Pre-emption: a signal says that the job will be killed soon; all ranks save and end together.

The handler only sets a flag. The training loop asks whether any rank received a signal: after each
step, between the batches of a validation, and after a save. torchrun passes SIGTERM on to its
workers (and SIGUSR1 if --signals-to-handle names it), then kills them after 30 s. Without
checkpoint.enable there is nothing to save, and the signals end the run at once.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Handles SIGTERM and SIGUSR1 of this process until `close`. Make it in the main thread."""

    def __init__(self) -> None:
        self.received = False
        self._previous: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in SIGNALS
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def agreed(self, group: dist.ProcessGroup) -> bool:
        """Whether any rank received a signal. Collective: one tiny all-reduce on a gloo group."""
        told = torch.tensor([int(self.received)], dtype=torch.int32)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return bool(told.item())

    def close(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
