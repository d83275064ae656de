"""Newton-Schulz orthogonalisation: pure functions from matrices to matrices.

Owns the two forms of the iteration (standard, and Gram with its restart), normalisation, and batching of equal shapes.
A device's arithmetic, and which form it gives a shape, are behind `products.Backend`. It holds no state, steps no
parameter and never communicates. Next: `newton_schulz_settings.py`, `products.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from matrixtitan.optim.cpu import CpuBackend
from matrixtitan.optim.newton_schulz_settings import Form, NewtonSchulz, Triple
from matrixtitan.optim.products import WHOLE, Backend, Choice, Products
from matrixtitan.plan.cost import FIRST_RESTART, RESTART_EVERY  # which prices them

SAFE_NORMS = (2.0**-33, 2.0**50)
"""A float32 norm between them is right: no square overflows, and squares that underflow are too small to count."""

EXPONENT_BITS = 0x7F800000
"""Those of float32. Alone, they are the largest power of two that is not above a positive number."""

SMALLEST_SCALED_NORM = 2.0**-24
"""Below the norm of any matrix but zero whose largest element was divided by its power of two."""

CPU, GPU = CpuBackend(), Backend()


def orthogonalize(matrices: Sequence[Tensor], settings: NewtonSchulz) -> list[Tensor]:
    """The nearest semi-orthogonal matrix, roughly, of each matrix (R, C) or of each slice of a stack (E, R, C).

    Singular values land in about [0.7, 1.2] with the quintic coefficients. Results come in the order given, of the
    same shapes, in the dtype of the iteration. Equal shapes are multiplied in batches of the size that the table gives.
    Inputs are not changed, and gradients do not flow through: call it under `torch.no_grad()`.
    """
    if len(matrices) == 1 and matrices[0].ndim == 2:
        return [orthogonalize_one(matrices[0], settings)]
    results: list[Tensor | None] = [None] * len(matrices)
    for indices in _equal_shapes(matrices):
        group = [matrices[i] for i in indices]
        for i, result in zip(indices, _orthogonalize_equal(group, settings), strict=True):
            results[i] = result
    return [result for result in results if result is not None]


def orthogonalize_one(matrix: Tensor, settings: NewtonSchulz) -> Tensor:
    """`orthogonalize` of one matrix (R, C), or of all slices of a stack (E, R, C) as one batch."""
    dtype = settings.compute_dtype(matrix)
    x = matrix if matrix.dtype == dtype else matrix.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = iterate(x, settings, choose_form(x, settings.form))
    return x.mT if tall else x


def backend_of(device: torch.device) -> Backend:
    """What knows a device's arithmetic."""
    return CPU if device.type == "cpu" else GPU


def choose_form(x: Tensor, form: Form) -> Choice:
    """What to do with x (..., R, C), R <= C; the backend's choice unless `form` says otherwise."""
    choice = backend_of(x.device).choose(x)
    return choice if form == "auto" else choice._replace(form=form)


def batch_indices(shapes: Sequence[Sequence[int]], device: torch.device) -> list[list[int]]:
    """Indices of what to hand to one call of `orthogonalize`, given shapes (..., R, C) as it will see them.

    As many equal shapes as one batch takes; the others alone, so that one update and one result are alive at a time.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        by_shape.setdefault(tuple(shape), []).append(i)
    calls = []
    for shape, indices in by_shape.items():
        size = max(1, backend_of(device).batch_size(*shape[-2:]) // max(1, prod(shape[:-2])))
        calls += [indices[start : start + size] for start in range(0, len(indices), size)]
    return calls


def _equal_shapes(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the matrices grouped by shape, dtype and device, in order of first appearance."""
    groups: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for i, matrix in enumerate(matrices):
        groups.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(i)
    return list(groups.values())


def _orthogonalize_equal(group: list[Tensor], settings: NewtonSchulz) -> list[Tensor]:
    """All of a group of equal matrices (R, C), or stacks (E, R, C), slice by slice or in batches of slices."""
    first = group[0]
    size = backend_of(first.device).batch_size(*first.shape[-2:]) if settings.batch else 1
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


def normalize(x: Tensor, margin: float = 1.0) -> Tensor:
    """x (..., R, C) over `margin` times the Frobenius norm of each matrix, which bounds its spectral norm by 1.

    The result is the same for any positive factor of a matrix; zeros stay zeros. Squares leave float32's range long
    before the elements do, so a matrix is first divided by the power of two next to its largest element. That division
    is exact: wherever x / norm(x) works, the result is bitwise identical to it. On CPUs the common case is spared the
    extra passes; on GPUs reading the norm would wait for the device.
    """
    size = _frobenius_norm(x)
    if x.is_cpu and all(SAFE_NORMS[0] < s < SAFE_NORMS[1] for s in size.flatten().tolist()):
        return x / size.mul_(margin)
    largest = torch.linalg.vector_norm(x, float("inf"), dim=(-2, -1), keepdim=True).float()
    power = (largest.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    x = x / power.clamp_min_(torch.finfo(torch.float32).tiny).to(x.dtype)
    size = _frobenius_norm(x).mul_(margin)
    return x.div_(size.clamp_min_(SMALLEST_SCALED_NORM))


def _frobenius_norm(x: Tensor) -> Tensor:
    """The norm of x (R, C), or norms (..., 1, 1) of x (..., R, C)."""
    norm = torch.linalg.vector_norm
    return norm(x) if x.ndim == 2 else norm(x, dim=(-2, -1), keepdim=True)  # faster without dims


def iterate(x: Tensor, settings: NewtonSchulz, choice: Choice) -> Tensor:
    """All steps on x (..., R, C), R <= C, normalised first; no caller keeps the normalised copy alive."""
    steps = settings.coefficients
    if choice == ("standard", WHOLE):
        return standard(normalize(x, settings.norm_margin), steps)
    chunks = _chunks(steps) if choice.form == "gram" else [[triple] for triple in steps]
    return by_gram(normalize(x, settings.norm_margin), chunks, choice.products)


def standard(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """The iteration as it is usually written, whole products, one rounding each: torch.optim.Muon's to the bit.

    It may overwrite x.
    """
    mm, addmm = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    gram = mm(x, x.mT)
    update = torch.empty_like(gram)
    # contiguous, as new results are: some CPUs multiply transposed operands in another order
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    spare = x if x.is_contiguous() else torch.empty_like(result)
    for i, (a, b, c) in enumerate(coefficients):
        if i:
            mm(x, x.mT, out=gram)
        addmm(gram, gram, gram, beta=b, alpha=c, out=update)
        x = addmm(x, update, x, beta=a, out=result)
        result, spare = spare, result
    return x


def by_gram(x: Tensor, chunks: Sequence[Sequence[Triple]], products: Products) -> Tensor:
    """Iterate on the Gram matrix G = X X^T (R, R) alone, collect the polynomial Q, and apply it: X = Q X.

    Every factor is a polynomial in G, so all of them commute and every product is symmetric. With P = b G + c G^2 a
    step is Q = Q (a I + P) and G = (a I + P) G (a I + P). Q is applied and G formed anew after every chunk of steps;
    chunks of one step are the standard form, longer ones the Gram form (see the restart's constants).
    """
    x = products.operand(x)
    for chunk in chunks:
        gram = products.gram(x)
        poly = None
        for i, (a, b, c) in enumerate(chunk):
            step = products.combine(gram, gram, gram, beta=b, alpha=c)
            if i + 1 < len(chunk):
                # a Y + Y P, not Y (a I + P): without a walk along the diagonal, which misses caches
                gram = products.combine(gram, gram, step, beta=a)
                gram = products.combine(gram, gram, step, beta=a)
            if poly is None:
                poly = step
                poly.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                poly = products.combine(poly, poly, step, beta=a)
        assert poly is not None
        x = products.apply(poly, x)
    return x


def _chunks(coefficients: Sequence[Triple]) -> list[Sequence[Triple]]:
    """The steps between restarts.

    In bfloat16 the Gram matrix of a low-rank input has eigenvalues of about -1e-3 where the exact ones are 0, and each
    update of it multiplies them by a^2 (12 for the quintic, 69 for Polar Express' first). Multiplying the polynomial
    into X and forming X X^T anew makes them small again before they pass 1. Two chunks do for the usual 5 steps:
    https://tridao.me/blog/2026/gram-newton-schulz/
    """
    chunks = [coefficients[:FIRST_RESTART]]
    for start in range(FIRST_RESTART, len(coefficients), RESTART_EVERY):
        chunks.append(coefficients[start : start + RESTART_EVERY])
    return chunks
