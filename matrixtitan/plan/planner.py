"""Who owns what: one global, deterministic placement of a model's parameters on the ranks of a
shard group.

Owns the objective: least resident bytes on the fullest rank, then least optimizer FLOPs on the
busiest one, then equal shapes together and units spread. It measures nothing, communicates nothing
and knows no model. Prices come from `cost.py`, words from `shard.py`;
`packing.py`, next, balances the ranks and `dealing.py` names the owners.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matrixtitan.plan.cost import BlockCost, CostSettings, block_cost
from matrixtitan.plan.dealing import Kind, Piece, deal
from matrixtitan.plan.packing import Load, best_packing, water_level
from matrixtitan.plan.shard import MatrixShard, ParamSpec, Plan, Segment

SMALL_TAIL = 1 << 20
"""A 1-D tail tensor up to this many elements is never cut: messages would cost more than the
balance gains."""
SLIVER = 200
"""What is under 1/200 of a rank's bytes is not worth a message of its own: such a tail tensor is
not cut, and a rank that lacks less gets no rows."""


@dataclass(frozen=True)
class PlanSettings(CostSettings):
    """Costs (see CostSettings) and how to weigh them.

    `egress_cap`: no rank may hold more than this many times the mean share of a unit (a unit's
    largest uncuttable piece apart), for transports bound by an owner's fan-out; None leaves units
    as balance puts them.
    """

    egress_cap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.egress_cap is not None and self.egress_cap < 1:
            raise ValueError(
                f"egress_cap {self.egress_cap} is below 1, the mean: nothing could meet it; "
                "use None for no cap"
            )


def make_plan(
    specs: Sequence[ParamSpec],
    world_size: int,
    settings: PlanSettings = PlanSettings(),
    *,
    spread_units: bool = True,
) -> Plan:
    """Place every parameter of `specs` (in the model's order) on `world_size` ranks.

    Pure and deterministic: ties are broken by fqn, then rank. `spread_units` False leaves out the
    exchanges that even each unit's shares out, which take most of the time and leave the matrices'
    balance as it is: for figures, not for training. Raises ValueError for a world size
    below 1, a parameter named twice, or an egress cap that cannot be met.
    """
    if world_size < 1:
        raise ValueError(f"world_size {world_size}: a plan needs at least one rank")
    repeated = [fqn for fqn, count in Counter(spec.fqn for spec in specs).items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} is given twice: a plan places each parameter once")
    costs = [block_cost(spec, settings) for spec in specs]
    placement = _Placement(specs, costs, world_size)
    placement.place_matrices(settings, spread_units)
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
        # by unit: elements on each rank
        self.units: defaultdict[str, list[int]] = defaultdict(lambda: [0] * world_size)
        self.total_bytes = sum(self._held_bytes(i) for i in range(len(specs)))
        self.unit_numel: Counter[str] = Counter()
        for spec in specs:
            self.unit_numel[spec.unit] += spec.numel
        filled = [i for i, spec in enumerate(specs) if spec.shape[0]]
        self.matrices = [i for i in filled if specs[i].role == "matrix"]
        self.small_tails = [i for i in filled if specs[i].role == "tail" and self._is_small(i)]
        self.large_tails = [i for i in filled if specs[i].role == "tail" and not self._is_small(i)]

    def _count(self, index: int) -> int:
        """Blocks of a parameter."""
        return self.specs[index].shape[0] // self.specs[index].block_rows

    def _held_bytes(self, index: int) -> int:
        """Resident bytes of a parameter, wherever it lies."""
        return self._count(index) * self.costs[index].resident.total

    def _is_small(self, index: int) -> bool:
        """True where cutting a tail tensor would cost messages and even out nothing."""
        shape = self.specs[index].shape
        sliver = self._held_bytes(index) * self.world_size * SLIVER <= self.total_bytes
        return sliver or (len(shape) == 1 and shape[0] <= SMALL_TAIL)

    def _give(self, index: int, rank: int, blocks: int) -> None:
        held = self.blocks[index]
        held[rank] = held.get(rank, 0) + blocks
        self.bytes[rank] += blocks * self.costs[index].resident.total
        self.units[self.specs[index].unit][rank] += blocks * self.costs[index].numel

    # ------------------------------------------------------------ matrices

    def place_matrices(self, settings: PlanSettings, spread_units: bool) -> None:
        """Pack whole matrices and stacks; cut 2D parameters between their heads only where that
        gains over 2%."""
        poured = self.total_bytes - sum(map(self._held_bytes, self.matrices))
        best = None
        cuts = [False]
        if any(len(self.specs[i].shape) == 2 and self._count(i) > 1 for i in self.matrices):
            cuts.append(True)
        for cut_heads in cuts:
            pieces = self._pieces(cut_heads)
            packing = best_packing(
                Counter(piece.kind.load for piece in pieces),
                self.world_size,
                poured,
            )
            if best is None or packing.clearly_better_than(best[1]):
                best = (pieces, packing)
        assert best is not None
        pieces, packing = best
        owners = deal(pieces, packing.ranks(), spread_units)
        for piece, rank in zip(pieces, owners, strict=True):
            self._give(piece.param, rank, piece.kind.blocks)
        if settings.egress_cap is not None:
            self._check_egress(pieces, settings.egress_cap)

    def _pieces(self, cut_heads: bool) -> list[Piece]:
        """What the matrices are cut into: 2D ones whole (or at heads), stacks at slices."""
        pieces = []
        for index in self.matrices:
            spec, cost, count = self.specs[index], self.costs[index], self._count(index)
            cut = len(spec.shape) > 2 or cut_heads
            number = min(count, self.world_size) if cut else 1  # one a rank: even shares
            for piece in range(number):  # sizes differ by one block at most
                blocks = count * (piece + 1) // number - count * piece // number
                shape = (spec.block_rows, *spec.shape[1:])
                load = Load(blocks * cost.resident.total, blocks * cost.flops)
                kind = Kind(shape, blocks, blocks * cost.numel, load)
                pieces.append(Piece(index, spec.fqn, spec.unit, kind))
        return pieces

    def _check_egress(self, pieces: Sequence[Piece], cap: float) -> None:
        largest: Counter[str] = Counter()
        for piece in pieces:
            largest[piece.unit] = max(largest[piece.unit], piece.kind.numel)
        for unit, shares in self.units.items():
            limit = max(cap * self.unit_numel[unit] / self.world_size, largest[unit])
            worst = max(range(self.world_size), key=lambda rank: (shares[rank], -rank))
            if shares[worst] > limit:
                raise ValueError(
                    f"egress_cap {cap} cannot be met: rank {worst} would hold {shares[worst]} "
                    f"elements of unit {unit!r}, over {limit:.0f}; raise the cap or use a "
                    "transport that is not bound by fan-out"
                )

    # ------------------------------------------------------------ tails

    def place_small_tails(self) -> None:
        """A unit's small tail tensors go together to one of its owners that is not full, or to the
        emptiest rank."""
        by_unit: dict[str, list[int]] = {}
        for index in self.small_tails:
            by_unit.setdefault(self.specs[index].unit, []).append(index)
        mean = self.total_bytes / self.world_size
        emptiest = [(held, rank) for rank, held in enumerate(self.bytes)]
        heapq.heapify(emptiest)
        for unit, indices in by_unit.items():
            needed = sum(map(self._held_bytes, indices))
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
        """Cut large tail tensors by rows in proportion to what each rank lacks below the level.

        Coarse rows first, so that fine ones even out the rounding.
        """
        order = sorted(
            self.large_tails, key=lambda i: (-self.costs[i].resident.total, self.specs[i].fqn)
        )
        left = sum(map(self._held_bytes, order))
        receivers = self._receivers(left)
        for index in order:
            level = water_level([self.bytes[rank] for rank in receivers], left)
            lacks = [max(0, level - self.bytes[rank]) for rank in receivers]
            left -= self._held_bytes(index)
            parts = _proportional(self._count(index), lacks)
            for rank, blocks in zip(receivers, parts, strict=True):
                if blocks:
                    self._give(index, rank, blocks)

    def _receivers(self, poured: int) -> list[int]:
        """Ranks worth pouring onto: all, or those that lack more than a sliver if the level bears
        it."""
        level = water_level(self.bytes, poured)
        ranks = [rank for rank, held in enumerate(self.bytes) if (level - held) * SLIVER > level]
        if not ranks or water_level([self.bytes[rank] for rank in ranks], poured) * SLIVER > (
            level * (SLIVER + 1)
        ):
            return list(range(self.world_size))
        return ranks

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


def _proportional(count: int, weights: Sequence[int]) -> list[int]:
    """`count` cut into whole parts in proportion to `weights`, each within one of its due; equal
    parts if all are 0."""
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
