"""Full weights on every rank; one rank steps each matrix and sends the result to the others.

Owns the assignment of matrices to ranks, and the broadcasts after the step. Forward and backward
are those of DistributedDataParallel. The optimizer state of a matrix lives on its owner only. Every
rank steps the whole tail. Next: `ddp.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from matrixtitan.config import OptimizerConfig
from matrixtitan.optim.build import Optimizers
from matrixtitan.plan.cost import CostSettings, block_cost
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.rules import Rule
from matrixtitan.strategies.ddp import DDP
from matrixtitan.strategies.matrix_exchange import assign_owners


class Zero1Owner(DDP):
    """ZeRO-1 whose optimizer state is cut between matrices. Its arguments are those of DDP.

    `owner_of` maps each matrix's fqn to its owner's group rank, once the optimizers are built.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        group = self._group or dist.group.WORLD
        if group is None:
            raise RuntimeError(
                "zero1_owner needs a process group: call dist.init_process_group first"
            )
        self._owner_group = group
        self.owner_of: dict[str, int] = {}

    def build_optimizers(self, config: OptimizerConfig) -> Optimizers:
        self.owner_of = owners_of(self._specs.values(), config.rule, self._owner_group.size())
        return super().build_optimizers(config)

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


def owners_of(specs: Iterable[ParamSpec], rule: Rule, ranks: int) -> dict[str, int]:
    """By fqn, the owner of each trained matrix; balances the FLOPs of `rule`."""
    settings = CostSettings(rule=rule)
    costs = [
        (spec.fqn, spec.shape[0] // spec.block_rows * block_cost(spec, settings).flops)
        for spec in specs
        if spec.role == "matrix" and spec.trainable
    ]
    owners = assign_owners(costs, ranks)
    return {fqn: owner for (fqn, _), owner in zip(costs, owners, strict=True)}
