"""Newton-Schulz of many matrices: equal shapes are multiplied as one batch where that is faster.

Small products share the cost of a call. Large ones fill a GPU, or a core's cache, alone. Owns the
batches and their order; the iteration is in `newton_schulz.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from matrixtitan.optim import cpu
from matrixtitan.optim.newton_schulz import NewtonSchulz, orthogonalize_one

GPU_BATCH_ELEMENTS = 1 << 24
"""Elements up to which equal shapes are one batch on a GPU. The limit is a guess."""


def orthogonalize(matrices: Sequence[Tensor], settings: NewtonSchulz) -> list[Tensor]:
    """`orthogonalize_one` of each matrix (R, C), and of each slice of a stack (E, R, C).

    Results come in the order given, of the same shapes, in the dtype of the iteration. Inputs are
    not changed, and gradients do not flow through: call it under `torch.no_grad()`.
    """
    if len(matrices) == 1 and matrices[0].ndim == 2:
        return [orthogonalize_one(matrices[0], settings)]
    results: list[Tensor | None] = [None] * len(matrices)
    for indices in _equal_shapes(matrices):
        group = [matrices[i] for i in indices]
        for i, result in zip(indices, _orthogonalize_equal(group, settings), strict=True):
            results[i] = result
    return [result for result in results if result is not None]


def batch_indices(shapes: Sequence[Sequence[int]], device: torch.device) -> list[list[int]]:
    """Indices for each call of `orthogonalize`, from the shapes (..., R, C) that it is given.

    A call takes as many equal shapes as one batch holds, and no more, so that few updates and
    results are alive at a time.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        by_shape.setdefault(tuple(shape), []).append(i)
    calls = []
    for shape, indices in by_shape.items():
        size = max(1, batch_size(shape, device) // max(1, prod(shape[:-2])))
        calls += [indices[start : start + size] for start in range(0, len(indices), size)]
    return calls


def batch_size(shape: Sequence[int], device: torch.device) -> int:
    """How many matrices (..., R, C) to multiply as one batch; 1 means each alone."""
    rows, cols = shape[-2:]
    if device.type == "cpu":
        return cpu.batch_size(rows, cols)
    return max(1, GPU_BATCH_ELEMENTS // max(1, rows * cols))


def _equal_shapes(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Indices grouped by shape, dtype and device, in order of first appearance."""
    groups: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for i, matrix in enumerate(matrices):
        groups.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(i)
    return list(groups.values())


def _orthogonalize_equal(group: list[Tensor], settings: NewtonSchulz) -> list[Tensor]:
    """Results of equal matrices (R, C) or stacks (E, R, C), slice by slice or batch by batch."""
    first = group[0]
    size = batch_size(first.shape, first.device) if settings.batch else 1
    if first.ndim == 2:
        return _orthogonalize_slices(group, size, settings)
    if len(group) == 1 and first.size(0) <= size and first.size(0) != 1:
        return [orthogonalize_one(first, settings)]  # a batch as it is
    slices = [slice_ for stack in group for slice_ in stack]
    results = iter(_orthogonalize_slices(slices, size, settings))
    return [torch.stack([next(results) for _ in stack]) for stack in group]


def _orthogonalize_slices(slices: list[Tensor], size: int, settings: NewtonSchulz) -> list[Tensor]:
    results: list[Tensor] = []
    for start in range(0, len(slices), size):
        batch = slices[start : start + size]
        if len(batch) == 1:
            results.append(orthogonalize_one(batch[0], settings))
        else:
            results += orthogonalize_one(torch.stack(batch), settings).unbind()
    return results
