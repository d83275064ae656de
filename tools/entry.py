"""Start a tool of this clone by its path, whether or not the package is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent


def run(script: str) -> NoReturn:
    """`tools/NAME.py ARGUMENTS` becomes `python -m matrixtitan NAME ARGUMENTS` of this clone.

    PYTHONPATH puts this clone before a package that the environment has from elsewhere. -P keeps
    the working directory, which may be another clone, off the path.
    """
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
    name = Path(script).stem
    os.execv(sys.executable, [sys.executable, "-P", "-m", "matrixtitan", name, *sys.argv[1:]])
