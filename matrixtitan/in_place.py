"""Output that appears whole or not at all, and never overwrites anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_place(output: Path) -> Iterator[Path]:
    """A path to write to. It becomes `output` at the end, or is removed after an error.

    ValueError if `output` exists.
    """
    written = output.parent / f"{output.name}.writing"
    for path in (output, written):
        if path.exists():
            raise ValueError(f"{path} exists already: choose another output, or delete it first")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield written
        written.rename(output)
    except BaseException:
        if written.is_dir():
            shutil.rmtree(written)
        else:
            written.unlink(missing_ok=True)
        raise
