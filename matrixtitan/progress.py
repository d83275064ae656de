"""Shows the progress of long work. Imports nothing of the package."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 28


class ProgressBar:
    """On a terminal one line, redrawn in place; elsewhere a line every `line_seconds`, if given."""

    def __init__(self, line_seconds: float | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._line_seconds = line_seconds
        self._shown = time.monotonic()
        self._drawn = False

    def update(self, text: str, share: float | None = None) -> None:
        """Show `text`, and a bar if `share`, the part that is done (0 to 1), is known."""
        if share is not None:
            filled = round(_WIDTH * min(share, 1.0))
            text = f"[{'#' * filled}{'-' * (_WIDTH - filled)}] {text}"
        if self._terminal:
            # \x1b[K erases the rest of a longer line
            self._write(f"\r\x1b[K{text}")
            self._drawn = True
        elif self._line_seconds and time.monotonic() - self._shown >= self._line_seconds:
            self._write(f"{text}\n")
            self._shown = time.monotonic()

    def clear(self) -> None:
        """Call at the end, and before writing other lines."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
