"""matplotlib for tools that draw, and that do their work without it too."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def pyplot_for(path: Path) -> Any | None:
    """`matplotlib.pyplot`, drawing to files, or None where the plots extra is not installed.

    Then it says that the picture `path` is left out, and removes an older one, which would show other figures.
    """
    if find_spec("matplotlib") is None:
        path.unlink(missing_ok=True)
        print(
            f"{path} is left out: matplotlib is missing; install the plots extra (pip install -e '.[plots]')",
            file=sys.stderr,
        )
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
