"""When an expensive decomposition is due, and what happens when it fails: shared by Shampoo and SOAP.

Owns the schedule of refreshes and the count of failures. The maths is in `matrix_roots.py`.
"""

from __future__ import annotations

import logging
from zlib import crc32

from matrixtitan.optim.matrix_optimizer import check_count
from matrixtitan.optim.matrix_roots import DecompositionError

logger = logging.getLogger("matrixtitan")


def refresh_offset(name: str, frequency: int, stagger: bool) -> int:
    """By how many steps a parameter's refreshes are moved; a function of its name, so the same on any owner."""
    return crc32(name.encode()) % frequency if stagger else 0


class FailureCount:
    """Failed decompositions. A failure keeps the old basis; `limit` of them in a row for one factor raise."""

    def __init__(self, limit: int) -> None:
        check_count("max_failures", limit, 1)
        self.limit = limit
        self.total = 0
        self._in_a_row: dict[str, int] = {}

    def success(self, factor: str) -> None:
        """The factor was decomposed: its row of failures ends."""
        self._in_a_row.pop(factor, None)

    def failure(self, factor: str, error: DecompositionError) -> None:
        """Count and log one; RuntimeError once it is the factor's `limit`-th in a row."""
        self.total += 1
        row = self._in_a_row[factor] = self._in_a_row.get(factor, 0) + 1
        if row >= self.limit:
            raise RuntimeError(
                f"{factor}: {row} decompositions failed in a row ({error}); check the gradients, or raise eps"
            ) from error
        logger.warning(
            "%s: decomposition failed, %d in a row (%s); the old one is kept", factor, row, error
        )
