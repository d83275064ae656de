"""Newton-Schulz orthogonalisation: pure functions from matrices to matrices.

Owns the coefficient sets, the two forms of the iteration (standard, and Gram with its restart), products with
symmetric results computed by half, and batching of equal shapes. Which form a shape takes comes from
`newton_schulz_table.py`, a fixed table that `tools/ns_table.py` measured: never from timing, so a run can be repeated.
It holds no state, steps no parameter and never communicates. Next: `muon.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isfinite, prod
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from matrixtitan.optim import onednn
from matrixtitan.optim.newton_schulz_table import BATCH_ELEMENTS, BATCHED_FORMS, FORMS, ONEDNN_ROWS
from matrixtitan.plan.cost import FIRST_RESTART, RESTART_EVERY  # which prices them

Triple = tuple[float, float, float]
Form = Literal["auto", "standard", "gram"]
Dtype = Literal["auto", "float32", "bfloat16"]
Product = Callable[..., Tensor]

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
"""Steepest slope at zero that still maps (0, 1] near 1: https://kellerjordan.github.io/posts/muon/"""

POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The best polynomial for each step, for singular values in [1e-3, 1]: https://arxiv.org/abs/2505.16932"""

POLAR_EXPRESS_SAFETY = 1.01
"""Each polynomial but the last is stretched by it, so that a value rounded above 1 is not thrown out of range."""

SAFE_NORMS = (2.0**-33, 2.0**50)
"""A float32 norm between them is right: no square overflows, and squares that underflow are too small to count."""

EXPONENT_BITS = 0x7F800000
"""Those of float32. Alone, they are the largest power of two that is not above a positive number."""

SMALLEST_SCALED_NORM = 2.0**-24
"""Below the norm of any matrix but zero whose largest element was divided by its power of two."""

STRIP_PADDING = 16
"""Elements between the rows of a product that is computed in strips: one cache line in float32."""


@dataclass(frozen=True)
class NewtonSchulz:
    """How to orthogonalise. `coefficients` holds one (a, b, c) per step; X becomes a X + (b A + c A^2) X, A = X X^T.

    `norm_margin` multiplies the Frobenius norm that the input is divided by. With `batch` off every matrix is
    multiplied alone, so results do not depend on what else a rank owns, to the bit.
    """

    coefficients: tuple[Triple, ...] = (QUINTIC,) * 5
    norm_margin: float = 1.0
    dtype: Dtype = "auto"
    form: Form = "auto"
    batch: bool = True

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("ns_dtype", self.dtype, get_args(Dtype)),
            ("ns_form", self.form, get_args(Form)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """float32 on the CPU, where bfloat16 products are up to 100 times slower; bfloat16 elsewhere."""
        if self.dtype == "auto":
            return torch.float32 if x.is_cpu else torch.bfloat16
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


def make_newton_schulz(
    coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "quintic",
    steps: int = 5,
    *,
    dtype: Dtype = "auto",
    form: Form = "auto",
    batch: bool = True,
) -> NewtonSchulz:
    """Settings from what a user writes: a set's name, one triple for every step, or a list of triples, one per step.

    Where a list is shorter than `steps` its last triple is repeated; a longer one is a ValueError, as is anything else.
    """
    if not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"ns_steps is {steps}; it must be a whole number from 1 to 99")
    margin = POLAR_EXPRESS_SAFETY if coefficients == "polar_express" else 1.0
    triples = _triples(coefficients)
    if not isinstance(coefficients, str) and len(triples) > steps:
        raise ValueError(f"ns_coefficients holds {len(triples)} triples for ns_steps {steps}")
    padded = (triples + triples[-1:] * steps)[:steps]
    return NewtonSchulz(padded, margin, dtype, form, batch)


def _triples(coefficients: str | Sequence[float] | Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    if coefficients == "quintic":
        return (QUINTIC,)
    if coefficients == "polar_express":
        s = POLAR_EXPRESS_SAFETY
        return (*((a / s, b / s**3, c / s**5) for a, b, c in POLAR_EXPRESS[:-1]), POLAR_EXPRESS[-1])
    rows: list[Any] = list(coefficients) if isinstance(coefficients, Sequence) else []
    if rows and not isinstance(rows[0], Sequence):
        rows = [rows]
    if rows and all(isinstance(row, Sequence) and len(row) == 3 for row in rows):
        numbers = [number for row in rows for number in row]
        if all(isinstance(number, (int, float)) and isfinite(number) for number in numbers):
            return tuple((float(a), float(b), float(c)) for a, b, c in rows)
    raise ValueError(
        f"ns_coefficients is {coefficients!r}; give 'quintic', 'polar_express', three finite numbers or a list of such"
    )


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
    x = _iterate(x, settings, choose_form(x, settings.form))
    return x.mT if tall else x


class FormChoice(NamedTuple):
    """How a shape is iterated on.

    `wide_depth` and `depth` are how finely the symmetric products X X^T and those of (R, R) matrices are cut (see
    `symmetric_product`); with `onednn` they are whole, and oneDNN's.
    """

    form: Literal["standard", "gram"]
    wide_depth: int
    depth: int
    onednn: bool


@lru_cache(maxsize=1024)
def _table_entry(rows: int, cols: int, batched: bool) -> FormChoice:
    """The table's entry for the largest measured size and ratio not above those of (rows, cols), rows <= cols."""
    table = BATCHED_FORMS if batched else FORMS
    by_ratio = table[max((size for size in table if size <= rows), default=min(table))]
    ratio = cols / max(rows, 1)
    form, wide_depth, depth = by_ratio[
        max((r for r in by_ratio if r <= ratio), default=min(by_ratio))
    ]
    return FormChoice(form, wide_depth, depth, onednn=False)


def choose_form(x: Tensor, form: Form) -> FormChoice:
    """What to do with x (..., R, C), R <= C: by the measured table in float32 on the CPU, by FLOPs otherwise.

    In units of 2 R^3, five steps take 5 (2 C/R + 1) in the standard form and 14 + 4 C/R in the Gram form, which
    therefore wins from C/R of 1.5.
    """
    rows, cols = x.size(-2), x.size(-1)
    measured = x.is_cpu and x.dtype == torch.float32
    use_onednn = measured and x.ndim == 2 and rows >= ONEDNN_ROWS and onednn.pays()
    if measured and not use_onednn:
        choice = _table_entry(rows, cols, x.ndim > 2)
    else:
        choice = FormChoice("gram" if cols > 1.5 * rows else "standard", 0, 0, use_onednn)
    return choice if form == "auto" else choice._replace(form=form)


def together(shapes: Sequence[Sequence[int]], device: torch.device) -> list[list[int]]:
    """Indices of what to hand to one call of `orthogonalize`, given shapes (..., R, C) as it will see them.

    As many equal shapes as one batch takes; the others alone, so that one update and one result are alive at a time.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        by_shape.setdefault(tuple(shape), []).append(i)
    calls = []
    for shape, indices in by_shape.items():
        size = max(1, batch_size(shape, device) // max(1, prod(shape[:-2])))
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


def batch_size(shape: Sequence[int], device: torch.device) -> int:
    """How many matrices (..., R, C) to multiply as one batch, 1 for alone.

    Small products share a call's cost; but what a batch holds must stay in a core's cache, and large products fill a
    GPU alone.
    """
    rows, cols = shape[-2:]
    if device.type == "cpu" and min(rows, cols) >= ONEDNN_ROWS and onednn.pays():
        return 1  # its product takes no batches
    limit = BATCH_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]
    return max(1, limit // max(1, rows * cols))


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


def _iterate(x: Tensor, settings: NewtonSchulz, choice: FormChoice) -> Tensor:
    """All steps on x (..., R, C), R <= C, normalised first; no caller keeps the normalised copy alive."""
    steps = settings.coefficients
    if choice.form == "standard" and not (choice.wide_depth or choice.depth or choice.onednn):
        return _standard(normalize(x, settings.norm_margin), steps)
    chunks = _chunks(steps) if choice.form == "gram" else [[triple] for triple in steps]
    return _by_gram(normalize(x, settings.norm_margin), chunks, choice)


def _standard(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """The iteration as it is usually written, whole products, one rounding each: torch.optim.Muon's to the bit.

    It may overwrite x.
    """
    mm, addmm = _products(x.ndim)
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


def _by_gram(x: Tensor, chunks: Sequence[Sequence[Triple]], choice: FormChoice) -> Tensor:
    """Iterate on the Gram matrix G = X X^T (R, R) alone, collect the polynomial Q, and apply it: X = Q X.

    Every factor is a polynomial in G, so all of them commute and every product is symmetric. With P = b G + c G^2 a
    step is Q = Q (a I + P) and G = (a I + P) G (a I + P). Q is applied and G formed anew after every chunk of steps;
    chunks of one step are the standard form, longer ones the Gram form (see the restart's constants).
    """
    if choice.onednn:
        x = x.contiguous()  # it would copy a transposed left operand in every product
    mm, _ = _products(x.ndim)
    wide, square = _symmetric_products(x.ndim, choice)
    for chunk in chunks:
        gram = wide(x, x.mT)
        poly = None
        for i, (a, b, c) in enumerate(chunk):
            step = square(gram, gram, gram, beta=b, alpha=c)
            if i + 1 < len(chunk):
                # a Y + Y P, not Y (a I + P): without a walk along the diagonal, which misses caches
                gram = square(gram, gram, step, beta=a)
                gram = square(gram, gram, step, beta=a)
            if poly is None:
                poly = step
                poly.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                poly = square(poly, poly, step, beta=a)
        assert poly is not None
        # not oneDNN's, but the others in the layout of x: a parameter adds a transposed one several times slower
        x = onednn.mm(poly, x) if choice.onednn else mm(poly, x, out=torch.empty_like(x))
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


def _products(ndim: int) -> tuple[Product, Product]:
    """left @ right, and beta add + alpha left @ right of (add, left, right), of matrices or of batches."""
    return (torch.mm, torch.addmm) if ndim == 2 else (torch.bmm, torch.baddbmm)


def _symmetric_products(ndim: int, choice: FormChoice) -> tuple[Product, Product]:
    """The same two where the result is known to be symmetric: the first for X X^T, the second for (R, R) factors."""
    if choice.onednn:
        return onednn.mm, onednn.addmm
    mm, addmm = _products(ndim)
    if choice.wide_depth:
        mm = partial(symmetric_product, None, depth=choice.wide_depth)
    if choice.depth:
        addmm = partial(symmetric_product, depth=choice.depth)
    return mm, addmm


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

    It is multiplied in 2^depth strips of rows, each up to its end of the diagonal, and mirrored: (1 + 2^-depth) / 2 of
    the FLOPs. The result's rows are a few elements apart: in rows whose length is a power of two, those that mirroring
    reads as columns would share cache sets.
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
