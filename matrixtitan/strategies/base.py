"""What the trainer, the checkpointer and the optimizers see of a data-parallel strategy.

Owns the interface. It is small, so that every strategy runs in the same trainer with the same data,
optimizers and checkpoints. `parallelize.py` picks the implementation. Next: `matrix_fsdp.py`, ours;
then `fsdp2.py`, `zero1_owner.py` and `ddp.py`, to compare with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from matrixtitan.config import OptimizerConfig
from matrixtitan.fsdp import InitRows
from matrixtitan.optim.build import Optimizers, build_optimizers
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.shard import Plan


class DataParallel(ABC):
    """A model made data-parallel by one of the strategies (this is not torch.nn.DataParallel).

    Gradients are summed over ranks, never averaged: the loss is already divided by the global
    number of tokens.
    """

    model: nn.Module
    """Call it as `model(tokens, labels)`."""

    plan: Plan | None = None
    """Who owns what; None where a strategy has no owners."""

    @abstractmethod
    def materialize(self, init_rows: InitRows | None) -> None:
        """Allocate this rank's weights on the device and fill them.

        None leaves them unset, for a checkpoint to be loaded into. Called once, before training.
        """

    @abstractmethod
    def set_reduce_gradients(self, reduce: bool) -> None:
        """Called before a microbatch's forward: True for the last microbatch of a step.

        False: its gradients may be accumulated without being reduced yet.
        """

    @abstractmethod
    def local_parameters(self) -> list[LocalParam]:
        """The weights that this rank saves and loads, by names without a wrapper's prefix."""

    def stepped_parameters(self) -> list[LocalParam]:
        """The trainable weights that this rank's optimizers step; there may be none."""
        return [param for param in self.local_parameters() if param.trainable]

    def build_optimizers(self, config: OptimizerConfig) -> Optimizers:
        """The optimizers of this rank's `stepped_parameters`."""
        return build_optimizers(self.stepped_parameters(), config)

    def step(self, optimizers: Optimizers) -> None:
        """Step the optimizers, with the communication that the strategy needs around it.

        matrix_fsdp needs none.
        """
        optimizers.step()

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip all gradients to a global norm; return the norm before, a float32 scalar."""

    def report(self, optimizers: Optimizers) -> str | None:
        """What the log says of this rank when training ends; None: nothing."""
        return None

    def close(self) -> None:  # noqa: B027 - most strategies have nothing to end
        """End what runs in the background."""
