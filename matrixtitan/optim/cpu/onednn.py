"""Float32 matrix products by oneDNN, for CPUs on which MKL, behind `torch.mm`, holds its AVX-512 kernels back.

MKL picks kernels by vendor: on an AMD CPU with AVX-512 its products run at half the rate of oneDNN's (measured: 111
against 250 GFLOP/s on one core at 512x512). PyTorch ships both. This file owns the only call of the operator, which
is the one that torch.compile emits for linear layers on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from matrixtitan.optim.products import Products

CPU_INFO = Path("/proc/cpuinfo")


@lru_cache(maxsize=1)
def pays() -> bool:
    """Whether this machine is of that kind; a property of CPU and build, the same in every run on it."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and CPU_INFO.exists()
        and "AuthenticAMD" in CPU_INFO.read_text()
    )


def mm(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, (R, K) and (K, C) to (R, C), float32 on the CPU, without autograd. `left` should be contiguous."""
    return torch.ops.mkldnn._linear_pointwise(left, right.mT, None, "none", [], "")


def addmm(add: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """beta add + alpha left @ right, as `mm`."""
    out = mm(left, right)
    if alpha != 1.0:
        out.mul_(alpha)
    return out.add_(add, alpha=beta)


@dataclass(frozen=True)
class OneDnn(Products):
    """Whole products of single matrices."""

    def operand(self, x: Tensor) -> Tensor:
        return x.contiguous()  # it would copy a transposed left operand in every product

    def gram(self, x: Tensor) -> Tensor:
        return mm(x, x.mT)

    def combine(
        self, add: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0
    ) -> Tensor:
        return addmm(add, left, right, beta=beta, alpha=alpha)

    def apply(self, poly: Tensor, x: Tensor) -> Tensor:
        return mm(poly, x)
