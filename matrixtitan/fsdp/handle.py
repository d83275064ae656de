"""The handle of a sharded model: what `fully_shard` returns.

Owns the calls that a training script makes beside `model(...)`. Each is a few lines over the part
that does the work. Next: `hooks.py` and `unit.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from matrixtitan.fsdp.grad_norm import clip_grad_norm_
from matrixtitan.fsdp.hooks import Schedule
from matrixtitan.fsdp.roles import Decision, summary
from matrixtitan.fsdp.state_dict import gather_state_dict, load_state_dict
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing: `set_reduce_gradients(False)` inside, as before after."""
        before = self._schedule.reduce_gradients
        self._schedule.reduce_gradients = False
        try:
            yield
        finally:
            self._schedule.reduce_gradients = before

    def param_groups(self) -> list[dict[str, Any]]:
        """The trainable parameters for an optimizer, grouped by role: "matrix", then "tail".

        A group has keys "name", "params" and "param_names". Both lists are in model order and have
        the same length on every rank, because a parameter without rows on this rank is listed too.
        A role that no trainable parameter of the model has is left out.
        """
        params = {param.fqn: param for unit in self.units for param in unit.params}
        groups = []
        for role in ("matrix", "tail"):
            names = [s.fqn for s in self.plan.shards if s.role == role and s.trainable]
            tensors = [params[name].sharded for name in names]
            groups.append({"name": role, "params": tensors, "param_names": names})
        return [group for group in groups if group["params"]]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`.

        Returns the norm before scaling, equal on all ranks: see `grad_norm.py`. All ranks call
        this, since it all-reduces one scalar over the shard group. Replicas hold equal gradients.
        """
        # `.grad` is on the sharded parameters
        self.reshard()
        sharded = [param.sharded for unit in self.units for param in unit.params]
        gradients = [tensor.grad for tensor in sharded if tensor.grad is not None]
        return clip_grad_norm_(
            gradients, max_norm, self.shard_group, device=self._communication.device
        )

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """The model's state dict, for torch.distributed.checkpoint or as full tensors.

        full: False is `model.state_dict()`, with a RowSegment for each sharded parameter. True
            gives full tensors in stored dtype on the CPU of rank 0 of the first replica, and {} on
            the other ranks. All ranks must call it then. Parameters travel one at a time.
        """
        if not full:
            return self.model.state_dict()
        return gather_state_dict(self.model, self._communication, self.shard_group)

    def load_state_dict(self, state_dict: Mapping[str, Any], from_rank_0: bool = False) -> None:
        """Load a state dict of either form on all ranks.

        from_rank_0: only rank 0 of the first replica has `state_dict`, with full tensors. Rows
            travel one parameter at a time, and the other ranks' `state_dict` is not read.

        Raises ValueError where this rank's state dict has missing keys, unexpected keys or other
        shapes, and RuntimeError where another rank's has. Nothing is loaded then.
        """
        load_state_dict(self.model, state_dict, self._communication, self.shard_group, from_rank_0)

    @contextmanager
    def full_parameters(self, writeback: bool = False) -> Iterator[None]:
        """Hold all weights whole on every rank inside: to generate, evaluate or export.

        All ranks enter and leave together. A forward inside communicates nothing, so that ranks may
        run different numbers of forwards, and must run under `torch.no_grad()`. The modules hold
        whole weights in compute dtype, and `model.state_dict()` inside gives those; what is kept of
        it must be cloned, since the weights are freed at the end. Do not step an optimizer inside.
        `writeback`: write changes of the whole weights, which must be alike on all ranks, into the
        sharded parameters at the end, unless the body raises. Without it do not change weights
        inside. ValueError for `writeback` where compute dtype differs from stored dtype: all
        weights would be rounded. RuntimeError inside a forward or backward.
        """
        for unit in self.units:
            if writeback and unit.compute_dtype != unit.stored_dtype:
                raise ValueError(
                    f"full_parameters(writeback=True) would round the weights of {unit.name} from "
                    f"{unit.stored_dtype} to {unit.compute_dtype}; change the sharded parameters, "
                    "or load a state dict, instead"
                )
        self._schedule.gather_whole(writeback)
        try:
            yield
            if writeback:
                for unit in self.units:
                    unit.write_back()
        finally:
            self._schedule.free_whole()

    def close(self) -> None:
        """Stop the transports' threads.

        Where an error or Ctrl-C broke a step off, this does not wait for the messages in flight.
        """
        for transport in (self._communication.unshard, self._communication.reduce):
            if transport is not None:
                transport.close()
