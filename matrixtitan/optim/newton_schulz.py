"""Newton-Schulz orthogonalisation of a matrix: pure functions, and the settings that they take.

Owns the coefficient sets, normalisation and the two forms of the iteration: the standard one, and
the Gram form with its restart. A device's products, and the form that it gives a shape, are in
`products.py` and `cpu/`; many matrices at once are in `batching.py`. Holds no state, steps no
parameter and never communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from matrixtitan.optim import cpu
from matrixtitan.optim.products import WHOLE, Choice, Products, choose_by_flops
from matrixtitan.plan.cost import FIRST_RESTART, RESTART_EVERY
from matrixtitan.rules.muon import Coefficients, Triple, as_triples

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
"""The steepest slope at zero that still maps (0, 1] to near 1.
https://kellerjordan.github.io/posts/muon/"""

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
"""The best polynomial of each step for singular values in [1e-3, 1].
https://arxiv.org/abs/2505.16932"""

POLAR_EXPRESS_SAFETY = 1.01
"""Stretches each polynomial but the last, so that a value rounded above 1 stays in its range."""

SAFE_NORMS = (2.0**-33, 2.0**50)
"""The range in which a norm computed in float32 is accurate: no square overflows, and the squares
that underflow are negligible."""

EXPONENT_BITS = 0x7F800000
"""Mask of a float32's exponent: keeps the largest power of two that does not exceed the number."""

SMALLEST_SCALED_NORM = 2.0**-24
"""Below the norm of every scaled matrix but zero, also where all elements were subnormal."""


@dataclass(frozen=True)
class NewtonSchulz:
    """How to orthogonalise. `coefficients` holds one (a, b, c) for each step.

    A step maps X to a X + (b A + c A^2) X, A = X X^T. The input is divided by `norm_margin` times
    its Frobenius norm. With `batch` off every matrix is multiplied alone, so its result is bitwise
    independent of which other matrices a rank owns.
    """

    coefficients: tuple[Triple, ...] = (QUINTIC,) * 5
    norm_margin: float = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    batch: bool = True

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the iteration.

        "auto" is float32 on CPUs, where bfloat16 products take up to 100 times as long, and
        bfloat16 elsewhere.
        """
        if self.dtype == "auto":
            return torch.float32 if x.is_cpu else torch.bfloat16
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


def make_newton_schulz(
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    batch: bool = True,
) -> NewtonSchulz:
    """Settings from options that `MuonRule` finds no problem in.

    A list of triples that is shorter than `steps` repeats its last one.
    """
    margin = POLAR_EXPRESS_SAFETY if coefficients == "polar_express" else 1.0
    if coefficients == "quintic":
        triples: tuple[Triple, ...] = (QUINTIC,)
    elif coefficients == "polar_express":
        s = POLAR_EXPRESS_SAFETY
        *early, last = POLAR_EXPRESS
        triples = (*((a / s, b / s**3, c / s**5) for a, b, c in early), last)
    else:
        triples = as_triples(coefficients)
    padded = (triples + triples[-1:] * steps)[:steps]
    return NewtonSchulz(padded, margin, dtype, batch)


def orthogonalize_one(matrix: Tensor, settings: NewtonSchulz) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, of a matrix (R, C) or of each slice (E, R, C).

    Singular values land in about [0.7, 1.2] with the quintic coefficients. The slices of a stack
    are multiplied as one batch.
    """
    dtype = settings.compute_dtype(matrix)
    x = matrix if matrix.dtype == dtype else matrix.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = iterate(x, settings, choose(x))
    return x.mT if tall else x


def choose(x: Tensor) -> Choice:
    """How to iterate on x (..., R, C), R <= C: a function of its shape, dtype and device."""
    return cpu.choose(x) if x.is_cpu else choose_by_flops(x)


def normalize(x: Tensor, margin: float = 1.0) -> Tensor:
    """x (..., R, C) over `margin` times the Frobenius norm of each matrix.

    That norm bounds the spectral norm, which is then at most 1. The result is the same for any
    positive factor of a matrix: bitwise for powers of two, within rounding of x's dtype for others.
    Zeros stay zeros. Squares leave float32's range long before the
    elements do, so a matrix is first divided by the power of two next to its largest element. The
    division is exact: wherever x / norm(x) works, the result is bitwise identical to it. CPUs skip
    the scaling where the norm is in `SAFE_NORMS`. On GPUs reading the norm would wait for the
    device, so they always scale.
    """
    if x.is_cpu:
        size = _frobenius_norm(x)
        if all(SAFE_NORMS[0] < s < SAFE_NORMS[1] for s in size.flatten().tolist()):
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
    """All steps on x (..., R, C), R <= C, normalised first."""
    # no variable keeps the normalised copy alive beyond the call that may overwrite it
    steps = settings.coefficients
    if choice == Choice("standard", WHOLE):
        return standard(normalize(x, settings.norm_margin), steps)
    chunks = _chunks(steps) if choice.form == "gram" else [[triple] for triple in steps]
    return by_gram(normalize(x, settings.norm_margin), chunks, choice.products)


def standard(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """The iteration as it is usually written, in whole products with one rounding each.

    Bitwise identical to torch.optim.Muon's. May overwrite x.
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
    """Iterate on the Gram matrix alone, collect the polynomial Q of it, and apply Q: X = Q X.

    With G = X X^T (R, R) and P = b G + c G^2, a step is Q = Q (a I + P), G = (a I + P) G (a I + P).
    Every factor is a polynomial in G, so all of them commute and every product is symmetric. After
    every chunk of steps Q is applied and G formed anew. Chunks of one step are the standard form,
    longer ones the Gram form.
    """
    x = products.operand(x)
    for chunk in chunks:
        gram = products.gram(x)
        poly = None
        for i, (a, b, c) in enumerate(chunk):
            step = products.combine(gram, gram, gram, beta=b, alpha=c)
            if i + 1 < len(chunk):
                # a Y + Y P rather than Y (a I + P): adding to the diagonal misses caches
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
    """The steps between restarts of the Gram form.

    In bfloat16 the Gram matrix of a low-rank input has eigenvalues of about -1e-3 where the exact
    ones are 0, and each update of it multiplies them by a^2 (12 for the quintic, 69 for the first
    step of Polar Express). Applying the polynomial to X and forming X X^T anew makes them small
    again before they pass 1. Two chunks are enough for the usual 5 steps.
    https://tridao.me/blog/2026/gram-newton-schulz/
    """
    chunks = [coefficients[:FIRST_RESTART]]
    for start in range(FIRST_RESTART, len(coefficients), RESTART_EVERY):
        chunks.append(coefficients[start : start + RESTART_EVERY])
    return chunks
