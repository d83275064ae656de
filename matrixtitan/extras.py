"""Packages that only some tools need, and the extra of pyproject.toml that installs each."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHECKOUT_NEEDED = (
    "the trainer and its tools run from a checkout (git clone), where the folder models is; "
    "the wheel is for matrixtitan.fsdp and matrixtitan.optim"
)
EXTRA_OF = {"matplotlib": "plots", "safetensors": "tools", "tokenizers": "tools"}


class CheckoutNeeded(ImportError):
    """`models` of this repository is missing: the package was installed from its wheel."""

    def __init__(self) -> None:
        super().__init__(CHECKOUT_NEEDED, name="models")


def need(*modules: str) -> None:
    """ValueError for a missing module, which names the extra to install."""
    for module in modules:
        if find_spec(module) is None:
            raise ValueError(missing(module))


def missing(module: str) -> str:
    extra = EXTRA_OF[module]
    return f"{module} is missing; install the {extra} extra (pip install -e '.[{extra}]')"


def pyplot_for(path: Path) -> Any | None:
    """`matplotlib.pyplot`, drawing to files, or None where matplotlib is not installed.

    Then a line says that the picture `path` is left out, and an older picture there is removed,
    since it would show other figures.
    """
    if find_spec("matplotlib") is None:
        path.unlink(missing_ok=True)
        print(f"{path} is left out: {missing('matplotlib')}", file=sys.stderr)
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
