"""Which window comes when: pure functions of an index, so any place is reached at once.

Owns the shuffle (a keyed permutation that needs no memory) and the mixture of weighted sources.
Reads no token. Next: `dataset.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MASK64 = (1 << 64) - 1
_ROUNDS = 8
MIXTURE_PERIOD = 10_000
"""Weights are rounded to multiples of 1 / MIXTURE_PERIOD."""


def _mix(value: int) -> int:
    """Finaliser of splitmix64 (Steele, Lea and Flood, 2014): 64 bits in, 64 well mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def make_key(*parts: int) -> int:
    """64 bits that depend on every part and on their order."""
    key = 0
    for part in parts:
        key = _mix(key ^ (part & _MASK64))
    return key


def permute(index: int, size: int, key: int) -> int:
    """The place of `index` in a shuffle of range(size); each `key` gives another shuffle.

    A Feistel network on the bits of an index permutes range(2^bits), the next power of two. A
    result outside range(size) is permuted again until it is inside (cycle walking; Black and
    Rogaway, 2002). This takes fewer than 2 rounds on average.
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} is not in range({size})")
    bits = (size - 1).bit_length()
    if bits < 2:
        return index ^ (key & bits)  # one element, or two
    while True:
        index = _feistel(index, bits, key)
        if index < size:
            return index


def _feistel(value: int, bits: int, key: int) -> int:
    low_bits = bits // 2
    high, low = value >> low_bits, value & ((1 << low_bits) - 1)
    for number in range(0, _ROUNDS, 2):
        high ^= _mix(key ^ _mix(low << 4 | number)) & ((1 << (bits - low_bits)) - 1)
        low ^= _mix(key ^ _mix(high << 4 | (number + 1))) & ((1 << low_bits) - 1)
    return high << low_bits | low


class Place(NamedTuple):
    """The window number `window` of a source, read for the (`epoch` + 1)-th time."""

    source: int
    window: int
    epoch: int


class WindowOrder:
    """The endless sequence of windows of a mixture of sources.

    Sources take turns so that after any number of windows each source has had its share, give or
    take about one window. Every source is shuffled anew in each of its epochs, with a key made of
    (seed, source, epoch).

    `sizes`: number of windows of each source, all at least 1. `weights`: relative to each other,
    all above 0.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes = list(sizes)
        self.turns = _turns(weights)
        self.seed = seed
        self._source = _interleave(self.turns)
        self._offsets = [
            np.flatnonzero(self._source == source) for source in range(len(self.turns))
        ]
        # for each turn of the period, how often its source came before
        self._nth = np.empty(len(self._source), dtype=np.int64)
        for offsets in self._offsets:
            self._nth[offsets] = np.arange(len(offsets))

    def place(self, index: int) -> Place:
        """The window at `index` of the stream."""
        period, offset = divmod(index, len(self._source))
        source = int(self._source[offset])
        count = period * self.turns[source] + int(self._nth[offset])
        epoch, position = divmod(count, self.sizes[source])
        return Place(
            source, permute(position, self.sizes[source], make_key(self.seed, source, epoch)), epoch
        )

    def first_repeat(self) -> int:
        """Index of the first window that comes a second time.

        The second epoch of a source begins there.
        """
        return min(self._index_of(source, size) for source, size in enumerate(self.sizes))

    def _index_of(self, source: int, count: int) -> int:
        """Index of the window of this source that `count` windows of the source precede."""
        period, nth = divmod(count, self.turns[source])
        return period * len(self._source) + int(self._offsets[source][nth])

    def most_in(self, count: int) -> list[int]:
        """The most windows that each source can have among `count` consecutive windows."""
        period = sum(self.turns)
        whole, rest = divmod(count, period)
        if rest == 0:
            return [whole * turns for turns in self.turns]
        most = []
        for source, turns in enumerate(self.turns):
            hits = np.tile(self._source == source, 2).cumsum()
            in_rest = int((hits[rest:] - hits[:-rest]).max())
            most.append(whole * turns + in_rest)
        return most


def _turns(weights: Sequence[float]) -> list[int]:
    """Number of turns of each source in a period, by largest remainder.

    ValueError for a weight that is too small for a single turn.
    """
    if len(weights) == 1:
        return [1]
    total = sum(weights)
    shares = [weight / total * MIXTURE_PERIOD for weight in weights]
    turns = [int(share) for share in shares]
    by_remainder = sorted(
        range(len(shares)), key=lambda source: (turns[source] - shares[source], source)
    )
    for source in by_remainder[: MIXTURE_PERIOD - sum(turns)]:
        turns[source] += 1
    for source, turn in enumerate(turns):
        if turn == 0:
            raise ValueError(
                f"data.sources[{source}]: weight {weights[source]} is less than "
                f"1/{MIXTURE_PERIOD} of the sum of weights, {total}; raise it or leave the source "
                "out"
            )
    return turns


def _interleave(turns: Sequence[int]) -> np.ndarray:
    """The source of each turn in a period, by smooth round robin.

    A turn goes to the source that is furthest behind its share.
    """
    schedule = np.empty(sum(turns), dtype=np.int32)
    credit = np.zeros(len(turns), dtype=np.int64)
    gain = np.asarray(turns, dtype=np.int64)
    for offset in range(len(schedule)):
        credit += gain
        source = int(credit.argmax())
        credit[source] -= len(schedule)
        schedule[offset] = source
    return schedule
