"""Who owns what: one global, deterministic placement of a model's parameters on the ranks of a shard group.

Owns the objective: least resident bytes on the fullest rank (to a tolerance), then least optimizer FLOPs on the busiest
one, then equal shapes together and units spread. It measures nothing, communicates nothing and knows no model.
Prices come from `cost.py`, words from `shard.py`; `packing.py`, next, holds the bin packing.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matrixtitan.plan.cost import BlockCost, CostSettings, block_cost
from matrixtitan.plan.packing import Load, best_packing, water_level
from matrixtitan.plan.shard import MatrixShard, ParamSpec, Plan, Segment

SMALL_TAIL = 1 << 20
"""A 1-D tail tensor up to this many elements is never cut: a message costs more than the balance gains."""
PIECES_PER_RANK = 8
"""A stack of matrices is cut until a piece is this small a part of a rank's mean load: finer gains nothing."""
SLIVER = 200
"""Tail rows are not poured onto a rank that is within 1/200 of the level: a message for nothing."""


@dataclass(frozen=True)
class PlanSettings(CostSettings):
    """Costs (see CostSettings) and how to weigh them.

    `bytes_tolerance`: how far above the least possible the fullest rank's bytes may be, where that saves optimizer time.
    `egress_cap`: no rank may hold more than this many times the mean share of a unit (a unit's largest uncuttable piece
    apart), for transports bound by an owner's fan-out; None leaves units as balance puts them.
    """

    bytes_tolerance: float = 0.02
    egress_cap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bytes_tolerance < 0:
            raise ValueError(f"bytes_tolerance {self.bytes_tolerance} is negative")
        if self.egress_cap is not None and self.egress_cap < 1:
            raise ValueError(
                f"egress_cap {self.egress_cap} is below 1, the mean: nothing could meet it; use None for no cap"
            )


class _Piece(NamedTuple):
    """Blocks of one parameter that travel together. Pieces of equal `shape` and `blocks` are interchangeable."""

    index: int  # of the parameter in the specs
    blocks: int
    shape: tuple[int, ...]  # of one block
    numel: int
    load: Load


def make_plan(
    specs: Sequence[ParamSpec], world_size: int, settings: PlanSettings = PlanSettings()
) -> Plan:
    """Place every parameter of `specs` (in the model's order) on `world_size` ranks.

    Pure and deterministic: ties are broken by fqn, then rank. Raises ValueError for a world size below 1, a parameter
    named twice, or an egress cap that cannot be met.
    """
    if world_size < 1:
        raise ValueError(f"world_size {world_size}: a plan needs at least one rank")
    repeated = [fqn for fqn, count in Counter(spec.fqn for spec in specs).items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} is given twice: a plan places each parameter once")
    costs = [block_cost(spec, settings) for spec in specs]
    placement = _Placement(specs, costs, world_size)
    placement.place_matrices(settings)
    placement.place_small_tails()
    placement.pour_large_tails()
    return placement.plan()


class _Placement:
    """Blocks of each parameter on each rank, while a plan is being made."""

    def __init__(
        self, specs: Sequence[ParamSpec], costs: Sequence[BlockCost], world_size: int
    ) -> None:
        self.specs = specs
        self.costs = costs
        self.world_size = world_size
        self.blocks: list[dict[int, int]] = [{} for _ in specs]  # by parameter: rank -> blocks
        self.bytes = [0] * world_size
        self.units: defaultdict[str, list[int]] = defaultdict(
            lambda: [0] * world_size
        )  # elements by rank
        self.total_bytes = sum(self._count(i) * cost.resident.total for i, cost in enumerate(costs))
        self.total_flops = sum(self._count(i) * cost.flops for i, cost in enumerate(costs))
        self.unit_numel: Counter[str] = Counter()
        for spec in specs:
            self.unit_numel[spec.unit] += spec.numel
        filled = [i for i, spec in enumerate(specs) if spec.shape[0]]
        self.matrices = [i for i in filled if specs[i].role == "matrix"]
        self.small_tails = [
            i for i in filled if specs[i].role == "tail" and self._is_small(specs[i])
        ]
        self.large_tails = [
            i for i in filled if specs[i].role == "tail" and not self._is_small(specs[i])
        ]

    def _count(self, index: int) -> int:
        """Blocks of a parameter."""
        return self.specs[index].shape[0] // self.specs[index].block_rows

    @staticmethod
    def _is_small(spec: ParamSpec) -> bool:
        return len(spec.shape) == 1 and spec.numel <= SMALL_TAIL

    def _give(self, index: int, rank: int, blocks: int) -> None:
        held = self.blocks[index]
        held[rank] = held.get(rank, 0) + blocks
        self.bytes[rank] += blocks * self.costs[index].resident.total
        self.units[self.specs[index].unit][rank] += blocks * self.costs[index].numel

    # ------------------------------------------------------------ matrices

    def place_matrices(self, settings: PlanSettings) -> None:
        """Pack whole matrices and stacks; cut 2D parameters between their heads only where that gains over 2%."""
        poured = self.total_bytes - sum(
            self._count(i) * self.costs[i].resident.total for i in self.matrices
        )
        best = None
        cuts = [False]
        if any(len(self.specs[i].shape) == 2 and self._count(i) > 1 for i in self.matrices):
            cuts.append(True)
        for cut_heads in cuts:
            pieces = self._pieces(cut_heads)
            packing = best_packing(
                Counter(piece.load for piece in pieces),
                self.world_size,
                poured,
                settings.bytes_tolerance,
            )
            if best is None or packing.clearly_better_than(best[1], settings.bytes_tolerance):
                best = (pieces, packing)
        assert best is not None
        slots = _shapes_together(best[0], best[1].ranks())
        self._deal(best[0], slots)
        if settings.egress_cap is not None:
            self._check_egress(best[0], settings.egress_cap)

    def _pieces(self, cut_heads: bool) -> list[_Piece]:
        """What the matrices are cut into: 2D ones whole (or at heads), stacks at slices."""
        pieces = []
        for index in self.matrices:
            spec, cost, count = self.specs[index], self.costs[index], self._count(index)
            size = count
            if len(spec.shape) > 2 or cut_heads:
                size = max(1, min(count, self._piece_blocks(index)))
            number = -(-count // size)
            for piece in range(number):  # sizes differ by one block at most
                blocks = count * (piece + 1) // number - count * piece // number
                shape = (spec.block_rows, *spec.shape[1:])
                load = Load(blocks * cost.resident.total, blocks * cost.flops)
                pieces.append(_Piece(index, blocks, shape, blocks * cost.numel, load))
        return pieces

    def _piece_blocks(self, index: int) -> int:
        """Blocks of a piece small beside a rank's mean load and beside its mean share of the unit."""
        cost, unit = self.costs[index], self.specs[index].unit
        limits = [
            self.total_bytes // (PIECES_PER_RANK * self.world_size * max(1, cost.resident.total)),
            self.unit_numel[unit] // (self.world_size * max(1, cost.numel)),
        ]
        if cost.flops:
            limits.append(self.total_flops // (PIECES_PER_RANK * self.world_size * cost.flops))
        return min(limits)

    def _deal(self, pieces: Sequence[_Piece], slots: list[Counter[tuple]]) -> None:
        """Hand pieces to ranks with a slot for their shape, each unit spread: balance is fixed, shares are not."""
        by_unit: dict[str, dict[tuple, list[_Piece]]] = {}
        for piece in pieces:
            kinds = by_unit.setdefault(self.specs[piece.index].unit, {})
            kinds.setdefault(_kind(piece), []).append(piece)
        open_ranks: defaultdict[tuple, dict[int, int]] = defaultdict(dict)
        for rank, counts in enumerate(slots):
            for kind, count in counts.items():
                open_ranks[kind][rank] = count
        for unit, kinds in by_unit.items():
            shares = self.units[unit]
            for kind in sorted(kinds, key=lambda kind: (-kinds[kind][0].numel, kind)):
                ranks = open_ranks[kind]
                heap = [(shares[rank], -left, rank) for rank, left in ranks.items()]
                heapq.heapify(heap)
                for piece in sorted(kinds[kind], key=lambda piece: self.specs[piece.index].fqn):
                    _, left, rank = heapq.heappop(heap)
                    self._give(piece.index, rank, piece.blocks)
                    ranks[rank] -= 1
                    if ranks[rank]:
                        heapq.heappush(heap, (shares[rank], left + 1, rank))
                    else:
                        del ranks[rank]

    def _check_egress(self, pieces: Sequence[_Piece], cap: float) -> None:
        largest: Counter[str] = Counter()
        for piece in pieces:
            unit = self.specs[piece.index].unit
            largest[unit] = max(largest[unit], piece.numel)
        for unit, shares in self.units.items():
            limit = max(cap * self.unit_numel[unit] / self.world_size, largest[unit])
            worst = max(range(self.world_size), key=lambda rank: (shares[rank], -rank))
            if shares[worst] > limit:
                raise ValueError(
                    f"egress_cap {cap} cannot be met: rank {worst} would hold {shares[worst]} elements of unit {unit!r},"
                    f" over {limit:.0f}; raise the cap or use a transport that is not bound by fan-out"
                )

    # ------------------------------------------------------------ tails

    def place_small_tails(self) -> None:
        """A unit's small tail tensors go together to one of its owners that is not full, or to the emptiest rank."""
        by_unit: dict[str, list[int]] = {}
        for index in self.small_tails:
            by_unit.setdefault(self.specs[index].unit, []).append(index)
        mean = self.total_bytes / self.world_size
        emptiest = [(held, rank) for rank, held in enumerate(self.bytes)]
        heapq.heapify(emptiest)
        for unit, indices in by_unit.items():
            needed = sum(self._count(i) * self.costs[i].resident.total for i in indices)
            owners = [
                (self.bytes[rank], rank)
                for rank, share in enumerate(self.units[unit])
                if share and self.bytes[rank] + needed <= mean
            ]
            while (
                emptiest[0][0] != self.bytes[emptiest[0][1]]
            ):  # stale: it was given something since
                heapq.heapreplace(emptiest, (self.bytes[emptiest[0][1]], emptiest[0][1]))
            _, rank = min(owners) if owners else emptiest[0]
            for index in indices:
                self._give(index, rank, self._count(index))

    def pour_large_tails(self) -> None:
        """Cut large tail tensors by rows in proportion to what each rank lacks below the common level.

        Coarse rows first, so that fine ones even out the rounding.
        """
        order = sorted(
            self.large_tails, key=lambda i: (-self.costs[i].resident.total, self.specs[i].fqn)
        )
        left = sum(self._count(i) * self.costs[i].resident.total for i in order)
        for index in order:
            level = water_level(self.bytes, left)
            lacks = [max(0, level - held) for held in self.bytes]
            coarse = [lack if lack * SLIVER > level else 0 for lack in lacks]
            left -= self._count(index) * self.costs[index].resident.total
            for rank, blocks in enumerate(
                _proportional(self._count(index), coarse if any(coarse) else lacks)
            ):
                if blocks:
                    self._give(index, rank, blocks)

    def plan(self) -> Plan:
        """Lay each parameter's blocks out in rank order, one segment a rank."""
        shards = []
        for spec, held in zip(self.specs, self.blocks, strict=True):
            segments, row = [], 0
            for rank in sorted(held):
                rows = held[rank] * spec.block_rows
                segments.append(Segment(rank, row, row + rows))
                row += rows
            shards.append(
                MatrixShard(
                    spec.fqn,
                    spec.shape,
                    spec.role,
                    spec.unit,
                    spec.block_rows,
                    tuple(segments),
                    spec.trainable,
                )
            )
        return Plan(self.world_size, tuple(shards))


def _kind(piece: _Piece) -> tuple[tuple[int, ...], int, Load]:
    return (piece.shape, piece.blocks, piece.load)


def _shapes_together(
    pieces: Sequence[_Piece], ranks: Sequence[Counter[Load]]
) -> list[Counter[tuple]]:
    """Slots for shapes on each rank, where the packing only fixed prices: shapes of one price fill the ranks in turn,

    so that at most one rank between two shapes has both, and batches of equal shapes are as large as can be.
    """
    left: defaultdict[Load, Counter[tuple]] = defaultdict(Counter)
    for piece in pieces:
        left[piece.load][_kind(piece)] += 1
    queues = {load: sorted(kinds.items(), reverse=True) for load, kinds in left.items()}
    slots: list[Counter[tuple]] = [Counter() for _ in ranks]
    for rank, counts in enumerate(ranks):
        for load, count in counts.items():
            queue = queues[load]
            while count:
                kind, available = queue.pop()
                taken = min(count, available)
                slots[rank][kind] += taken
                count -= taken
                if available > taken:
                    queue.append((kind, available - taken))
    return slots


def _proportional(count: int, weights: Sequence[int]) -> list[int]:
    """`count` cut into whole parts in proportion to `weights`, each within one of its due; equal parts if all are 0."""
    total = sum(weights)
    if not total:
        weights, total = [1] * len(weights), len(weights)
    parts, running, placed = [], 0, 0
    for weight in weights:
        running += weight
        reached = (2 * count * running + total) // (2 * total)  # rounded half up
        parts.append(reached - placed)
        placed = reached
    return parts
