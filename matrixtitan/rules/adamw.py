"""AdamW, elementwise: for matrices as a baseline, and for everything that is not one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matrixtitan.options import key
from matrixtitan.plan.cost import ADAMW_FLOPS
from matrixtitan.rules.base import Rule, Shape, StateSpec, check_betas


@dataclass(frozen=True)
class AdamWRule(Rule):
    name = "adamw"
    optimizer = "torch.optim:AdamW"

    betas: tuple[float, ...] = key((0.95, 0.95), "decay of the moments", low=0, below=1)
    eps: float = key(1e-8, "added to the root of the second moment", low=0)

    def problems(self) -> Iterator[str]:
        yield from check_betas("betas", self.betas)
        yield from super().problems()

    def arguments(self) -> dict[str, Any]:
        return {"betas": (self.betas[0], self.betas[1]), "eps": self.eps}

    def state(self, shape: Shape) -> dict[str, StateSpec]:
        """As torch's AdamW keeps it, of a parameter of any shape."""
        return {
            "step": StateSpec((), per_row=False, dtype="float32"),
            "exp_avg": StateSpec(shape, per_row=True),
            "exp_avg_sq": StateSpec(shape, per_row=True),
        }

    def flops(self, rows: int, cols: int) -> int:
        return ADAMW_FLOPS * rows * cols
