"""metrics.jsonl: every curve of a run as text, one JSON object per line.

Owns the file's format, its writer (for `metrics.py`) and its reader (for tools). Needs neither
PyTorch nor TensorBoard. There are two kinds of lines:

    {"run_start": 0}                         a run begins, with this many steps done before
    {"step": 10, "loss/train": 7.12, ...}    scalars after a step, named as in TensorBoard

A step may have several lines (training, validation, the pause of a save). A resumed run appends to
the file, and its `run_start` makes void what an earlier attempt logged of later steps. JSON has no
numbers that are not finite: they are the strings "NaN", "Infinity" and "-Infinity", which `float`
reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

FILE_NAME = "metrics.jsonl"

Curve = list[tuple[int, float]]
"""(step, value) pairs, steps ascending."""


class CurveWriter:
    """Appends lines to the file, and flushes each."""

    def __init__(self, path: Path, start_step: int) -> None:
        if path.exists():
            _drop_torn_line(path)
        self._file = path.open("ab")
        self._write({"run_start": start_step})

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = {name: _as_json(value) for name, value in scalars.items()}
        self._write({"step": step, **values})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: Mapping[str, float | str]) -> None:
        self._file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
        self._file.flush()


def read_curves(path: Path) -> dict[str, Curve]:
    """Every curve of a run, by name. Of several values of a step the last counts.

    ValueError for a line that is not of this format. The run may still be going on: a last line
    that is not finished is left out.
    """
    curves: dict[str, dict[int, float]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            if "run_start" in entry:
                _forget_after(curves, entry["run_start"])
                continue
            step = entry.pop("step")
            for name, value in entry.items():
                curves.setdefault(name, {})[step] = float(value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is no line of metrics.jsonl: {line[:200]!r}"
            ) from error
    return {name: sorted(curve.items()) for name, curve in curves.items() if curve}


def _as_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _drop_torn_line(path: Path) -> None:
    """Cut off an unfinished last line, which a run left that was killed while it wrote."""
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)


def _forget_after(curves: Mapping[str, dict[int, float]], start_step: int) -> None:
    for curve in curves.values():
        for step in [step for step in curve if step > start_step]:
            del curve[step]
