"""Products with symmetric results, computed by half: strips of rows up to the diagonal, mirrored.

Next: `onednn.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from matrixtitan.optim.products import Products

STRIP_PADDING = 16
"""Elements between the rows of a product computed in strips: one cache line in float32."""


@dataclass(frozen=True)
class Strips(Products):
    """Products of single matrices: X X^T in 2^wide_depth strips, (R, R) results in 2^depth.

    A depth of 0 is a whole product.
    """

    wide_depth: int
    depth: int

    def gram(self, x: Tensor) -> Tensor:
        if not self.wide_depth:
            return super().gram(x)
        return symmetric_product(None, x, x.mT, depth=self.wide_depth)

    def combine(
        self, add: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0
    ) -> Tensor:
        if not self.depth:
            return super().combine(add, left, right, beta=beta, alpha=alpha)
        return symmetric_product(add, left, right, depth=self.depth, beta=beta, alpha=alpha)


def symmetric_product(
    add: Tensor | None,
    left: Tensor,
    right: Tensor,
    *,
    depth: int,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """beta add + alpha left @ right, (R, R), where the caller knows that the result is symmetric.

    It is multiplied in 2^depth strips of rows, each up to its end of the diagonal, and mirrored:
    (1 + 2^-depth) / 2 of the FLOPs. The result's rows are a few elements apart. Without this
    padding, mirroring reads columns whose elements share cache sets when the number of rows is a
    power of two.
    """
    rows = left.size(0)
    out = left.new_empty(rows, rows + STRIP_PADDING)[:, :rows]
    for i in range(1 << depth):
        top, end = rows * i >> depth, rows * (i + 1) >> depth
        strip = out[top:end, :end]
        if add is None:
            torch.mm(left[top:end], right[:, :end], out=strip)
        else:
            torch.addmm(
                add[top:end, :end], left[top:end], right[:, :end], beta=beta, alpha=alpha, out=strip
            )
        out[:top, top:end].copy_(strip[:, :top].mT)
    return out
