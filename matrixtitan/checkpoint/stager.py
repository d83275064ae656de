"""Copies of a rank's tensors in host memory, which a background save can write while training changes the originals.

The copies' memory is kept from one save to the next: fresh pages cost more than the copy itself. So asynchronous
saving holds one copy of the rank's weights and optimizer state in host memory. Next file: `checkpointer.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matrixtitan.checkpoint.row_segment import RowSegment
from matrixtitan.checkpoint.state import Tensors


class HostStager:
    """`pinned` copies from the GPU run beside training's kernels; others are complete when `stage` returns."""

    def __init__(self, pinned: bool) -> None:
        if pinned and not torch.cuda.is_available():
            raise ValueError(
                'checkpoint.async_mode = "async_with_pinned_mem" needs CUDA, and there is none here; use "async"'
            )
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}

    def stage(self, tensors: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """Copies of `tensors` under the same keys, and a function that waits until they are complete.

        Training may change the originals at once: pinned copies are queued on the current stream before whatever
        changes them. The copies are overwritten by the next call.
        """
        staged = {key: self._copy(key, tensor) for key, tensor in tensors.items()}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in staged}
        if not self._pinned:
            return staged, _complete
        copied = torch.cuda.Event()
        copied.record()
        return staged, copied.synchronize

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
