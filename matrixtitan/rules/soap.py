"""What SOAP declares. The mathematics is in `optim/soap.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matrixtitan.options import key
from matrixtitan.plan.cost import ADAMW_FLOPS
from matrixtitan.rules.base import Rule, Shape, StateSpec, check_betas


@dataclass(frozen=True)
class SOAPRule(Rule):
    name = "soap"
    optimizer = "matrixtitan.optim.soap:SOAP"

    betas: tuple[float, ...] = key((0.95, 0.95), "decay of the moments", low=0, below=1)
    eps: float = key(1e-8, "added to the root of the second moment", low=0)
    shampoo_beta: float = key(-1.0, "decay of the factors; negative: the second beta", below=1)
    precondition_frequency: int = key(10, "steps between new eigenbases", low=1)
    max_precond_dim: int = key(8192, "a longer side has no preconditioner", low=1)
    stagger: bool = key(True, "spread the matrices' refreshes over the steps")

    def problems(self) -> Iterator[str]:
        yield from check_betas("betas", self.betas)
        yield from super().problems()

    def arguments(self) -> dict[str, Any]:
        return {
            "betas": self.betas,
            "shampoo_beta": self.shampoo_beta,
            "eps": self.eps,
            "precondition_frequency": self.precondition_frequency,
            "max_precond_dim": self.max_precond_dim,
            "stagger": self.stagger,
        }

    def state(self, shape: Shape) -> dict[str, StateSpec]:
        state = {
            "step": StateSpec((), per_row=False, dtype="int64"),
            "exp_avg": StateSpec(shape, per_row=True, dtype="float32"),
            "exp_avg_sq": StateSpec(shape, per_row=True, dtype="float32"),
        }
        *stack, rows, cols = shape
        for side, size in (("left", rows), ("right", cols)):
            if size <= self.max_precond_dim:
                for name in (f"{side}_factor", f"{side}_basis"):
                    state[name] = StateSpec((*stack, size, size), bool(stack), "float32")
        return state

    def flops(self, rows: int, cols: int) -> int:
        """Each step updates the factors and changes basis three times (gradient, moment, update).

        A refresh is a power iteration, its sorting diagonal, a QR (8/3 n^3) and the moment's new
        basis.
        """
        sides = [side for side in (rows, cols) if side <= self.max_precond_dim]
        cubes = sum(side**3 for side in sides)
        product = sum(2 * rows * cols * side for side in sides)
        refresh = 4 * cubes + 8 * cubes // 3 + 2 * product
        step = ADAMW_FLOPS * rows * cols + 4 * product
        return step + refresh // self.precondition_frequency
