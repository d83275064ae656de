"""MatrixFSDP (`matrixtitan.fsdp`) by the interface that every strategy has.

Owns that translation alone. The optimizer step communicates nothing. Clipping all-reduces one
scalar over the shard group, since replicas hold the same gradients. Next: `fsdp/api.py`.
"""

from __future__ import annotations

from torch import Tensor

from matrixtitan.fsdp import InitRows, MatrixFSDP
from matrixtitan.optim.build import Optimizers
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.strategies.base import DataParallel


class MatrixFSDPStrategy(DataParallel):
    """A model that `fully_shard` made data-parallel; its gradients must be sums.

    `reduce_each_microbatch`: every backward reduces, so that the full gradients of only a few units
    are alive. False accumulates full gradients on every rank, and reduces once a step.
    """

    def __init__(self, runtime: MatrixFSDP, *, reduce_each_microbatch: bool = True) -> None:
        self.model = runtime.model
        self.plan = runtime.plan
        self._runtime = runtime
        self._reduce_each_microbatch = reduce_each_microbatch

    def materialize(self, init_rows: InitRows | None) -> None:
        self._runtime.materialize(init_rows)

    def set_reduce_gradients(self, reduce: bool) -> None:
        self._runtime.set_reduce_gradients(reduce or self._reduce_each_microbatch)

    def local_parameters(self) -> list[LocalParam]:
        return self._runtime.local_parameters()

    def step(self, optimizers: Optimizers) -> None:
        # a gathered copy of the old weights must not outlive the update
        self._runtime.reshard()
        optimizers.step()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return self._runtime.clip_grad_norm_(max_norm)

    def close(self) -> None:
        self._runtime.close()
