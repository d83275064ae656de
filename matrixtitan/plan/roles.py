"""Which optimizer a parameter goes to, and the smallest piece of it that may not be cut.

Owns the rules from name and shape to ParamSpec, and the matching of patterns. A pattern that
matches nothing is an error. This module places nothing. Next: `planner.py`, which does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from matrixtitan.plan.shard import ParamSpec, Role

NamedShape = tuple[str, Sequence[int], bool]
"""(fqn, shape, requires_grad)"""


def param_specs(
    named_shapes: Iterable[NamedShape],
    unit_of: Mapping[str, str] | Callable[[str], str],
    *,
    tail_patterns: Sequence[str] = (),
    per_head_patterns: Mapping[str, int] | None = None,
) -> list[ParamSpec]:
    """ParamSpecs in the order given.

    2D and 3D parameters have the role "matrix", unless `tail_patterns` match their full name.
    Everything else is "tail". `per_head_patterns` maps a pattern to the rows of one head: such a 2D
    matrix is orthogonalised head by head, and may be cut between heads. Patterns are those of
    `fnmatch.fnmatchcase`. `unit_of` gives the unit of a full name.

    Raises ValueError for a pattern that matches nothing; for a per-head pattern that
    matches a tail parameter, a parameter that is not 2D, or rows that the head does not divide; for
    a parameter that two per-head patterns match; and for a parameter that no unit holds.
    """
    params = [(fqn, tuple(shape), trainable) for fqn, shape, trainable in named_shapes]
    fqns = [fqn for fqn, _, _ in params]
    per_head = dict(per_head_patterns or {})
    for key, patterns in (("tail_patterns", tail_patterns), ("per_head_patterns", per_head)):
        check_patterns(key, patterns, fqns)
    tails = {fqn for fqn in fqns if any(fnmatchcase(fqn, p) for p in tail_patterns)}
    specs = []
    for fqn, shape, trainable in params:
        role: Role = "matrix" if len(shape) in (2, 3) and fqn not in tails else "tail"
        rows = _block_rows(fqn, shape, role, per_head)
        specs.append(ParamSpec(fqn, shape, role, _unit(fqn, unit_of), rows, trainable))
    return specs


def _block_rows(fqn: str, shape: tuple[int, ...], role: Role, per_head: Mapping[str, int]) -> int:
    matching = [pattern for pattern in per_head if fnmatchcase(fqn, pattern)]
    if not matching:
        return max(1, shape[0]) if role == "matrix" and len(shape) == 2 else 1
    if len(matching) > 1:
        raise ValueError(
            f"{fqn} matches {len(matching)} per_head_patterns, {matching[0]!r} and "
            f"{matching[1]!r}: keep one"
        )
    head_rows = per_head[matching[0]]
    if role == "tail" or len(shape) != 2:
        raise ValueError(
            f"per_head_patterns: {matching[0]!r} matches {fqn} of shape {shape}, role {role}: "
            "heads are cut from 2D matrices only; narrow the pattern"
        )
    if head_rows < 1 or shape[0] % head_rows:
        raise ValueError(
            f"per_head_patterns: heads of {head_rows} rows do not divide the {shape[0]} rows of "
            f"{fqn}; narrow the pattern {matching[0]!r}"
        )
    return head_rows


def _unit(fqn: str, unit_of: Mapping[str, str] | Callable[[str], str]) -> str:
    if not isinstance(unit_of, Mapping):
        return unit_of(fqn)
    if fqn not in unit_of:
        raise ValueError(f"{fqn} belongs to no unit: add its module to one")
    return unit_of[fqn]


def _near(pattern: str, fqns: Sequence[str]) -> str:
    """The names nearest to a pattern, as the end of a message; layers count as one name."""
    known = list(dict.fromkeys([re.sub(r"\.\d+\.", ".*.", fqn) for fqn in fqns] + list(fqns)))
    near = difflib.get_close_matches(re.sub(r"\.\d+\.", ".*.", pattern), known, n=3, cutoff=0.4)
    return f" (near: {', '.join(near or known[:3])})" if known else " (the model has none)"


def check_patterns(key: str, patterns: Iterable[str], fqns: Sequence[str]) -> None:
    """ValueError for a pattern of the argument `key` that matches none of `fqns`."""
    for pattern in patterns:
        if not any(fnmatchcase(fqn, pattern) for fqn in fqns):
            raise ValueError(
                f"{key}: {pattern!r} matches no parameter{_near(pattern, fqns)}; "
                "patterns are full names"
            )
