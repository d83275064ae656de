"""What Shampoo declares. The mathematics is in `optim/shampoo.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from matrixtitan.options import Needs, key
from matrixtitan.plan.cost import ADAMW_FLOPS
from matrixtitan.rules.base import Rule, Shape, StateSpec, check_betas

EIGH_FLOPS = 9
"""n^3 of a symmetric eigendecomposition with vectors.
Golub & Van Loan, Matrix Computations, 8.3."""


@dataclass(frozen=True)
class ShampooRule(Rule):
    name = "shampoo"
    optimizer = "matrixtitan.optim.shampoo:Shampoo"

    betas: tuple[float, ...] = key(
        (0.95, 0.95),
        "decay of the averaged gradient (0: none is kept) and of the factors (1: plain sums)",
        low=0,
        high=1,
    )
    eps: float = key(1e-8, "added to the factors' spectra before the roots", low=0)
    precondition_frequency: int = key(10, "steps between new roots", low=1)
    start_preconditioning_step: int = key(
        10, "until then the grafted method runs alone; -1: precondition_frequency"
    )
    max_precond_dim: int = key(8192, "a longer side is cut into blocks", low=1)
    graft: Literal["adam", "none"] = key("adam", "whose step size the update takes")
    graft_beta: float = key(
        0.95,
        "decay of the grafted method's second moment",
        low=0,
        high=1,
        needs=Needs("graft", ("adam",)),
    )
    graft_eps: float = key(
        1e-8, "epsilon of the grafted method", low=0, needs=Needs("graft", ("adam",))
    )
    stagger: bool = key(True, "spread the matrices' refreshes over the steps")

    def problems(self) -> Iterator[str]:
        yield from check_betas("betas", self.betas)
        if self.betas and self.betas[0] == 1:
            yield "betas holds 1.0 first; the averaged gradient's decay must be below 1"
        yield from super().problems()

    def arguments(self) -> dict[str, Any]:
        adam = ("adam", self.graft_beta, self.graft_eps)
        return {
            "betas": self.betas,
            "eps": self.eps,
            "max_precond_dim": self.max_precond_dim,
            "precondition_frequency": self.precondition_frequency,
            "start_preconditioning_step": self.start_preconditioning_step,
            "graft": adam if self.graft == "adam" else None,
            "stagger": self.stagger,
        }

    def state(self, shape: Shape) -> dict[str, StateSpec]:
        """A factor and its inverse root for each side of each block, and the averages kept."""
        state = {"step": StateSpec((), per_row=False, dtype="int64")}
        if self.betas[0] > 0:
            state["exp_avg"] = StateSpec(shape, per_row=True, dtype="float32")
        if self.graft == "adam":
            state["graft_avg_sq"] = StateSpec(shape, per_row=True, dtype="float32")
        *stack, rows, cols = shape
        for tile in tiles(rows, cols, self.max_precond_dim):
            for side, size in (("left", tile.rows), ("right", tile.cols)):
                square, per_row = (*stack, size, size), bool(stack)
                state[f"{side}_factor{tile.suffix}"] = StateSpec(square, per_row, "float32")
                state[f"{side}_root{tile.suffix}"] = StateSpec(square, per_row, "float32", "eye")
        return state

    def flops(self, rows: int, cols: int) -> int:
        """Each step updates the factors and multiplies by their roots.

        A refresh is an eigendecomposition and a product for each factor.
        """
        sides = [
            (side, tile.rows * tile.cols)
            for tile in tiles(rows, cols, self.max_precond_dim)
            for side in (tile.rows, tile.cols)
        ]
        refresh = (EIGH_FLOPS + 2) * sum(side**3 for side, _ in sides)
        product = sum(2 * numel * side for side, numel in sides)
        step = ADAMW_FLOPS * rows * cols + 2 * product
        return step + refresh // self.precondition_frequency


class Tile(NamedTuple):
    """A block of a matrix that has factors of its own. `suffix` is the end of their names."""

    top: int
    left: int
    rows: int
    cols: int
    suffix: str


def tiles(rows: int, cols: int, longest: int) -> Iterator[Tile]:
    """The blocks of a matrix, row by row; one where no side is longer than `longest`."""
    if max(rows, cols) <= longest:
        yield Tile(0, 0, rows, cols, "")
        return
    for top in range(0, rows, longest):
        for left in range(0, cols, longest):
            suffix = f".{top // longest}.{left // longest}"
            yield Tile(top, left, min(longest, rows - top), min(longest, cols - left), suffix)
