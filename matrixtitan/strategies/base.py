"""What the trainer, the checkpointer and the optimizers see of a data-parallel strategy.

One small interface, so that every rival runs in the same trainer with the same data, optimizers and checkpoints.
`parallelize.py` picks the implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from matrixtitan.config import OptimizerConfig
from matrixtitan.optim.build import Optimizers, build_optimizers
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.shard import Plan

InitRows = Callable[[str, tuple[int, ...], int, Tensor], None]
"""(fqn, full_shape, start, out): fill `out` with rows [start, start + len(out)) of the parameter's initial value."""


class DataParallel(ABC):
    """A model made data-parallel. Gradients are summed over ranks (the loss is already divided by global tokens)."""

    model: nn.Module
    """Call it: `model(tokens, labels)`. Parameter names have no wrapper prefixes in `local_parameters()`."""

    plan: Plan | None = None
    """Who owns what; None where a strategy has no owners."""

    @abstractmethod
    def materialize(self, init_rows: InitRows | None) -> None:
        """Allocate this rank's weights on the device and fill them; None leaves them unset, for a load."""

    @abstractmethod
    def set_reduce_gradients(self, reduce: bool) -> None:
        """Before a microbatch's forward: False accumulates its gradients without reducing them yet."""

    @abstractmethod
    def local_parameters(self) -> list[LocalParam]:
        """The weights that this rank saves and loads."""

    def stepped_parameters(self) -> list[LocalParam]:
        """The trainable weights that this rank's optimizers step; none is a valid answer."""
        return [param for param in self.local_parameters() if param.trainable]

    def build_optimizers(self, config: OptimizerConfig) -> Optimizers:
        return build_optimizers(self.stepped_parameters(), config)

    def step(self, optimizers: Optimizers) -> None:
        """The optimizer step with whatever communication the strategy needs around it; ours needs none."""
        optimizers.step()

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip all gradients to a global norm; return the norm before clipping (a float32 scalar)."""

    def report(self, optimizers: Optimizers) -> str | None:
        """What the log shall say of this rank when training ends, or None."""
        return None

    def close(self) -> None:  # noqa: B027  # most strategies have nothing to end
        """End what runs in the background."""
