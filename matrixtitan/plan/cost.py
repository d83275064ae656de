"""What a placement costs a rank, by formula: resident bytes and optimizer FLOPs.

Owns the two prices that the planner minimises. No price is measured, so a plan is the same on every
machine. This module never decides who owns what (`planner.py` does). What travels is priced in
`transport_registry.py`. Read the words in `shard.py` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, NamedTuple, Protocol

from matrixtitan.plan.shard import MatrixShard, ParamSpec, Plan

NewtonSchulzForm = Literal["standard", "gram", "auto"]

ADAMW_FLOPS = 12
"""Operations of one AdamW step per element: decay, two moments, square root, quotient, update."""

FIRST_RESTART, RESTART_EVERY = 2, 3
"""Steps of Newton-Schulz's Gram form before its first restart, and between later ones.

A restart goes back to the long matrix; `optim/newton_schulz.py` says why.
"""


class MatrixRule(Protocol):
    """What the planner asks of the rule that steps the matrices; `matrixtitan/rules/` has them."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_float32(self) -> bool:
        """Whether its state is float32, whatever dtype the parameters are stored in."""

    def state_bytes(self, rows: int, cols: int, param_bytes: int) -> int:
        """Bytes of state of one matrix (R, C) whose elements take `param_bytes`.

        Step counters are not counted.
        """

    def flops(self, rows: int, cols: int) -> int:
        """FLOPs of one step on one matrix (R, C)."""


@dataclass(frozen=True)
class OrthogonalizedMomentum:
    """The price of `MuonRule()`, which a plan assumes by default.

    It stands here too because `plan` imports no rule: it can be lifted out with `fsdp` alone.
    """

    name: str = "muon"
    keeps_float32: bool = False

    def state_bytes(self, rows: int, cols: int, param_bytes: int) -> int:
        return rows * cols * param_bytes

    def flops(self, rows: int, cols: int) -> int:
        return newton_schulz_flops(rows, cols)


@dataclass(frozen=True)
class CostSettings:
    """What bytes and FLOPs depend on besides shapes. Bytes are per element, as the owner stores it.

    `state_bytes` applies to AdamW's moments, and to the matrix rule's state unless that is always
    float32 (`rule.keeps_float32`).
    """

    rule: MatrixRule = OrthogonalizedMomentum()
    param_bytes: int = 4
    grad_bytes: int = 4
    state_bytes: int = 4

    def __post_init__(self) -> None:
        if min(self.param_bytes, self.grad_bytes, self.state_bytes) < 1:
            raise ValueError(
                "param_bytes, grad_bytes and state_bytes must be at least 1, not "
                f"{self.param_bytes}, {self.grad_bytes}, {self.state_bytes}"
            )


SpecOrShard = ParamSpec | MatrixShard
"""A parameter before or after it is placed. Both have what prices its rows: shape, role, block rows
and whether it is trained."""


class ResidentBytes(NamedTuple):
    """Bytes that stay on a rank between steps.

    Padding is not counted: each rank's rows of a parameter are padded to 64 bytes, or 256 on a GPU
    (`fsdp/buffers.py`).
    """

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


class BlockCost(NamedTuple):
    """Price of one block: the smallest part of a parameter that may not be cut."""

    rows: int
    numel: int
    resident: ResidentBytes
    flops: int


# ---------------------------------------------------------------- one parameter


def matrices_in_block(param: SpecOrShard) -> tuple[int, int, int]:
    """(count, R, C): one block of a matrix parameter holds `count` matrices (R, C).

    Each of them is orthogonalised or preconditioned by itself. A parameter of four or more
    dimensions, a convolution's, is one matrix (out, the product of the rest).
    """
    if len(param.shape) != 3:
        return 1, param.block_rows, prod(param.shape[1:])
    return param.block_rows, param.shape[1], param.shape[2]


def newton_schulz_flops(
    rows: int, cols: int, steps: int = 5, form: NewtonSchulzForm = "auto"
) -> int:
    """FLOPs of `steps` quintic Newton-Schulz steps on one (R, C) matrix.

    Below, m is its short side and n its long one.

    "standard" (Jordan et al. 2024) has three products a step: A = X X^T (2 m^2 n FLOPs), A A
    (2 m^3) and B X (2 m^2 n).

    "gram" runs the iteration on m x m matrices, with four products a step. It touches X twice per
    chunk, the steps between two restarts. The first step of a chunk has no product to extend (one
    product less), and the last has no Gram matrix to carry on (two less).

    "auto" is the cheaper of the two: for five steps "gram" once n is over 1.5 m. Muon chooses in
    the same way, except for small matrices on a CPU.
    """
    short, long = sorted((rows, cols))
    standard = steps * (4 * short * short * long + 2 * short**3)
    chunks = 1 + ceil(max(0, steps - FIRST_RESTART) / RESTART_EVERY)
    gram = chunks * 4 * short * short * long + (4 * steps - 3 * chunks) * 2 * short**3
    return {"standard": standard, "gram": gram, "auto": min(standard, gram)}[form]


def block_cost(param: SpecOrShard, settings: CostSettings) -> BlockCost:
    """Bytes and FLOPs of one block of `param`; every block of a parameter costs the same."""
    numel = param.block_rows * prod(param.shape[1:])
    parameters = numel * settings.param_bytes
    if not param.trainable:
        return BlockCost(param.block_rows, numel, ResidentBytes(parameters, 0, 0), 0)
    if param.role == "tail":
        state, flops = 2 * numel * settings.state_bytes, ADAMW_FLOPS * numel
    else:
        count, rows, cols = matrices_in_block(param)
        state = count * settings.rule.state_bytes(rows, cols, settings.state_bytes)
        flops = count * settings.rule.flops(rows, cols)
    resident = ResidentBytes(parameters, numel * settings.grad_bytes, state)
    return BlockCost(param.block_rows, numel, resident, flops)


# ---------------------------------------------------------------- one plan


def rank_bytes(plan: Plan, settings: CostSettings) -> list[ResidentBytes]:
    """Resident bytes of each rank."""
    parts = [[0, 0, 0] for _ in range(plan.world_size)]
    for shard in plan.shards:
        cost = block_cost(shard, settings)
        for segment in shard.segments:
            blocks = segment.rows // shard.block_rows
            for kind, part in enumerate(cost.resident):
                parts[segment.rank][kind] += blocks * part
    return [ResidentBytes(*part) for part in parts]


def rank_flops(plan: Plan, settings: CostSettings) -> list[int]:
    """Optimizer FLOPs of each rank in one step."""
    flops = [0] * plan.world_size
    for shard in plan.shards:
        cost = block_cost(shard, settings)
        for segment in shard.segments:
            flops[segment.rank] += segment.rows // shard.block_rows * cost.flops
    return flops


def unit_shares(plan: Plan, element_bytes: int, *, gradients: bool = False) -> dict[str, list[int]]:
    """By unit, the bytes of its weights on each rank (s_r); units in order of first appearance.

    `gradients`: the bytes of its gradients instead, so without frozen parameters. `element_bytes`:
    the bytes of one element as it travels.
    """
    shares: dict[str, list[int]] = {}
    for shard in plan.shards:
        unit = shares.setdefault(shard.unit, [0] * plan.world_size)
        for segment in shard.segments:
            if shard.trainable or not gradients:
                unit[segment.rank] += segment.rows * shard.row_numel * element_bytes
    return shares


def max_over_mean(values: Sequence[int]) -> float:
    """The largest of `values` over their mean; 1.0 where all are zero."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
