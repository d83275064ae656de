"""Importing this ends a lab script that would measure other code than that of its own clone."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_spec = find_spec("matrixtitan")
if _spec is None or not (_spec.origin and Path(_spec.origin).resolve().is_relative_to(ROOT)):
    found = "has no matrixtitan" if _spec is None else f"has the matrixtitan of {_spec.origin}"
    sys.exit(
        f"error: this environment {found}; run `pip install --no-deps -e {ROOT}`, or set "
        f"PYTHONPATH={ROOT}"
    )
