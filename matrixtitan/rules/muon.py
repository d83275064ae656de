"""What Muon declares. The mathematics is in `optim/muon.py` and `optim/newton_schulz.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from matrixtitan.options import key, not_one_of
from matrixtitan.plan.cost import newton_schulz_flops
from matrixtitan.rules.base import Rule, Shape, StateSpec

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]
NAMED_COEFFICIENTS = ("quintic", "polar_express")


@dataclass(frozen=True)
class MuonRule(Rule):
    name = "muon"
    optimizer = "matrixtitan.optim.muon:Muon"

    momentum: float = key(0.95, "momentum", low=0, below=1)
    nesterov: bool = key(True, "Nesterov momentum")
    ns_steps: int = key(5, "Newton-Schulz steps", low=1, high=99)
    ns_coefficients: Literal["quintic", "polar_express"] | tuple[tuple[float, ...], ...] = key(
        "quintic", "quintic, polar_express, or a list of triples, one per step"
    )
    ns_dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "dtype of the iterations; auto: bfloat16 on GPUs, float32 on CPUs"
    )
    ns_batch: bool = key(
        True,
        "orthogonalise equal shapes in one batched product where that is faster; false makes "
        "results bitwise independent of which matrices a rank owns",
    )
    scale: Literal["original", "match_rms_adamw", "spectral"] = key(
        "original",
        "how the learning rate depends on a matrix's R rows and C columns: original "
        "sqrt(max(1, R/C)), match_rms_adamw 0.2 sqrt(max(R, C)), spectral sqrt(R/C)",
    )
    per_head_patterns: tuple[str, ...] = key(
        (), "full names, with * and ?, of projections that are orthogonalised head by head"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        coefficients: Any = self.ns_coefficients
        if isinstance(coefficients, str):
            if coefficients not in NAMED_COEFFICIENTS:
                yield not_one_of("ns_coefficients", coefficients, NAMED_COEFFICIENTS)
            return
        triples = as_triples(coefficients)
        if not triples:
            yield (
                "ns_coefficients must hold triples of finite numbers, one per step; "
                f"it is {coefficients!r}"
            )
        if len(triples) > self.ns_steps:
            yield (
                f"ns_coefficients holds {len(triples)} triples for ns_steps {self.ns_steps}; "
                "raise the steps or leave triples out"
            )

    def arguments(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "ns_steps": self.ns_steps,
            "ns_coefficients": self.ns_coefficients,
            "ns_dtype": self.ns_dtype,
            "batch": self.ns_batch,
            "scale": self.scale,
        }

    def head_patterns(self) -> tuple[str, ...]:
        return self.per_head_patterns

    def state(self, shape: Shape) -> dict[str, StateSpec]:
        return {"momentum_buffer": StateSpec(shape, per_row=True)}

    def flops(self, rows: int, cols: int) -> int:
        return newton_schulz_flops(rows, cols, self.ns_steps)


def as_triples(coefficients: Any) -> tuple[Triple, ...]:
    """The (a, b, c) of a list of triples, or of one triple; empty where it is neither."""
    rows = list(coefficients) if isinstance(coefficients, Sequence) else []
    if rows and not isinstance(rows[0], Sequence):
        rows = [rows]
    for row in rows:
        if not isinstance(row, Sequence) or len(row) != 3:
            return ()
        if not all(isinstance(number, (int, float)) and isfinite(number) for number in row):
            return ()
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)
