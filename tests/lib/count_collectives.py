"""Assertions about the collectives that some code issues, by `strategies/collective_counter.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from matrixtitan.strategies.collective_counter import Collective, CollectiveCounter

__all__ = ["Collective", "CollectiveCounter", "no_collectives"]


@contextmanager
def no_collectives() -> Iterator[None]:
    """Fail with the list of operations if any collective, send or barrier is issued inside."""
    counter = CollectiveCounter()
    with counter:
        yield
    assert not counter.events, f"expected no communication, saw {counter.events}"
