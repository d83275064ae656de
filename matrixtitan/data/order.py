"""Which window comes when: pure functions of an index, so any place in the stream is reached at
once.

Owns the shuffle (a keyed permutation that needs no memory) and the mixture of weighted sources.
Never reads a token. Next file: `dataset.py`."""

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
    """Where a shuffle of range(size) puts `index`; each `key` is another shuffle.

    A Feistel network on the bits of an index permutes the next power of two; an image outside of
    range(size) is permuted again until one is inside (cycle walking; Black and Rogaway, 2002),
    under 2 rounds on average."""
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
    """A window of a source: the `window`-th of its stream, in its pass number `epoch`."""

    source: int
    window: int
    epoch: int


class WindowOrder:
    """The endless sequence of windows of a mixture.

    Sources take turns so that after any number of windows each had its share to within one or so;
    every source is shuffled anew in each of its epochs, with a key of (seed, source, epoch).

    Args: `sizes`: windows of each source, all at least 1. `weights`: relative, all above 0.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes = list(sizes)
        self.turns = _turns(weights)
        self.seed = seed
        self._source = _interleave(self.turns)
        self._offsets = [
            np.flatnonzero(self._source == source) for source in range(len(self.turns))
        ]
        self._nth = np.empty(
            len(self._source), dtype=np.int64
        )  # how often its source came before in the period
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
        """Index of the first window that came before: some source's second epoch begins there."""
        return min(self._index_of(source, size) for source, size in enumerate(self.sizes))

    def _index_of(self, source: int, count: int) -> int:
        """Index of the window that `count` windows of this source come before."""
        period, nth = divmod(count, self.turns[source])
        return period * len(self._source) + int(self._offsets[source][nth])

    def most_in(self, count: int) -> list[int]:
        """For each source, the most windows that it can have among `count` consecutive ones."""
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
    """Turns of each source in a period, by largest remainder. ValueError for a
    weight that is too small to have one."""
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
    """The source of each turn in a period: always the one that is furthest behind
    its share (smooth round robin)."""
    schedule = np.empty(sum(turns), dtype=np.int32)
    credit = np.zeros(len(turns), dtype=np.int64)
    gain = np.asarray(turns, dtype=np.int64)
    for offset in range(len(schedule)):
        credit += gain
        source = int(credit.argmax())
        credit[source] -= len(schedule)
        schedule[offset] = source
    return schedule
