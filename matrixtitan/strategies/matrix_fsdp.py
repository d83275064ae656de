"""Ours: `matrixtitan.fsdp` seen through the interface that every strategy has.

Owns only that translation; what happens when is in `matrixtitan/fsdp/`. The optimizer step communicates nothing, and
clipping all-reduces one scalar over the shard group (replicas hold the same gradients). Next file: `fsdp/api.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matrixtitan.fsdp import MatrixFSDP
from matrixtitan.optim.build import Optimizers
from matrixtitan.optim.grad_norm import clip_grad_norm_
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.strategies.base import DataParallel, InitRows


class MatrixFSDPStrategy(DataParallel):
    """`runtime` must sum gradients. `reduce_each_microbatch` reduces after each backward, so that only a few
    units' full gradients are alive; otherwise full gradients accumulate on every rank and are reduced once a step."""

    def __init__(
        self, runtime: MatrixFSDP, device: torch.device, *, reduce_each_microbatch: bool = True
    ) -> None:
        self.model = runtime.model
        self.plan = runtime.plan
        self._runtime = runtime
        self._device = device
        self._reduce_each_microbatch = reduce_each_microbatch

    def materialize(self, init_rows: InitRows | None) -> None:
        self._runtime.materialize(init_rows)

    def set_reduce_gradients(self, reduce: bool) -> None:
        self._runtime.set_reduce_gradients(reduce or self._reduce_each_microbatch)

    def local_parameters(self) -> list[LocalParam]:
        return self._runtime.local_parameters()

    def step(self, optimizers: Optimizers) -> None:
        self._runtime.reshard()  # a gathered copy of the old weights must not outlive the update
        optimizers.step()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        self._runtime.reshard()  # `.grad` is on the sharded parameters
        gradients = [p.tensor.grad for p in self.stepped_parameters() if p.tensor.grad is not None]
        return clip_grad_norm_(gradients, max_norm, self._runtime.shard_group, device=self._device)

    def close(self) -> None:
        self._runtime.close()
