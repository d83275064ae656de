"""Eigenbases and inverse roots of symmetric factors: pure functions, for Shampoo and SOAP.

Work is done in float32; a decomposition that fails is tried again in float64. What to do when that fails too is the
caller's (`refresh.py`). Every function takes one matrix (n, n) or a stack (..., n, n).
"""

from __future__ import annotations

import torch
from torch import Tensor


class DecompositionError(RuntimeError):
    """A factor could not be decomposed, in float64 neither."""


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., n), ascending, and eigenvectors (..., n, n) in columns, in the matrix's dtype.

    Raises DecompositionError where the matrix is not finite or neither precision converges.
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
    raise DecompositionError("the eigensolver did not converge, in float64 neither")


def inverse_root(matrix: Tensor, root: int, eps: float) -> Tensor:
    """(A + shift I)^(-1/root) of a symmetric A that should be positive semi-definite.

    The spectrum is shifted up by its most negative eigenvalue, if any, and by `eps`.
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
    """One power iteration from an old eigenbasis, orthonormalised by QR: (new basis, order of the old columns).

    Columns are sorted first by descending diagonal of Q^T A Q; `order` (..., n) says how, so that what is kept in
    the old basis can be permuted alike. Raises DecompositionError where the result is not finite.
    https://arxiv.org/abs/2409.11321
    """
    product = matrix @ basis
    estimates = (basis * product).sum(dim=-2)
    order = estimates.argsort(dim=-1, descending=True)
    powered = product.gather(-1, order.unsqueeze(-2).expand_as(product))
    refined = torch.linalg.qr(powered).Q
    if not bool(refined.isfinite().all()):
        raise DecompositionError("QR of the power iteration is not finite")
    return refined, order
