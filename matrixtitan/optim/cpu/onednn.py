"""Float32 matrix products by oneDNN, for CPUs on which MKL is slow.

MKL, which is behind `torch.mm`, picks its kernels by vendor. On an AMD CPU with AVX-512 it leaves
them unused and runs at half the rate of oneDNN, which PyTorch ships too. The operator called here
is private: torch.compile emits it for linear layers on CPUs. No other file calls it.
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
    """Whether this machine is of that kind; a property of CPU and build, the same in every run."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and CPU_INFO.exists()
        and "AuthenticAMD" in CPU_INFO.read_text()
    )


@dataclass(frozen=True)
class OneDnn(Products):
    """Whole products of single float32 matrices, without autograd."""

    def operand(self, x: Tensor) -> Tensor:
        # the operator would copy a transposed left operand in every product
        return x.contiguous()

    def gram(self, x: Tensor) -> Tensor:
        return _mm(x, x.mT)

    def combine(
        self, add: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0
    ) -> Tensor:
        out = _mm(left, right)
        if alpha != 1.0:
            out.mul_(alpha)
        return out.add_(add, alpha=beta)

    def apply(self, poly: Tensor, x: Tensor) -> Tensor:
        return _mm(poly, x)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """left (R, K) @ right (K, C)."""
    return torch.ops.mkldnn._linear_pointwise(left, right.mT, None, "none", [], "")
