"""Pre-emption: a cluster says by signal that the job will be killed soon, and all ranks end
together after a save.

The handler only sets a flag; the training loop asks after each step, between a validation's batches
and after a save whether any rank was told. torchrun passes SIGTERM on to its workers (and SIGUSR1
where --signals-to-handle names it), then kills them after 30 s."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Takes over SIGTERM and SIGUSR1 of this process until `close`. Make it in the main thread."""

    def __init__(self) -> None:
        self.received = False
        self._previous: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in SIGNALS
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def agreed(self, group: dist.ProcessGroup) -> bool:
        """Collective, one tiny all-reduce on a gloo group: True on all ranks if any rank was told."""
        told = torch.tensor([int(self.received)], dtype=torch.int32)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return bool(told.item())

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
