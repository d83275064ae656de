"""One parameter, sharded as optimizers see it and unsharded as modules compute with it.

Owns both nn.Parameter objects, which exist once, and the switch of a module's attribute between
them. It never communicates, and never allocates the buffers that they view (`unit.py` does).
Next: `guard.py`, what a sharded parameter refuses; `buffers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from matrixtitan.fsdp.guard import ShardedParameter
from matrixtitan.plan.shard import MatrixShard


@dataclass(frozen=True, slots=True)
class Slot:
    """A module attribute that holds a parameter. A tied parameter has several."""

    module: nn.Module
    name: str


class ShardedParam:
    """A parameter's two nn.Parameter objects, and its gradient before reduction.

    `sharded`: this rank's rows in stored dtype, shape (rows, *shape[1:]); zero rows where it owns
    none. `unsharded`: the full shape in compute dtype; it has storage only while the unit is
    gathered.
    """

    def __init__(
        self, shard: MatrixShard, slots: list[Slot], rank: int, dtype: torch.dtype, trainable: bool
    ) -> None:
        self.shard = shard
        self.slots = slots
        self.segment = shard.segment(rank)
        self.dtype = dtype
        self.trainable = trainable
        self.sharded = ShardedParameter(
            torch.empty(shard.local_shape(rank), dtype=dtype, device="meta"), shard.fqn, trainable
        )
        self.unsharded: nn.Parameter | None = None
        self._gathered: Tensor | None = None
        """The memory of `unsharded`, which outside code cannot assign."""
        self.unreduced_grad: Tensor | None = None
        """This rank's gradient, of the full shape, accumulated in reduce dtype without reducing."""

    @property
    def fqn(self) -> str:
        return self.shard.fqn

    def bind(self, sharded: Tensor, unsharded: Tensor) -> None:
        """Give both parameters their storage.

        The tensors must be aliases: see [Note: refilling does not touch autograd's version counter]
        in `buffers.py`.
        """
        self.sharded = ShardedParameter(sharded, self.fqn, self.trainable)
        self._gathered = unsharded
        self.unsharded = nn.Parameter(unsharded, requires_grad=self.trainable)
        self.use_sharded()

    def use_sharded(self) -> None:
        """Put the sharded parameter into the modules.

        Raises RuntimeError where the user's code assigned the `.data` of the unsharded parameter.
        """
        mine, now = self._gathered, self.unsharded
        if (mine is not None and now is not None) and (
            now.dtype != mine.dtype or now.data_ptr() != mine.data_ptr()
        ):
            raise RuntimeError(
                f"{self.fqn}: its .data was assigned while the parameter was gathered (by "
                "model.to(), model.bfloat16() or the like), and would be lost; convert the model "
                "before fully_shard, and copy new values into the sharded parameter in place"
            )
        for slot in self.slots:
            setattr(slot.module, slot.name, self.sharded)

    def use_unsharded(self) -> None:
        """Put the unsharded parameter into the modules.

        Raises RuntimeError where the user's code replaced the parameter or changed its
        requires_grad after `fully_shard`.
        """
        assert self.unsharded is not None
        for slot in self.slots:
            if getattr(slot.module, slot.name) is not self.sharded:
                raise RuntimeError(
                    f"{self.fqn} was replaced after fully_shard (by load_state_dict(assign=True), "
                    "module.to() or an assignment?); copy new values into the sharded parameter in "
                    "place instead"
                )
            if self.sharded.requires_grad != self.trainable:
                raise RuntimeError(
                    f"requires_grad of {self.fqn} was changed after fully_shard, which takes no "
                    "notice of it; set it before"
                )
            setattr(slot.module, slot.name, self.unsharded)

    def take_gradient(self) -> Tensor | None:
        """Return this rank's gradient, of the full shape, and drop this object's references to it.

        It includes what `keep_gradient` accumulated. It is in reduce dtype then, otherwise in
        compute dtype. None: the parameter was not used.
        """
        assert self.unsharded is not None
        grad, self.unsharded.grad = self.unsharded.grad, None
        kept, self.unreduced_grad = self.unreduced_grad, None
        if kept is None:
            return grad
        return kept if grad is None else kept.add_(grad)

    def keep_gradient(self, dtype: torch.dtype) -> None:
        """Accumulate this rank's gradient in `dtype`, the reduce dtype, without reducing it."""
        grad = self.take_gradient()
        self.unreduced_grad = None if grad is None else grad.to(dtype)


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], Any]]:
    """What `register_post_accumulate_grad_hook` added to `param`.

    PyTorch offers no public way to read the hooks. Autograd would run them, but it never sees a
    sharded parameter, so the runtime runs them when it has set `.grad`. The private attribute is
    read only here.
    """
    return list((param._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]


def has_gradient_hooks(param: Tensor) -> bool:
    """Whether `param` has gradient hooks of either kind."""
    return bool(param._backward_hooks or post_accumulate_grad_hooks(param))
