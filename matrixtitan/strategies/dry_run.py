"""One rank of a job whose other ranks do not exist: what it keeps and how long it computes, not what it learns.

Owns what a dry run does otherwise than training: gradients are zeroed before the update, and the end reports the bytes
that the rank keeps. Wraps any strategy, on the process group that `mesh.py` makes. Next file: `../parallelize.py`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from matrixtitan.config import OptimizerConfig
from matrixtitan.log import get_logger
from matrixtitan.optim.build import Optimizers
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.strategies.base import DataParallel, InitRows

logger = get_logger()


class DryRun(DataParallel):
    """`inner` on PyTorch's fake backend. `planned_bytes` is what its plan says that this rank keeps, if it has one."""

    def __init__(self, inner: DataParallel, planned_bytes: int | None) -> None:
        self.model = inner.model
        self.plan = inner.plan
        self._inner = inner
        self._planned_bytes = planned_bytes
        logger.info(
            "dry run: memory and the time to compute are those of rank %d; losses mean nothing",
            dist.get_rank(),
        )

    def materialize(self, init_rows: InitRows | None) -> None:
        self._inner.materialize(init_rows)
        self.model = self._inner.model

    def set_reduce_gradients(self, reduce: bool) -> None:
        self._inner.set_reduce_gradients(reduce)

    def local_parameters(self) -> list[LocalParam]:
        return self._inner.local_parameters()

    def stepped_parameters(self) -> list[LocalParam]:
        return self._inner.stepped_parameters()

    def build_optimizers(self, config: OptimizerConfig) -> Optimizers:
        return self._inner.build_optimizers(config)

    def step(self, optimizers: Optimizers) -> None:
        self._inner.step(optimizers)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as `inner` does, then zero the gradients: no other rank sends anything, so their values mean nothing,
        and zeros keep every optimizer going."""
        norm = self._inner.clip_grad_norm_(max_norm)
        for param in self.stepped_parameters():
            if param.tensor.grad is not None:
                param.tensor.grad.zero_()
        return norm.zero_()

    def report(self, optimizers: Optimizers) -> str:
        """The bytes that this rank keeps, measured on its tensors (AdamW's step counters, 4 bytes a tensor, apart),
        and the bytes that the plan says."""
        weights = sum(_nbytes_here(param.tensor) for param in self.local_parameters())
        state = sum(_nbytes_here(s.tensor) for s in optimizers.state_tensors() if s.tensor.ndim)
        report = (
            f"dry run: rank {dist.get_rank()} of {dist.get_world_size()} keeps {weights:,} bytes of weights, "
            f"as many of gradients, {state:,} of optimizer state"
        )
        if self._planned_bytes is not None:
            report += f"; planned in all: {self._planned_bytes:,} bytes"
        return report

    def close(self) -> None:
        self._inner.close()


def _nbytes_here(tensor: Tensor) -> int:
    """Of this rank's part, where a DTensor's own `nbytes` is that of the whole."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
