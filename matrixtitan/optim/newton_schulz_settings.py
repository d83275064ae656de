"""What a user chooses of Newton-Schulz: the coefficient sets, dtype and form, checked. Next: `newton_schulz.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Triple = tuple[float, float, float]
Form = Literal["auto", "standard", "gram"]
Dtype = Literal["auto", "float32", "bfloat16"]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

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
    coefficients: Coefficients = "quintic",
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
    triples = parse_coefficients(coefficients)
    if not isinstance(coefficients, str) and len(triples) > steps:
        raise ValueError(f"ns_coefficients holds {len(triples)} triples for ns_steps {steps}")
    padded = (triples + triples[-1:] * steps)[:steps]
    return NewtonSchulz(padded, margin, dtype, form, batch)


def parse_coefficients(coefficients: Coefficients) -> tuple[Triple, ...]:
    """One triple for every step, or one for each; ValueError for what is neither."""
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
