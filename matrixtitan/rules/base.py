"""What an optimizer's rule declares: options, state, price, and the class that carries it out.

The config reads the options, the planner the price and the bytes of the state, the checkpoints
which state follows a parameter's rows. Imports no torch. Next: `muon.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

from matrixtitan.options import Options

Shape = tuple[int, ...]
FLOAT32_BYTES = 4


class StateSpec(NamedTuple):
    """One tensor of a parameter's optimizer state.

    `per_row`: dim 0 runs over the parameter's rows, so that for a parameter cut between ranks it is
    a chunk of the whole state. Otherwise every holder has all of it. `dtype`: "param" is the
    parameter's own. `fill`: what it holds before the first step ("eye": identities).
    """

    shape: Shape
    per_row: bool
    dtype: Literal["param", "float32", "int64"] = "param"
    fill: Literal["zeros", "eye"] = "zeros"


@dataclass(frozen=True)
class Rule(Options):
    """The options of one rule for the hidden matrices, and what follows from them."""

    name: ClassVar[str]
    """What `optimizer.name` calls it."""
    optimizer: ClassVar[str]
    """Where its torch.optim.Optimizer is, as "module:Class"."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """The class's keyword arguments besides its parameter groups, lr and weight_decay."""

    @abstractmethod
    def state(self, shape: Shape) -> dict[str, StateSpec]:
        """The state of a matrix (R, C) or of a stack of them (E, R, C), by name."""

    @abstractmethod
    def flops(self, rows: int, cols: int) -> int:
        """FLOPs of a step on one matrix (R, C). Work done every n steps counts as 1/n a step."""

    def head_patterns(self) -> tuple[str, ...]:
        """Names of the projections whose heads it steps as matrices of their own."""
        return ()

    @property
    def keeps_float32(self) -> bool:
        """Whether its state is float32 whatever the parameters are stored in."""
        return any(spec.shape and spec.dtype == "float32" for spec in self.state((1, 1)).values())

    def state_bytes(self, rows: int, cols: int, param_bytes: int) -> int:
        """Of one matrix (R, C) of elements of `param_bytes`; step counters are not counted."""
        return sum(
            prod(spec.shape) * (param_bytes if spec.dtype == "param" else FLOAT32_BYTES)
            for spec in self.state((rows, cols)).values()
            if spec.shape
        )


def check_betas(name: str, betas: Sequence[float]) -> list[str]:
    """What is wrong with the number of betas."""
    return [] if len(betas) == 2 else [f"{name} is {tuple(betas)}; it must hold two numbers"]
