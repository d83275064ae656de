"""Muon with the roundings of KellerJordan/Muon: one per operation, in the dtype of the iteration.

The published code's recordings (`tests/golden`) hold bfloat16 iterations, in which the order of
rounding shows. This class steps with our momentum and scale, and with that order.
"""

from __future__ import annotations

from torch import Tensor

from matrixtitan.optim import Muon
from matrixtitan.optim.base import ParamGroup
from matrixtitan.optim.muon import learning_rate_scale, momentum_update
from tests.lib.references import QUINTIC

EPS = 1e-7


class KellerMuon(Muon):
    """`Muon` over matrices (R, C), five quintic steps in bfloat16."""

    def update(self, params: list[Tensor], group: ParamGroup) -> None:
        lr = group["lr"]
        for param in params:
            assert param.grad is not None
            buffer = self.state[param]["momentum_buffer"]
            update = momentum_update(param.grad, buffer, group["momentum"], group["nesterov"])
            update = orthogonalize(update).mul_(learning_rate_scale("original", *param.shape))
            param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Newton-Schulz in the standard form, (R, C) to (R, C) in bfloat16."""
    a, b, c = QUINTIC
    x = matrix.bfloat16()
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + EPS)
    for _ in range(5):
        gram = x @ x.mT
        update = b * gram + c * gram @ gram
        x = a * x + update @ x
    return x.mT if tall else x
