"""Who holds which rows of which parameter: the words that all other parts use.

Owns the metadata (ParamSpec, Segment, MatrixShard, Plan) and its invariants. It decides nothing.
Pure Python: no torch, no process group, no device. Next: `planner.py`, which decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

Role = Literal["matrix", "tail"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the planner sees it.

    `role` is "matrix" (a 2D weight, or a 3D stack of them, for the matrix optimizer) or "tail"
    (for AdamW). `unit` names the parameters that are gathered and freed together. `block_rows` is
    the smallest run of rows along dim 0 that may not be cut: all rows of a 2D matrix, 1 for a 3D
    stack, head_dim for a projection that is orthogonalised per head, 1 for a tail parameter. A
    frozen parameter (`trainable` False) has no gradient and no optimizer state.
    """

    fqn: str
    shape: tuple[int, ...]
    role: Role
    unit: str
    block_rows: int
    trainable: bool = True

    def __post_init__(self) -> None:
        if not self.shape:
            raise ValueError(
                f"{self.fqn} is a scalar; a sharded parameter needs a dim 0: make it 1-D"
            )
        if self.block_rows < 1 or (self.shape[0] and self.shape[0] % self.block_rows):
            raise ValueError(
                f"{self.fqn}: block_rows {self.block_rows} does not divide its {self.shape[0]} rows"
            )

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of one parameter, held by `rank` (a rank of the shard group)."""

    rank: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """Where one parameter lives.

    The segments cover dim 0 exactly once, in order. A rank has at most one of them, and no segment
    cuts a block. Raises ValueError otherwise.
    """

    fqn: str
    shape: tuple[int, ...]
    role: Role
    unit: str
    block_rows: int
    segments: tuple[Segment, ...]
    trainable: bool = True

    def __post_init__(self) -> None:
        row = 0
        for segment in self.segments:
            if segment.start != row or segment.stop <= segment.start:
                raise ValueError(
                    f"{self.fqn}: segments {self.segments} do not cover its rows in order"
                )
            if segment.stop % self.block_rows:
                raise ValueError(f"{self.fqn}: {segment} cuts a block of {self.block_rows} rows")
            row = segment.stop
        if row != self.shape[0]:
            raise ValueError(f"{self.fqn}: segments cover {row} of {self.shape[0]} rows")
        ranks = [segment.rank for segment in self.segments]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"{self.fqn}: a rank holds two segments: {self.segments}")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements in one row, that is one index of dim 0."""
        return prod(self.shape[1:])

    @property
    def is_whole(self) -> bool:
        """True where one rank owns all of it."""
        return len(self.segments) == 1

    @property
    def owner(self) -> int:
        """The single owner's rank; only a whole parameter has one."""
        if not self.is_whole:
            raise RuntimeError(
                f"{self.fqn} is split between {len(self.segments)} ranks: it has no one owner"
            )
        return self.segments[0].rank

    def segment(self, rank: int) -> Segment | None:
        """`rank`'s segment; None where it holds nothing of this parameter."""
        for segment in self.segments:
            if segment.rank == rank:
                return segment
        return None

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of `rank`'s sharded parameter; zero rows where it holds nothing."""
        segment = self.segment(rank)
        return (segment.rows if segment else 0, *self.shape[1:])


@dataclass(frozen=True)
class Plan:
    """All MatrixShards of a model, in the model's parameter order.

    `world_size` is the number of ranks of the shard group.
    """

    world_size: int
    shards: tuple[MatrixShard, ...]

    def __post_init__(self) -> None:
        if len({shard.fqn for shard in self.shards}) != len(self.shards):
            raise ValueError("a plan names a parameter twice")
        for shard in self.shards:
            if any(not 0 <= segment.rank < self.world_size for segment in shard.segments):
                raise ValueError(
                    f"{shard.fqn}: a segment's rank is outside world size {self.world_size}"
                )

    @cached_property
    def by_fqn(self) -> Mapping[str, MatrixShard]:
        return {shard.fqn: shard for shard in self.shards}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan; compared across ranks before anything else communicates."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "shards": [
                {
                    "fqn": shard.fqn,
                    "shape": list(shard.shape),
                    "role": shard.role,
                    "unit": shard.unit,
                    "block_rows": shard.block_rows,
                    "trainable": shard.trainable,
                    "segments": [[s.rank, s.start, s.stop] for s in shard.segments],
                }
                for shard in self.shards
            ],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        return Plan(
            data["world_size"],
            tuple(
                MatrixShard(
                    entry["fqn"],
                    tuple(entry["shape"]),
                    entry["role"],
                    entry["unit"],
                    entry["block_rows"],
                    tuple(Segment(*segment) for segment in entry["segments"]),
                    entry["trainable"],
                )
                for entry in data["shards"]
            ),
        )
