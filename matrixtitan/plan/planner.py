"""Who owns what: a deterministic placement of all parameters on the ranks of a shard group.

Owns the objective, in this order: least resident bytes on the fullest rank; least optimizer FLOPs
on the busiest rank; equal shapes together and each unit spread over the ranks. It measures nothing,
communicates nothing and knows no model. Prices come from `cost.py`, and words from `shard.py`.
Next: `packing.py`, which balances the ranks, and `dealing.py`, which names the owners.

[Note: matrices first, then tails]
A matrix cannot be cut, so whole matrices leave the ranks uneven. The tail (AdamW's parameters) can
be cut at any row, so it fills up what is missing. Small tail tensors are not worth a cut and stay
whole. So `make_plan` places matrices, then small tails. Last it cuts the large tails (embedding,
output head) so that all ranks below one level are filled up to it (water-filling).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from matrixtitan.plan.cost import BlockCost, CostSettings, block_cost
from matrixtitan.plan.dealing import Piece, PieceKind, deal
from matrixtitan.plan.packing import Load, best_packing, water_level
from matrixtitan.plan.shard import MatrixShard, ParamSpec, Plan, Segment

SMALL_TAIL = 1 << 20
"""A 1-D tail tensor of up to this many elements is never cut: the messages would cost more than
the balance gains."""

SLIVERS_PER_RANK = 200
"""A sliver is 1/200 of a rank's bytes. Smaller tails are not cut, and a rank that lacks less gets
no rows: they would not pay for a message."""


@dataclass(frozen=True)
class PlanSettings(CostSettings):
    """Costs (see CostSettings), and an upper limit on a rank's share of a unit.

    `egress_cap`: upper limit on the elements of one unit that one rank holds, as a multiple of the
    mean over ranks. A rank's egress, the bytes that it sends when the unit is gathered, is in
    proportion to them, and the transport "star" takes as long as the largest egress. 0: no cap.

    A unit's largest piece that is not cut is always allowed: a matrix, or all small tail tensors of
    the unit. The cap does not change where matrices go, and a plan in which they exceed it is
    refused. It does change where tails go: rows of a large tail go to a rank only while the rank
    holds less than the limit, so the last row may exceed it.
    """

    egress_cap: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for problem in egress_cap_problems(self.egress_cap):
            raise ValueError(problem)


def egress_cap_problems(cap: float) -> Iterator[str]:
    """A sentence if `cap` is no egress cap."""
    if cap and not 1 <= cap < inf:
        yield f"egress_cap is {cap}; write 0 for no cap, or 1 (an even share) or more"


def make_plan(
    specs: Sequence[ParamSpec],
    world_size: int,
    settings: PlanSettings = PlanSettings(),
    *,
    spread_units: bool = True,
) -> Plan:
    """Place every parameter of `specs` (in the model's order) on `world_size` ranks.

    Pure and deterministic: ties are broken by fqn, then by rank. Swaps spread each unit over the
    ranks. `spread_units` False skips those swaps, which take most of the time and leave each rank's
    bytes and FLOPs of matrices as they are. Use it for predictions only.

    Raises ValueError for a world size below 1, a parameter named twice, or an egress cap that the
    plan exceeds.
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
    placement.check_egress(settings.egress_cap)
    return placement.plan()


class _Placement:
    """A plan in the making: how many blocks of each parameter each rank holds."""

    def __init__(
        self, specs: Sequence[ParamSpec], costs: Sequence[BlockCost], world_size: int
    ) -> None:
        self.specs = specs
        self.costs = costs
        self.world_size = world_size
        self.blocks: list[dict[int, int]] = [{} for _ in specs]
        """By parameter: rank -> blocks."""
        self.bytes = [0] * world_size
        """Resident bytes of each rank."""
        self.units: defaultdict[str, list[int]] = defaultdict(lambda: [0] * world_size)
        """By unit: elements on each rank."""
        self.total_bytes = sum(self._held_bytes(i) for i in range(len(specs)))
        self.limits: defaultdict[str, float] = defaultdict(lambda: inf)
        """By unit: elements that a rank may hold of it, under an egress cap."""
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
        """Whether cutting a tail tensor would cost messages and gain no balance."""
        shape = self.specs[index].shape
        sliver = self._held_bytes(index) * self.world_size * SLIVERS_PER_RANK <= self.total_bytes
        return sliver or (len(shape) == 1 and shape[0] <= SMALL_TAIL)

    def _give(self, index: int, rank: int, blocks: int) -> None:
        held = self.blocks[index]
        held[rank] = held.get(rank, 0) + blocks
        self.bytes[rank] += blocks * self.costs[index].resident.total
        self.units[self.specs[index].unit][rank] += blocks * self.costs[index].numel

    # ------------------------------------------------------------ matrices

    def place_matrices(self, settings: PlanSettings, spread_units: bool) -> None:
        """Pack whole matrices and slices of stacks.

        A 2D parameter is cut between its heads only where that gains more than CLEAR_MARGIN.
        """
        poured = self.total_bytes - sum(map(self._held_bytes, self.matrices))
        best = None
        cuts = [False]
        if any(len(self.specs[i].shape) != 3 and self._count(i) > 1 for i in self.matrices):
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
        if settings.egress_cap:
            self._limit_egress(pieces, settings.egress_cap)

    def _pieces(self, cut_heads: bool) -> list[Piece]:
        """What the matrices are cut into: stacks at slices, 2D ones not at all or between heads."""
        pieces = []
        for index in self.matrices:
            spec, cost, count = self.specs[index], self.costs[index], self._count(index)
            cut = len(spec.shape) == 3 or cut_heads
            # one piece a rank, so that shares are even: sizes differ by one block at most
            number = min(count, self.world_size) if cut else 1
            for piece in range(number):
                blocks = count * (piece + 1) // number - count * piece // number
                shape = (spec.block_rows, *spec.shape[1:])
                load = Load(blocks * cost.resident.total, blocks * cost.flops)
                kind = PieceKind(shape, blocks, blocks * cost.numel, load)
                pieces.append(Piece(index, spec.fqn, spec.unit, kind))
        return pieces

    def _limit_egress(self, pieces: Sequence[Piece], cap: float) -> None:
        """Set `limits` to what PlanSettings.egress_cap allows."""
        largest: Counter[str] = Counter()
        for index in self.small_tails:
            largest[self.specs[index].unit] += self.specs[index].numel
        for piece in pieces:
            largest[piece.unit] = max(largest[piece.unit], piece.kind.numel)
        total: Counter[str] = Counter()
        for spec in self.specs:
            total[spec.unit] += spec.numel
        for unit, numel in total.items():
            self.limits[unit] = max(cap * numel / self.world_size, largest[unit])

    # ------------------------------------------------------------ tails

    def place_small_tails(self) -> None:
        """Put a unit's small tail tensors together on one of its owners that is below the mean.

        Where all of its owners are full, they go to the emptiest rank. An egress cap leaves out the
        ranks that it would not allow.
        """
        by_unit: dict[str, list[int]] = {}
        for index in self.small_tails:
            by_unit.setdefault(self.specs[index].unit, []).append(index)
        mean = self.total_bytes / self.world_size
        ranks = range(self.world_size)
        for unit, indices in by_unit.items():
            needed = sum(map(self._held_bytes, indices))
            numel = sum(self.specs[index].numel for index in indices)
            shares = self.units[unit]
            # under an egress cap; where no rank has room, `check_egress` refuses the plan
            roomy = [rank for rank in ranks if shares[rank] + numel <= self.limits[unit]] or ranks
            owners = [rank for rank in roomy if shares[rank] and self.bytes[rank] + needed <= mean]
            rank = min(owners or roomy, key=lambda rank: (self.bytes[rank], rank))
            for index in indices:
                self._give(index, rank, self._count(index))

    def pour_large_tails(self) -> None:
        """Cut large tail tensors by rows, in proportion to what each rank lacks to the level.

        Tensors with large rows come first, so that small rows level what rounding left uneven. What
        an egress cap keeps from a rank goes to the other ranks.
        """
        order = sorted(
            self.large_tails, key=lambda i: (-self.costs[i].resident.total, self.specs[i].fqn)
        )
        left = sum(map(self._held_bytes, order))
        receivers = self._receivers(left)
        for index in order:
            level = water_level([self.bytes[rank] for rank in receivers], left)
            lacks = {rank: max(0, level - self.bytes[rank]) for rank in receivers}
            left -= self._held_bytes(index)
            self._pour(index, lacks)

    def _pour(self, index: int, lacks: Mapping[int, int]) -> None:
        """Give the ranks the blocks of one tail tensor, in proportion to `lacks` where allowed."""
        unit = self.specs[index].unit
        left = self._count(index)
        while left:
            # blocks that each rank may take; the limit is the mean at least, so some rank may
            room = {
                rank: left if limit == inf else ceil((limit - share) / self.costs[index].numel)
                for rank, share in enumerate(self.units[unit])
                if share < (limit := self.limits[unit])
            }
            parts = _proportional(left, [lacks.get(rank, 0) for rank in room])
            for (rank, most), part in zip(room.items(), parts, strict=True):
                if part:
                    self._give(index, rank, min(part, most))
                    left -= min(part, most)

    def _receivers(self, poured: int) -> list[int]:
        """The ranks to pour `poured` bytes onto.

        They are those that lack more than a sliver to the level; all ranks, where there is none
        or where leaving the others out would raise the level by a sliver.
        """
        level = water_level(self.bytes, poured)
        ranks = [
            rank
            for rank, held in enumerate(self.bytes)
            if (level - held) * SLIVERS_PER_RANK > level
        ]
        if not ranks or water_level(
            [self.bytes[rank] for rank in ranks], poured
        ) * SLIVERS_PER_RANK > (level * (SLIVERS_PER_RANK + 1)):
            return list(range(self.world_size))
        return ranks

    def check_egress(self, cap: float) -> None:
        """ValueError where a rank holds more of a unit than `cap`, PlanSettings.egress_cap, allows.

        Less than a row of a cut tail tensor above the limit is allowed.
        """
        row: Counter[str] = Counter()
        for index in self.large_tails:
            unit = self.specs[index].unit
            row[unit] = max(row[unit], self.costs[index].numel)
        for unit, shares in self.units.items():
            worst = max(range(self.world_size), key=lambda rank: (shares[rank], -rank))
            excess = shares[worst] - self.limits[unit]
            if excess > 0 and excess >= row[unit]:
                raise ValueError(
                    f"egress_cap {cap} cannot be met: rank {worst} would hold {shares[worst]} "
                    f"elements of unit {unit!r}, over {self.limits[unit]:.0f}; raise the cap or "
                    "use a transport that is not bound by fan-out"
                )

    def plan(self) -> Plan:
        """The Plan: each parameter's blocks laid out in rank order, one segment a rank."""
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
    """Cut `count` into whole parts in proportion to `weights`, each within 1 of its exact share.

    The parts are equal where all weights are 0.
    """
    total = sum(weights)
    if not total:
        weights, total = [1] * len(weights), len(weights)
    parts, running, placed = [], 0, 0
    for weight in weights:
        running += weight
        # rounded half up
        reached = (2 * count * running + total) // (2 * total)
        parts.append(reached - placed)
        placed = reached
    return parts
