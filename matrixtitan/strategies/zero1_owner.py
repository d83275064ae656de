"""Full weights on every rank; one rank steps each matrix and sends the result to the others.

Owns the assignment of matrices to ranks, and the broadcasts after the step. Forward and backward
are those of DistributedDataParallel. The optimizer state of a matrix lives on its owner only. Every
rank steps the whole tail. Next: `ddp.py`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from matrixtitan.optim.build import Optimizers
from matrixtitan.plan.cost import matrices_in_block, newton_schulz_flops
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.strategies.ddp import DDP
from matrixtitan.strategies.matrix_exchange import assign_owners


class Zero1Owner(DDP):
    """ZeRO-1 whose optimizer state is cut between matrices. Its arguments are those of DDP.

    `owner_of` maps each matrix's fqn to its owner's group rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        group = self._group or dist.group.WORLD
        if group is None:
            raise RuntimeError(
                "zero1_owner needs a process group: call dist.init_process_group first"
            )
        self._owner_group = group
        matrices = [
            spec for spec in self._specs.values() if spec.role == "matrix" and spec.trainable
        ]
        owners = assign_owners(
            [(spec.fqn, _flops(spec)) for spec in matrices], self._owner_group.size()
        )
        self.owner_of = {spec.fqn: owner for spec, owner in zip(matrices, owners, strict=True)}

    def stepped_parameters(self) -> list[LocalParam]:
        rank = self._owner_group.rank()
        return [
            param
            for param in super().stepped_parameters()
            if self.owner_of.get(param.fqn, rank) == rank
        ]

    def step(self, optimizers: Optimizers) -> None:
        optimizers.step()
        works = [
            dist.broadcast(
                param.tensor.detach(), group=self._owner_group, group_src=owner, async_op=True
            )
            for param in self.local_parameters()
            if (owner := self.owner_of.get(param.fqn)) is not None
        ]
        for work in works:
            assert work is not None, "this rank is not in the group"
            work.wait()


def _flops(spec: ParamSpec) -> int:
    count, rows, cols = matrices_in_block(spec)
    return spec.shape[0] // spec.block_rows * count * newton_schulz_flops(rows, cols)
