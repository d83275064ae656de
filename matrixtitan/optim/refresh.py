"""When an expensive decomposition is due, and what happens when it fails, for Shampoo and SOAP.

Owns the stagger of refreshes and the count of failures. The mathematics is in `matrix_roots.py`.
"""

from __future__ import annotations

import logging
from zlib import crc32

from matrixtitan.optim.base import check_count
from matrixtitan.optim.matrix_roots import DecompositionError

logger = logging.getLogger("matrixtitan")


def refresh_offset(name: str, frequency: int, stagger: bool) -> int:
    """By how many steps a parameter's refreshes are moved: the same for any owner."""
    return crc32(name.encode()) % frequency if stagger else 0


class FailureCount:
    """Counts failed decompositions, and raises at the `limit`-th in a row of one factor."""

    def __init__(self, limit: int) -> None:
        check_count("max_failures", limit)
        self.limit = limit
        self.total = 0
        self._in_a_row: dict[str, int] = {}

    def success(self, factor: str) -> None:
        """The factor was decomposed: its failures in a row start again at 0."""
        self._in_a_row.pop(factor, None)

    def failure(self, factor: str, error: DecompositionError) -> None:
        """Count a failure and log it. RuntimeError if it is the factor's `limit`-th in a row."""
        self.total += 1
        row = self._in_a_row[factor] = self._in_a_row.get(factor, 0) + 1
        if row >= self.limit:
            raise RuntimeError(
                f"{factor}: {row} decompositions failed in a row ({error}); check the gradients, "
                "or raise eps"
            ) from error
        logger.warning(
            "%s: decomposition failed, %d in a row (%s); the old one is kept", factor, row, error
        )
