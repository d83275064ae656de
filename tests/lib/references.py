"""Literal float64 references: each update rule as its paper states it, for one matrix, in one loop.

They are written for reading beside the papers, and share no code with matrixtitan. Tests compare
trajectories with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrix: Tensor, coefficients: Sequence[tuple[float, float, float]] = (QUINTIC,) * 5
) -> Tensor:
    """Newton-Schulz through the singular values: U p(S) V^T, the polynomials applied to numbers."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


def muon(
    weight: Tensor,
    grads: Iterable[Tensor],
    *,
    lr: float,
    scale: float,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    nesterov: bool = True,
) -> list[Tensor]:
    """Weights after each step; `scale` is the number that multiplies lr."""
    weight, buffer, weights = weight.double(), torch.zeros_like(weight).double(), []
    for grad in grads:
        grad = grad.double()
        buffer = momentum * buffer + (1 - momentum) * grad
        update = momentum * buffer + (1 - momentum) * grad if nesterov else buffer
        weight = weight - lr * weight_decay * weight - lr * scale * orthogonalize(update)
        weights.append(weight)
    return weights


def shampoo(
    weight: Tensor,
    grads: Iterable[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    graft: tuple[float, float],
) -> list[Tensor]:
    """Weights after each step. Roots every step; grafted to bias-corrected Adam (beta2, eps)."""
    weight, weights = weight.double(), []
    rows, cols = weight.shape
    left, right = torch.zeros(rows, rows).double(), torch.zeros(cols, cols).double()
    average, average_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads, start=1):
        grad = grad.double()
        left = betas[1] * left + (1 - betas[1]) * grad @ grad.T
        right = betas[1] * right + (1 - betas[1]) * grad.T @ grad
        average = betas[0] * average + (1 - betas[0]) * grad
        average_sq = graft[0] * average_sq + (1 - graft[0]) * grad**2
        corrected = average / (1 - betas[0] ** step)
        adam = corrected / ((average_sq / (1 - graft[0] ** step)).sqrt() + graft[1])
        correction = 1 - betas[1] ** step
        direction = _root(left / correction, eps) @ corrected @ _root(right / correction, eps)
        direction = direction * adam.norm() / direction.norm()
        weight = weight - lr * (direction + weight_decay * weight)
        weights.append(weight)
    return weights


def _root(factor: Tensor, eps: float) -> Tensor:
    values, vectors = torch.linalg.eigh(factor)
    return vectors @ torch.diag((values.clamp(min=0) + eps) ** -0.25) @ vectors.T


def soap(
    weight: Tensor,
    grads: Iterable[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    frequency: int,
) -> list[Tensor]:
    """Weights after each step. Both sides are preconditioned; the first step only builds bases."""
    weight, weights = weight.double(), []
    rows, cols = weight.shape
    left, right = torch.zeros(rows, rows).double(), torch.zeros(cols, cols).double()
    basis_left, basis_right = left, right
    average, average_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads):
        grad = grad.double()
        if step:
            rotated = basis_left.T @ grad @ basis_right
            average = betas[0] * average + (1 - betas[0]) * grad
            average_sq = betas[1] * average_sq + (1 - betas[1]) * rotated**2
            size = lr * sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)
            direction = basis_left.T @ average @ basis_right / (average_sq.sqrt() + eps)
            weight = weight - size * basis_left @ direction @ basis_right.T
            weight = weight - lr * weight_decay * weight
        left = betas[1] * left + (1 - betas[1]) * grad @ grad.T
        right = betas[1] * right + (1 - betas[1]) * grad.T @ grad
        if step == 0:
            basis_left = torch.linalg.eigh(left).eigenvectors.flip(1)
            basis_right = torch.linalg.eigh(right).eigenvectors.flip(1)
        elif step % frequency == 0:
            basis_left, average_sq = _refined(left, basis_left, average_sq)
            basis_right, transposed = _refined(right, basis_right, average_sq.T)
            average_sq = transposed.T
        weights.append(weight)
    return weights


def _refined(factor: Tensor, basis: Tensor, average_sq: Tensor) -> tuple[Tensor, Tensor]:
    """The basis after one power iteration and QR, and the second moment in the new row order."""
    order = torch.diag(basis.T @ factor @ basis).argsort(descending=True)
    return torch.linalg.qr(factor @ basis[:, order]).Q, average_sq[order]


def assert_orthogonal(matrix: Tensor, low: float, high: float) -> None:
    """Every singular value lies in [low, high]."""
    values = torch.linalg.svdvals(matrix.double())
    smallest, largest = values.min().item(), values.max().item()
    assert low <= smallest, f"the smallest singular value is {smallest}, under {low}"
    assert largest <= high, f"the largest singular value is {largest}, over {high}"
