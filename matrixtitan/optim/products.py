"""What Newton-Schulz asks of a device: its matrix products, which form a shape takes, and how many make a batch.

The classes here are for GPUs and for anything else without a backend of its own; CPUs have theirs in `cpu/`.
Next: `newton_schulz.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Products:
    """Matrix products as torch computes them, of matrices (R, C), R <= C, or of batches (B, R, C).

    Every (R, R) operand is a polynomial of one Gram matrix. All of them commute, so `gram` and `combine` have symmetric
    results: a backend may compute half of each. No input is changed.
    """

    def operand(self, x: Tensor) -> Tensor:
        """x (..., R, C) in the layout that the products want."""
        return x

    def gram(self, x: Tensor) -> Tensor:
        """X X^T (..., R, R)."""
        return torch.mm(x, x.mT) if x.ndim == 2 else torch.bmm(x, x.mT)

    def combine(
        self, add: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0
    ) -> Tensor:
        """beta add + alpha left @ right, all (..., R, R)."""
        addmm = torch.addmm if left.ndim == 2 else torch.baddbmm
        return addmm(add, left, right, beta=beta, alpha=alpha)

    def apply(self, poly: Tensor, x: Tensor) -> Tensor:
        """poly (..., R, R) @ x (..., R, C), in the layout of x.

        A parameter adds a transposed one several times slower.
        """
        mm = torch.mm if x.ndim == 2 else torch.bmm
        return mm(poly, x, out=torch.empty_like(x))


WHOLE = Products()


class Choice(NamedTuple):
    """How a shape is iterated on."""

    form: Literal["standard", "gram"]
    products: Products


class Backend:
    """Choices by FLOPs alone."""

    batch_elements = 1 << 24
    """Small products share a kernel's launch; large ones fill a GPU alone. The limit between them is not measured."""

    def choose(self, x: Tensor) -> Choice:
        """For x (..., R, C), R <= C.

        In units of 2 R^3, five steps take 5 (2 C/R + 1) in the standard form and 14 + 4 C/R in the Gram form, which
        therefore wins from C/R of 1.5.
        """
        return Choice("gram" if x.size(-1) > 1.5 * x.size(-2) else "standard", WHOLE)

    def batch_size(self, rows: int, cols: int) -> int:
        """How many matrices (rows, cols) to multiply as one batch, 1 for alone."""
        return max(1, self.batch_elements // max(1, rows * cols))
