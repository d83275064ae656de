"""Which matrix goes to which rank, once the packing has fixed how much of each price a rank holds.

Owns two choices that leave every rank's bytes and FLOPs as they are: equal shapes are kept
together, for batched products, and the matrices of a unit are spread over ranks, so that no owner
sends, or lacks, much of it alone. It never changes the balance: `packing.py` made it. `planner.py`
calls both.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from matrixtitan.plan.packing import Load

EXCHANGE_BUDGET = 300_000
"""Exchanges between units weighed at most: a bound on planning time that does not depend on the
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


def deal(pieces: Sequence[Piece], ranks: Sequence[Counter[Load]]) -> list[int]:
    """The rank of each piece; `ranks` says how many pieces of each load a rank takes."""
    owners = _greedy(pieces, _shapes_together(pieces, ranks))
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
    unit.

    Ties go to the rank with most slots left, so that the last units still have a choice, then to
    the lowest rank.
    """
    units: dict[str, dict[Kind, list[int]]] = {}
    for number, piece in enumerate(pieces):
        units.setdefault(piece.unit, {}).setdefault(piece.kind, []).append(number)
    owners = [0] * len(pieces)
    for kinds in units.values():
        shares: Counter[int] = Counter()
        for kind in sorted(kinds, key=lambda kind: (-kind.numel, kind)):
            left = slots[kind]
            heap = [(shares[rank], -count, rank) for rank, count in left.items()]
            heapq.heapify(heap)
            for number in sorted(kinds[kind], key=lambda number: (pieces[number].fqn, number)):
                _, _, rank = heapq.heappop(heap)
                owners[number] = rank
                shares[rank] += kind.numel
                left[rank] -= 1
                if left[rank]:
                    heapq.heappush(heap, (shares[rank], -left[rank], rank))
                else:
                    del left[rank]
    return owners


def _exchange(pieces: Sequence[Piece], owners: list[int], world_size: int) -> None:
    """Let two units exchange the owners of pieces of one kind while that evens their shares, within
    a budget.

    Evenness is the sum of squared shares: moving weight w from rank a to b in one unit, and back in
    the other, lowers it where (a - b) in the first plus (b - a) in the second is over 2 w. Only a
    rank with two pieces of a unit can gain.
    """
    shares: defaultdict[str, list[int]] = defaultdict(lambda: [0] * world_size)
    held: Counter[tuple[str, int]] = Counter()
    kinds: defaultdict[Kind, list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        shares[piece.unit][owners[number]] += piece.kind.numel
        held[piece.unit, owners[number]] += 1
        kinds[piece.kind].append(number)
    budget, improved = EXCHANGE_BUDGET, True
    while improved and budget > 0:
        improved = False
        for number, piece in enumerate(pieces):
            if held[piece.unit, owners[number]] < 2:
                continue
            mine, here = shares[piece.unit], owners[number]
            peers = kinds[piece.kind]
            budget -= len(peers)
            if budget < 0:
                return
            best, partner = 2 * piece.kind.numel, None
            for peer in peers:
                there = owners[peer]
                theirs = shares[pieces[peer].unit]
                gain = mine[here] - mine[there] + theirs[there] - theirs[here]
                if gain > best and pieces[peer].unit != piece.unit:
                    best, partner = gain, peer
            if partner is None:
                continue
            improved = True
            there, unit, other = owners[partner], piece.unit, pieces[partner].unit
            owners[number], owners[partner] = there, here
            for name, source, target in ((unit, here, there), (other, there, here)):
                shares[name][source] -= piece.kind.numel
                shares[name][target] += piece.kind.numel
                held[name, source] -= 1
                held[name, target] += 1
