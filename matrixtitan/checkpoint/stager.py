"""Copies of a rank's tensors in host memory, from which a background save writes.

Training can change the originals meanwhile. The memory of the copies is kept from one save to the
next, since allocating pages costs more than copying. So asynchronous saving needs host memory for
one copy of the rank's weights and optimizer state. Next: `checkpointer.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matrixtitan.checkpoint.state import Tensors
from matrixtitan.fsdp.row_segment import RowSegment


class HostStager:
    """Makes the copies. With `pinned`, copies from the GPU overlap with training's kernels.

    Without, the copies are complete when `stage` returns.
    """

    def __init__(self, pinned: bool) -> None:
        if pinned and not torch.cuda.is_available():
            raise ValueError(
                'checkpoint.async_mode = "async_with_pinned_mem" needs CUDA, and there is none '
                'here; use "async"'
            )
        self._pinned = pinned
        self._stream = torch.cuda.Stream() if pinned else None
        self._copied: torch.cuda.Event | None = None
        self._buffers: dict[str, Tensor] = {}

    def stage(self, tensors: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """Copies of `tensors` under the same keys, and a function that waits until they are
        complete.

        Call `before_change` before anything changes the originals. The next call overwrites the
        copies.
        """
        if self._stream is None:
            return self._copy_all(tensors), _complete
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            staged = self._copy_all(tensors)
            self._copied = self._stream.record_event()
        return staged, self._copied.synchronize

    def before_change(self) -> None:
        """Make the current stream wait for copies under way."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def _copy_all(self, tensors: Tensors) -> Tensors:
        staged = {key: self._copy(key, tensor) for key, tensor in tensors.items()}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in staged}
        return staged

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        source = tensor.rows if isinstance(tensor, RowSegment) else tensor
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pinned)
            self._buffers[key] = buffer
        buffer.copy_(source, non_blocking=self._pinned)
        return (
            RowSegment(buffer, tensor.shape, tensor.start)
            if isinstance(tensor, RowSegment)
            else buffer
        )


def _complete() -> None:
    return None
