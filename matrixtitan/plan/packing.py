"""Bin packing in two prices, bytes and FLOPs: longest processing time first, then swaps.

Owns the search. It knows loads and the number of ranks, and no parameter. Ranks are interchangeable
here, so a packing is a multiset of rank contents. Few contents differ, so thousands of ranks cost
little. Next: `dealing.py`, which turns contents into owners.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CLEAR_MARGIN = 1.02
"""A packing of cut parameters must beat one of whole parameters by this factor, since each cut
costs messages."""

MAX_SWAPS = 1000
"""Limit on improving swaps. Each is applied to all ranks with the same contents at once."""

NOTHING = -1
"""In place of the number of a load: no piece comes back in a swap."""


class Load(NamedTuple):
    """What one piece costs the rank that holds it."""

    bytes: int
    flops: int


Content = tuple[int, ...]
"""How many pieces of each load one rank holds, in the order of `Packing.loads`."""


@dataclass(frozen=True)
class Packing:
    """How many ranks have which content.

    `floor`, in bytes: the fullest rank holds at least this much once the tail is poured.
    """

    loads: tuple[Load, ...]
    contents: Counter[Content]
    floor: int

    def weigh(self, content: Content) -> Load:
        return _weigh(self.loads, content)

    @property
    def max_bytes(self) -> int:
        return max(self.floor, max(self.weigh(content).bytes for content in self.contents))

    @property
    def max_flops(self) -> int:
        return max(self.weigh(content).flops for content in self.contents)

    def clearly_better_than(self, other: Packing) -> bool:
        """Whether this packing beats `other` by more than CLEAR_MARGIN.

        It beats it in bytes, or, where bytes are equal within the margin, in FLOPs.
        """
        if self.max_bytes * CLEAR_MARGIN < other.max_bytes:
            return True
        return (
            self.max_bytes <= other.max_bytes * CLEAR_MARGIN
            and self.max_flops * CLEAR_MARGIN < other.max_flops
        )

    def ranks(self) -> list[Counter[Load]]:
        """The content of each rank; ranks with most FLOPs come first."""
        order = sorted(
            self.contents, key=lambda content: (self.weigh(content)[::-1], content), reverse=True
        )
        return [
            Counter({load: count for load, count in zip(self.loads, content, strict=True) if count})
            for content in order
            for _ in range(self.contents[content])
        ]


def best_packing(pieces: Counter[Load], ranks: int, poured: int) -> Packing:
    """Pack `pieces` on `ranks` ranks.

    It minimises the bytes of the fullest rank, then, at no more bytes, the FLOPs of the busiest.
    `poured` bytes of cuttable tail are spread afterwards wherever there is room, so a rank's bytes
    below the level that they reach cost nothing.
    """
    loads = tuple(sorted(pieces, reverse=True))
    counts = [pieces[load] for load in loads]
    total = _weigh(loads, counts)
    floor = -(-(poured + total.bytes) // ranks)
    target = max([-(-total.flops // ranks), *(load.flops for load in loads)])
    by_bytes = _improve(loads, _longest_first(loads, counts, ranks, "bytes"), "bytes", floor, None)
    least = Packing(loads, by_bytes, floor).max_bytes
    starts = (by_bytes, _longest_first(loads, counts, ranks, "flops", least))
    packings = [
        Packing(loads, _improve(loads, start, "flops", target, least), floor) for start in starts
    ]
    return min(packings, key=lambda packing: (max(packing.max_bytes, least), packing.max_flops))


def water_level(held: Sequence[int], poured: int) -> int:
    """The level that `poured` bytes reach over ranks that hold `held`, rounded up."""
    below = 0
    ordered = sorted(held)
    for filled, height in enumerate(ordered, start=1):
        below += height
        level = -(-(poured + below) // filled)
        if filled == len(ordered) or level <= ordered[filled]:
            return level
    raise ValueError("no ranks to pour onto")


def _weigh(loads: Sequence[Load], content: Iterable[int]) -> Load:
    weights = [
        (load.bytes * n, load.flops * n) for load, n in zip(loads, content, strict=True) if n
    ]
    return Load(sum(w[0] for w in weights), sum(w[1] for w in weights))


def _longest_first(
    loads: Sequence[Load], counts: Sequence[int], ranks: int, by: str, cap: int | None = None
) -> Counter[Content]:
    """Longest processing time first: the heaviest piece left goes to the rank that has least.

    With a `cap` in bytes, ranks that the piece would bring over it are left out. Where no rank has
    room, the piece goes to the rank with the fewest bytes. Swaps may mend that, or the caller
    rejects the packing.
    """
    primary, second = (0, 1) if by == "bytes" else (1, 0)
    held = [[0] * len(loads) for _ in range(ranks)]
    heap = [(0, 0, rank) for rank in range(ranks)]
    order = sorted(
        range(len(loads)), key=lambda k: (loads[k][primary], loads[k][second]), reverse=True
    )
    for k in order:
        load = loads[k]
        # ranks without room for one more piece of this load
        full = []
        for _ in range(counts[k]):
            while heap and cap is not None and _bytes(heap[0], by) + load.bytes > cap:
                full.append(heapq.heappop(heap))
            if heap:
                entry = heapq.heappop(heap)
            else:
                entry = min(full, key=lambda entry: (_bytes(entry, by), entry))
                full.remove(entry)
            held[entry[2]][k] += 1
            after = (entry[0] + load[primary], entry[1] + load[second], entry[2])
            if cap is not None and not heap and _bytes(after, by) > cap:
                full.append(after)
            else:
                heapq.heappush(heap, after)
        for entry in full:
            heapq.heappush(heap, entry)
    return Counter(tuple(content) for content in held)


def _bytes(entry: tuple[int, int, int], by: str) -> int:
    return entry[0] if by == "bytes" else entry[1]


def _improve(
    loads: Sequence[Load], contents: Counter[Content], by: str, target: int, cap: int | None
) -> Counter[Content]:
    """Move or swap single pieces between the heaviest rank and others until it is at `target`.

    `target` is in the price `by`. Each swap strictly lowers the heavier of the two ranks. With a
    `cap` in bytes, no swap brings a rank over it.
    """
    primary = 0 if by == "bytes" else 1
    contents = Counter(contents)
    for _ in range(MAX_SWAPS):
        weights = {content: _weigh(loads, content) for content in contents}
        hot = max(contents, key=lambda content: (weights[content][primary], content))
        if weights[hot][primary] <= target:
            break
        swap = min(_swaps(loads, weights, hot, primary, cap), default=None)
        if swap is None:
            break
        times = min(contents[hot], contents[swap.cold])
        contents[hot] -= times
        contents[swap.cold] -= times
        contents[_changed(hot, swap.give, swap.take)] += times
        contents[_changed(swap.cold, swap.take, swap.give)] += times
        # drop contents that no rank has any more
        contents = +contents
    return contents


class _Swap(NamedTuple):
    """The heaviest rank gives one piece to a rank with content `cold`, and takes one or NOTHING.

    `heavier` is the larger price of the two ranks afterwards. `give` and `take` index the loads.
    """

    heavier: int
    cold: Content
    give: int
    take: int


def _swaps(
    loads: Sequence[Load], weights: dict[Content, Load], hot: Content, primary: int, cap: int | None
) -> Iterator[_Swap]:
    """Every swap after which both ranks are below the heaviest rank's present price."""
    before = weights[hot]
    given = [k for k, count in enumerate(hot) if count]
    for cold, weight in weights.items():
        for give in given if cold != hot else ():
            for take in (NOTHING, *(k for k, count in enumerate(cold) if count)):
                back = loads[take] if take != NOTHING else Load(0, 0)
                moved = Load(loads[give].bytes - back.bytes, loads[give].flops - back.flops)
                heavier = max(before[primary] - moved[primary], weight[primary] + moved[primary])
                fits = (
                    cap is None
                    or max(before.bytes - moved.bytes, weight.bytes + moved.bytes) <= cap
                )
                if heavier < before[primary] and fits:
                    yield _Swap(heavier, cold, give, take)


def _changed(content: Content, out: int, into: int) -> Content:
    changed = list(content)
    for load, difference in ((out, -1), (into, 1)):
        if load != NOTHING:
            changed[load] += difference
    return tuple(changed)
