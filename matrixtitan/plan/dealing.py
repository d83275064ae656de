"""Which matrix goes to which rank, once the packing has fixed how much of each price a rank holds.

Owns two choices that leave every rank's bytes and FLOPs as they are. Equal shapes are kept
together, so that products can be batched. The matrices of neighbouring units are spread over the
ranks, so that no rank must send most of both, or receive most of both. This module never changes
the balance, which `packing.py` made. `planner.py` calls both.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from matrixtitan.plan.packing import Load

SWAP_BUDGET = 300_000
"""Limit on the swaps between units that are tried.

It bounds the time to plan. A time limit would make the plan depend on the machine.
"""


class PieceKind(NamedTuple):
    """What pieces have in common that ranks may swap without a change of balance."""

    shape: tuple[int, ...]
    """Of one block."""
    blocks: int
    numel: int
    load: Load


class Piece(NamedTuple):
    """Blocks of one parameter that get the same owner."""

    param: int
    """The parameter's index in the specs."""
    fqn: str
    unit: str
    kind: PieceKind


def deal(
    pieces: Sequence[Piece], ranks: Sequence[Counter[Load]], spread_units: bool = True
) -> list[int]:
    """The rank of each piece.

    `ranks[r]` says how many pieces of each load rank r takes. `spread_units`: also swap owners
    between units, which takes most of the time.
    """
    owners = _greedy(pieces, _shapes_together(pieces, ranks))
    if spread_units:
        _swap_between_units(pieces, owners, len(ranks))
    return owners


def _shapes_together(
    pieces: Sequence[Piece], ranks: Sequence[Counter[Load]]
) -> dict[PieceKind, dict[int, int]]:
    """How many pieces of each kind each rank takes: kind -> rank -> pieces.

    Kinds of the same load fill the ranks one kind after another, so at most one rank has pieces of
    both where one kind ends and the next begins.
    """
    counts = Counter(piece.kind for piece in pieces)
    queues: defaultdict[Load, list[PieceKind]] = defaultdict(list)
    for kind in sorted(counts, reverse=True):
        queues[kind.load].append(kind)
    quotas: defaultdict[PieceKind, dict[int, int]] = defaultdict(dict)
    for rank, wanted in enumerate(ranks):
        for load, count in wanted.items():
            while count:
                kind = queues[load][-1]
                taken = min(count, counts[kind])
                quotas[kind][rank] = taken
                count -= taken
                counts[kind] -= taken
                if not counts[kind]:
                    queues[load].pop()
    return quotas


def _greedy(pieces: Sequence[Piece], quotas: dict[PieceKind, dict[int, int]]) -> list[int]:
    """The rank of each piece: unit by unit, large pieces first.

    A piece goes to the rank that holds least of its unit and of the unit before, among the ranks
    that still take its kind. Both units count, because a link carries one right after the other.
    Ties go to the rank that takes most pieces of the kind still, so that the last units have a
    choice, and then to the lowest rank.
    """
    units: dict[str, dict[PieceKind, list[int]]] = {}
    for number, piece in enumerate(pieces):
        units.setdefault(piece.unit, {}).setdefault(piece.kind, []).append(number)
    owners = [0] * len(pieces)
    # elements that ranks hold of the unit before
    before: Counter[int] = Counter()
    for kinds in units.values():
        shares = before.copy()
        mine: Counter[int] = Counter()
        for kind in sorted(kinds, key=lambda kind: (-kind.numel, kind)):
            left = quotas[kind]
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


def _swap_between_units(pieces: Sequence[Piece], owners: list[int], world_size: int) -> None:
    """Swap owners between pieces of one kind in two units, while that levels the units' shares.

    The measure is summed over all pairs of neighbouring units and over the ranks: the square of
    what a rank lacks to the mean of the pair. A rank that holds nothing of a pair must receive all
    of it while others wait. What a rank has beyond the mean is counted as the others' lack. Changes
    `owners` in place, and stops after SWAP_BUDGET trials.
    """
    order = {unit: number for number, unit in enumerate(dict.fromkeys(p.unit for p in pieces), 1)}
    places = [order[piece.unit] for piece in pieces]
    # elements of each unit on each rank, with an empty unit at either end
    shares = [[0] * world_size for _ in range(len(order) + 2)]
    kinds: defaultdict[PieceKind, list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        shares[places[number]][owners[number]] += piece.kind.numel
        kinds[piece.kind].append(number)
    totals = [sum(share) for share in shares]
    # a rank's mean share of each pair of neighbours; the pairs with an empty unit do not count
    means = [sum(two) // world_size for two in pairwise(totals)]
    means[0] = means[-1] = 0

    def shift(unit: int, rank: int, change: int) -> int:
        """Let `rank` hold `change` elements more of `unit`; return how far the measure falls."""
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

    budget, improved = SWAP_BUDGET, True
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
                # undo the four shifts
                for place, holds in ((unit, weight), (other, -weight)):
                    shares[place][here] += holds
                    shares[place][there] -= holds
            if budget < 0:
                return
