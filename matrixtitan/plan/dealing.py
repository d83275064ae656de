"""Which matrix goes to which rank, once the packing has fixed how much of each price a rank holds.

Owns two choices that leave every rank's bytes and FLOPs as they are: equal shapes are kept
together, for batched products, and the matrices of neighbouring units are spread over ranks, so
that no rank sends, or lacks, much of both alone. It never changes the balance: `packing.py` made it. `planner.py`
calls both.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from matrixtitan.plan.packing import Load

EXCHANGE_BUDGET = 300_000
"""Exchanges between units tried at most: a bound on planning time that does not depend on the
machine."""


class Kind(NamedTuple):
    """Pieces of one kind are interchangeable between ranks."""

    shape: tuple[int, ...]  # of one block
    blocks: int
    numel: int
    load: Load


class Piece(NamedTuple):
    """Blocks of one parameter that travel together."""

    param: int  # its place in the specs
    fqn: str
    unit: str
    kind: Kind


def deal(
    pieces: Sequence[Piece], ranks: Sequence[Counter[Load]], spread_units: bool = True
) -> list[int]:
    """The rank of each piece; `ranks` says how many pieces of each load a rank takes.

    `spread_units`: also exchange owners between units, the slow part.
    """
    owners = _greedy(pieces, _shapes_together(pieces, ranks))
    if spread_units:
        _exchange(pieces, owners, len(ranks))
    return owners


def _shapes_together(
    pieces: Sequence[Piece], ranks: Sequence[Counter[Load]]
) -> dict[Kind, dict[int, int]]:
    """Slots of each kind: rank -> pieces.

    Kinds of one load fill the ranks in turn, so that of any two neighbours in that order one rank
    at most has both.
    """
    counts = Counter(piece.kind for piece in pieces)
    queues: defaultdict[Load, list[Kind]] = defaultdict(list)
    for kind in sorted(counts, reverse=True):
        queues[kind.load].append(kind)
    slots: defaultdict[Kind, dict[int, int]] = defaultdict(dict)
    for rank, wanted in enumerate(ranks):
        for load, count in wanted.items():
            while count:
                kind = queues[load][-1]
                taken = min(count, counts[kind])
                slots[kind][rank] = taken
                count -= taken
                counts[kind] -= taken
                if not counts[kind]:
                    queues[load].pop()
    return slots


def _greedy(pieces: Sequence[Piece], slots: dict[Kind, dict[int, int]]) -> list[int]:
    """Unit by unit, large pieces first, each to the rank with a slot for it that holds least of the
    unit and of the one before: what a link carries of one follows the other's without a gap.

    Ties go to the rank with most slots left, so that the last units still have a choice, then to
    the lowest rank.
    """
    units: dict[str, dict[Kind, list[int]]] = {}
    for number, piece in enumerate(pieces):
        units.setdefault(piece.unit, {}).setdefault(piece.kind, []).append(number)
    owners = [0] * len(pieces)
    before: Counter[int] = Counter()  # what ranks hold of the unit before
    for kinds in units.values():
        shares = before.copy()
        mine: Counter[int] = Counter()
        for kind in sorted(kinds, key=lambda kind: (-kind.numel, kind)):
            left = slots[kind]
            heap = [(shares[rank], -count, rank) for rank, count in left.items()]
            heapq.heapify(heap)
            for number in sorted(kinds[kind], key=lambda number: (pieces[number].fqn, number)):
                _, _, rank = heapq.heappop(heap)
                owners[number] = rank
                shares[rank] += kind.numel
                mine[rank] += kind.numel
                left[rank] -= 1
                if left[rank]:
                    heapq.heappush(heap, (shares[rank], -left[rank], rank))
                else:
                    del left[rank]
        before = mine
    return owners


def _exchange(pieces: Sequence[Piece], owners: list[int], world_size: int) -> None:
    """Let two units exchange the owners of pieces of one kind while that evens what ranks hold of
    two neighbouring units, within a budget.

    Unevenness is the sum of squares of what ranks lack to the mean of such a pair: a rank that holds
    nothing of it must receive all of it, while others wait. What a rank has beyond the mean is
    counted as the others' lack.
    """
    order = {unit: number for number, unit in enumerate(dict.fromkeys(p.unit for p in pieces), 1)}
    places = [order[piece.unit] for piece in pieces]
    shares = [[0] * world_size for _ in range(len(order) + 2)]  # an empty unit at either end
    kinds: defaultdict[Kind, list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        shares[places[number]][owners[number]] += piece.kind.numel
        kinds[piece.kind].append(number)
    totals = [sum(share) for share in shares]
    means = [sum(two) // world_size for two in pairwise(totals)]  # of each pair of neighbours
    means[0] = means[-1] = 0  # those at the ends are none

    def shift(unit: int, rank: int, change: int) -> int:
        """Let `rank` hold `change` more of `unit`; how much less uneven both pairs with it are then."""
        before, at, after = shares[unit - 1], shares[unit], shares[unit + 1]
        held = at[rank]
        at[rank] = held + change
        gained = 0
        for lack in (means[unit - 1] - before[rank] - held, means[unit] - after[rank] - held):
            if lack > 0:
                gained += lack * lack
            if lack > change:
                gained -= (lack - change) * (lack - change)
        return gained

    budget, improved = EXCHANGE_BUDGET, True
    while improved and budget > 0:
        improved = False
        for number, piece in enumerate(pieces):
            unit, weight = places[number], piece.kind.numel
            for peer in kinds[piece.kind]:
                other, here, there = places[peer], owners[number], owners[peer]
                if other == unit or there == here:
                    continue
                budget -= 1
                gained = shift(unit, here, -weight) + shift(unit, there, weight)
                gained += shift(other, there, -weight) + shift(other, here, weight)
                if gained > 0:
                    owners[number], owners[peer], improved = there, here, True
                    continue
                for place, holds in ((unit, weight), (other, -weight)):
                    shares[place][here] += holds
                    shares[place][there] -= holds
            if budget < 0:
                return
