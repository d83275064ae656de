"""The matrix products that Newton-Schulz is made of, and the choice that it makes for a shape.

`Products` are torch's own, for GPUs and for whatever has no faster ones. CPUs have faster ones in
`cpu/`. Next: `newton_schulz.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Products:
    """Products of matrices (R, C), R <= C, or of batches of them (B, R, C). No input is changed.

    Every (R, R) operand is a polynomial of one Gram matrix. Such polynomials commute, so the
    results of `gram` and `combine` are symmetric: a subclass may compute half of each.
    """

    def operand(self, x: Tensor) -> Tensor:
        """x (..., R, C) in the layout that the other methods want."""
        return x

    def gram(self, x: Tensor) -> Tensor:
        """X X^T (..., R, R)."""
        return torch.mm(x, x.mT) if x.ndim == 2 else torch.bmm(x, x.mT)

    def combine(
        self, add: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0
    ) -> Tensor:
        """beta add + alpha left @ right, all (..., R, R)."""
        addmm = torch.addmm if left.ndim == 2 else torch.baddbmm
        return addmm(add, left, right, beta=beta, alpha=alpha)

    def apply(self, poly: Tensor, x: Tensor) -> Tensor:
        """poly (..., R, R) @ x (..., R, C), in the layout of x.

        Adding a result of the other layout to a parameter takes several times as long.
        """
        mm = torch.mm if x.ndim == 2 else torch.bmm
        return mm(poly, x, out=torch.empty_like(x))


WHOLE = Products()


class Choice(NamedTuple):
    """How a shape is iterated on."""

    form: Literal["standard", "gram"]
    products: Products


def choose_by_flops(x: Tensor) -> Choice:
    """The form with fewer FLOPs for x (..., R, C), R <= C, in whole products.

    In units of 2 R^3, five steps take 5 (2 C/R + 1) in the standard form and 14 + 4 C/R in the Gram
    form, which therefore wins above C/R = 1.5.
    """
    return Choice("gram" if x.size(-1) > 1.5 * x.size(-2) else "standard", WHOLE)
