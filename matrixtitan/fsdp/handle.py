"""The handle of a sharded model: what `fully_shard` returns.

Owns the calls that a training script makes beside `model(...)`. Each is a few lines over the part
that does the work. Next: `hooks.py` and `unit.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from matrixtitan.fsdp.hooks import Schedule
from matrixtitan.fsdp.roles import Decision, summary
from matrixtitan.fsdp.unit import Communication, InitRows, Unit
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.matrix_form import MatrixForm
from matrixtitan.plan.shard import Plan


class MatrixFSDP:
    """The handle of a sharded model, which is called as before.

    Between steps `model.parameters()` are this rank's rows.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: list[Unit],
        schedule: Schedule,
        communication: Communication,
        shard_group: dist.ProcessGroup | None,
        decisions: Mapping[str, Decision],
    ) -> None:
        self.model = model
        self.plan = plan
        self.units = units
        self.rank = communication.rank
        self.shard_group = shard_group
        """Ranks that share one copy of the weights; None for a single process."""
        self._schedule = schedule
        self._communication = communication
        self._decisions = decisions
        """What the roles in the plan follow from; empty where the caller gave the plan."""

    def materialize(self, init_rows: InitRows | None = None) -> None:
        """Allocate this rank's weights; `init_rows(fqn, full_shape, start, out)` fills them.

        Needed once after sharding a model that was built on the meta device, before optimizers are
        made. None leaves zeros, for a checkpoint to be loaded into.
        """
        for unit in self.units:
            unit.materialize(init_rows)

    def set_reduce_gradients(self, reduce: bool) -> None:
        """Choose whether the next backwards reduce their gradients; they do unless told otherwise.

        False: they accumulate full gradients on every rank, in reduce dtype. The first backward
        after True reduces the sum.
        """
        self._schedule.reduce_gradients = reduce

    def reshard(self) -> None:
        """Free the weights of every gathered unit now."""
        self._schedule.reshard()

    def local_parameters(self) -> list[LocalParam]:
        """The rows that this rank owns, in model order."""
        params = {param.fqn: param for unit in self.units for param in unit.params}
        decisions = self._decisions
        return [
            LocalParam(
                fqn=shard.fqn,
                tensor=params[shard.fqn].sharded,
                full_shape=shard.shape,
                role=shard.role,
                block_rows=shard.block_rows,
                start=segment.start,
                trainable=shard.trainable,
                form=decision.form if (decision := decisions.get(shard.fqn)) else MatrixForm(),
            )
            for shard in self.plan.shards
            if (segment := shard.segment(self.rank)) is not None
        ]

    def summary(self) -> str:
        """The units, matrices and tails of the model, as text; `print` shows the same."""
        return summary(self.plan, [unit.name for unit in self.units], self._decisions)

    __str__ = summary

    def close(self) -> None:
        """Stop the transports' threads.

        Where an error or Ctrl-C broke a step off, this does not wait for the messages in flight.
        """
        for transport in (self._communication.unshard, self._communication.reduce):
            if transport is not None:
                transport.close()
