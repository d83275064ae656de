"""What a placement costs a rank, by formula: resident bytes and optimizer FLOPs.

Owns the two prices that the planner minimises. Nothing measured enters, so that a plan is the same
on every machine. It never decides who owns what (`planner.py` does) and knows nothing of torch. What
travels is priced in `transports.py`. Read the words in `shard.py` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, NamedTuple

from matrixtitan.plan.shard import MatrixShard, ParamSpec, Plan

RuleName = Literal["muon", "shampoo", "soap", "adamw"]
"""The update rule of the matrix role."""
NewtonSchulzForm = Literal["standard", "gram", "auto"]

ADAMW_FLOPS = 12
"""Elementwise operations per parameter of one AdamW step: decay, two moments, square root,
quotient, update."""
EIGH_FLOPS = 9
"""n^3 of a symmetric eigendecomposition with vectors (Golub & Van Loan, Matrix Computations, 8.3).
"""
FIRST_RESTART, RESTART_EVERY = 2, 3
"""Steps of Newton-Schulz's Gram form before its first restart, where it goes back to the long matrix,
and between later ones; `optim/newton_schulz.py` restarts there and says why."""


FACTOR_BYTES = 4
"""Shampoo and SOAP keep all of their state in float32, whatever the parameters are stored in."""


@dataclass(frozen=True)
class CostSettings:
    """What bytes and FLOPs depend on beside shapes. Bytes are per element, as stored on the owner.

    `state_bytes`: of Muon's momentum and AdamW's moments. `max_precond_dim`: SOAP leaves a longer
    side without a factor, Shampoo cuts it into blocks of that length; None takes every side whole.
    `shampoo_moments`: the averaged gradient and the grafted Adam's moment; fewer where it has none.
    `precondition_frequency` spreads the cubic refreshes over the steps between them.
    """

    matrix_optimizer: RuleName = "muon"
    param_bytes: int = 4
    grad_bytes: int = 4
    state_bytes: int = 4
    ns_steps: int = 5
    precondition_frequency: int = 10
    max_precond_dim: int | None = None
    shampoo_moments: int = 2

    def __post_init__(self) -> None:
        if self.matrix_optimizer not in ("muon", "shampoo", "soap", "adamw"):
            raise ValueError(
                f"matrix_optimizer {self.matrix_optimizer!r} is unknown: "
                "muon, shampoo, soap or adamw"
            )
        if self.max_precond_dim is not None and self.max_precond_dim < 1:
            raise ValueError(
                f"max_precond_dim {self.max_precond_dim} is below 1; None preconditions every side"
            )
        if min(self.param_bytes, self.ns_steps, self.precondition_frequency) < 1:
            raise ValueError(
                "param_bytes, ns_steps and precondition_frequency must be at least 1, not "
                f"{self.param_bytes}, {self.ns_steps}, {self.precondition_frequency}"
            )


Parameter = ParamSpec | MatrixShard
"""Both have a shape, a role, block rows and whether they train: enough to price their rows."""


class ResidentBytes(NamedTuple):
    """Bytes that stay on a rank between steps, without what aligns parameters in their buffers: each
    rank's rows of one are padded to 64 bytes (256 on a GPU)."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


class BlockCost(NamedTuple):
    """Price of the smallest piece of a parameter that may not be cut."""

    rows: int
    numel: int
    resident: ResidentBytes
    flops: int


# ---------------------------------------------------------------- one parameter


def matrices_in_block(param: Parameter) -> tuple[int, int, int]:
    """(count, R, C): the matrices orthogonalised or preconditioned apart within one block of a
    matrix parameter."""
    if len(param.shape) == 2:
        return 1, param.block_rows, param.shape[1]
    return param.block_rows * prod(param.shape[1:-2]), param.shape[-2], param.shape[-1]


class _Factors(NamedTuple):
    """Sums over the preconditioners of one matrix."""

    squares: int  # elements of the factors
    cubes: int  # n^3 over the factors
    product: int  # FLOPs of multiplying the matrix by each factor once


def _factors(rows: int, cols: int, settings: CostSettings) -> _Factors:
    limit = settings.max_precond_dim or max(rows, cols, 1)
    if settings.matrix_optimizer == "shampoo":
        tiles = [(r, c) for r in _chunks(rows, limit) for c in _chunks(cols, limit)]
    else:
        tiles = [(rows, cols)]
    sides = [(side, r * c) for r, c in tiles for side in (r, c) if side <= limit]
    return _Factors(
        sum(side**2 for side, _ in sides),
        sum(side**3 for side, _ in sides),
        sum(2 * numel * side for side, numel in sides),
    )


def _chunks(length: int, limit: int) -> list[int]:
    """`length` cut into pieces of `limit` and a rest."""
    return [min(limit, length - start) for start in range(0, length, limit)]


def state_elements(rows: int, cols: int, settings: CostSettings) -> dict[str, int]:
    """Elements of the state of one (R, C) matrix, by name; step counters are not counted.

    Muon: momentum. AdamW: both moments. Shampoo: factors and inverse roots (R^2 and C^2 each), the
    averaged gradient and the grafted Adam's moment. SOAP: factors and eigenbases, both moments.
    """
    numel, square = rows * cols, _factors(rows, cols, settings).squares
    match settings.matrix_optimizer:
        case "muon":
            return {"momentum_buffer": numel}
        case "adamw":
            return {"exp_avg": numel, "exp_avg_sq": numel}
        case "shampoo":
            moments = settings.shampoo_moments * numel
            return {"factors": square, "roots": square, "moments": moments}
        case "soap":
            return {"factors": square, "bases": square, "exp_avg": numel, "exp_avg_sq": numel}


def newton_schulz_flops(
    rows: int, cols: int, steps: int = 5, form: NewtonSchulzForm = "auto"
) -> int:
    """FLOPs of `steps` quintic Newton-Schulz steps on one (R, C) matrix; m and n its short and long
    side.

    Standard (Jordan et al. 2024), a step: A = X X^T (2 m^2 n), A A (2 m^3), B X (2 m^2 n). Gram:
    the iteration runs on m x m matrices, four products a step, and touches X twice per chunk of
    steps; a chunk's first step has no product to extend (one less), its last no Gram matrix to
    carry on (two less). "auto", as Muon has it but for small matrices on a CPU: the cheaper one,
    which is Gram for five steps once n is over 1.5 m.
    """
    short, long = sorted((rows, cols))
    standard = steps * (4 * short * short * long + 2 * short**3)
    chunks = 1 + ceil(max(0, steps - FIRST_RESTART) / RESTART_EVERY)
    gram = chunks * 4 * short * short * long + (4 * steps - 3 * chunks) * 2 * short**3
    return {"standard": standard, "gram": gram, "auto": min(standard, gram)}[form]


def optimizer_flops(rows: int, cols: int, settings: CostSettings) -> int:
    """FLOPs of one step of the matrix optimizer on one (R, C) matrix, refreshes spread over steps.

    Shampoo: factor updates, products with the roots, and per refresh an eigendecomposition and a
    product for each factor. SOAP: factor updates, three changes of basis (gradient, moment,
    update), and per refresh a power iteration, its sorting diagonal, a QR (8/3 n^3), the moment's
    new basis.
    """
    elementwise = ADAMW_FLOPS * rows * cols
    factors = _factors(rows, cols, settings)
    match settings.matrix_optimizer:
        case "muon":
            return newton_schulz_flops(rows, cols, settings.ns_steps)
        case "adamw":
            return elementwise
        case "shampoo":
            refresh = (EIGH_FLOPS + 2) * factors.cubes
            step = 2 * factors.product
        case "soap":
            refresh = 4 * factors.cubes + 8 * factors.cubes // 3 + 2 * factors.product
            step = 4 * factors.product
    return elementwise + step + refresh // settings.precondition_frequency


def block_cost(param: Parameter, settings: CostSettings) -> BlockCost:
    """Bytes and FLOPs of one block of `param`; every block of a parameter costs the same."""
    numel = param.block_rows * prod(param.shape[1:])
    parameters = numel * settings.param_bytes
    if not param.trainable:
        return BlockCost(param.block_rows, numel, ResidentBytes(parameters, 0, 0), 0)
    if param.role == "tail":
        state, flops = 2 * numel * settings.state_bytes, ADAMW_FLOPS * numel
    else:
        count, rows, cols = matrices_in_block(param)
        elements = count * sum(state_elements(rows, cols, settings).values())
        in_factors = settings.matrix_optimizer in ("shampoo", "soap")
        state = elements * (FACTOR_BYTES if in_factors else settings.state_bytes)
        flops = count * optimizer_flops(rows, cols, settings)
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
    """Bytes of each unit that each rank holds (s_r), units in order of first appearance.

    `gradients`: those of its gradients, which frozen parameters have none of.
    """
    shares: dict[str, list[int]] = {}
    for shard in plan.shards:
        unit = shares.setdefault(shard.unit, [0] * plan.world_size)
        for segment in shard.segments:
            if shard.trainable or not gradients:
                unit[segment.rank] += segment.rows * shard.row_numel * element_bytes
    return shares


def max_over_mean(values: Sequence[int]) -> float:
    """How far the fullest rank is above the average; 1.0 where there is nothing at all."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
