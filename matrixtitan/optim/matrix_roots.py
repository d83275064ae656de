"""Eigenbases and inverse roots of symmetric factors: pure functions, for Shampoo and SOAP.

Every function takes one matrix (n, n) or a stack (..., n, n). The eigensolver works in float32, and
again in float64 where that fails. Where both fail, `refresh.py` decides what to do.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DecompositionError(RuntimeError):
    """A factor could not be decomposed, not even in float64."""


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues (..., n), eigenvectors (..., n, n) in columns, in the matrix's dtype.

    DecompositionError where the matrix is not finite or the solver converges in neither precision.
    """
    if not bool(matrix.isfinite().all()):
        raise DecompositionError("the matrix has non-finite entries")
    for dtype in (matrix.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
        except torch.linalg.LinAlgError:
            continue  # the solver did not converge: try more precision
        if bool(values.isfinite().all()) and bool(vectors.isfinite().all()):
            return values.to(matrix.dtype), vectors.to(matrix.dtype)
    raise DecompositionError("the eigensolver did not converge, not even in float64")


def inverse_root(matrix: Tensor, root: int, eps: float) -> Tensor:
    """(A + shift I)^(-1/root) of a symmetric A that should be positive semi-definite.

    The shift is `eps`, plus the size of the most negative eigenvalue where there is one.
    """
    values, vectors = symmetric_eigen(matrix)
    lowest = values.amin(dim=-1, keepdim=True).clamp(max=0.0)
    powers = (values - lowest + eps).pow(-1.0 / root)
    result = (vectors * powers.unsqueeze(-2)) @ vectors.mT
    if not bool(result.isfinite().all()):
        raise DecompositionError(f"the inverse root is not finite: raise eps, which is {eps}")
    return result


def eigenbasis(matrix: Tensor) -> Tensor:
    """Orthonormal eigenvectors (..., n, n) in columns, by descending eigenvalue."""
    return symmetric_eigen(matrix)[1].flip(-1)


def refine_eigenbasis(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration from an old eigenbasis, orthonormalised by QR: (new basis, column order).

    The old columns are first sorted by descending diagonal of Q^T A Q. `order` (..., n) is that
    permutation, for whatever else is kept in the old basis. DecompositionError where the result is
    not finite. https://arxiv.org/abs/2409.11321
    """
    product = matrix @ basis
    estimates = (basis * product).sum(dim=-2)
    order = estimates.argsort(dim=-1, descending=True)
    powered = product.gather(-1, order.unsqueeze(-2).expand_as(product))
    refined = torch.linalg.qr(powered).Q
    if not bool(refined.isfinite().all()):
        raise DecompositionError("QR of the power iteration is not finite")
    return refined, order
