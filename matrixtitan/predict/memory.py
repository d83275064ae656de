"""What fills a rank's memory under each strategy, term by term, with the dtype of each.

Owns the memory table of `tools/plan.py`. Activations, the allocator's slack and Newton-Schulz's
workspace are the same under every strategy, and are not counted. A plan's resident bytes come from
`plan/cost.py`. Next: `strategies.py`, the strategies that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from matrixtitan.plan.cost import CostSettings, ResidentBytes, block_cost, rank_bytes
from matrixtitan.plan.shard import ParamSpec, Plan
from matrixtitan.plan.transport_registry import REDUCTIONS_IN_FLIGHT
from matrixtitan.predict.strategies import STRATEGY_VARIANTS, StrategyVariant, UnitSize, unit_sizes

FSDP2_REDUCTIONS_IN_FLIGHT = 1
"""PyTorch's default: FSDP2 waits for one reduce-scatter before it fills the input of the next."""

Phase = Literal["resident", "forward_backward", "optimizer"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a job, by name, and the bytes of an element of each."""

    stored: str = "float32"
    """Dtype of parameters, gradients and optimizer state on their owner."""
    compute: str = "bfloat16"
    """Dtype of gathered weights."""
    reduce: str = "float32"
    """Dtype of gradients in reduction."""
    update: str = "bfloat16"
    """Dtype of the updates that FSDP2's matrix exchanges send."""

    @staticmethod
    def bytes_of(dtype: str) -> int:
        """Bytes of an element of `dtype`; ValueError for one that training does not support."""
        sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
        if dtype not in sizes:
            raise ValueError(f"dtype {dtype!r} is unknown: {', '.join(sizes)}")
        return sizes[dtype]

    @property
    def compute_bytes(self) -> int:
        return self.bytes_of(self.compute)

    @property
    def reduce_bytes(self) -> int:
        return self.bytes_of(self.reduce)

    @property
    def update_bytes(self) -> int:
        return self.bytes_of(self.update)


class Term(NamedTuple):
    """One line of the memory table, on the fullest rank.

    A term is resident, or transient: it is alive in one phase only.
    """

    name: str
    dtype: str
    bytes: int
    phase: Phase


def peak(terms: Sequence[Term]) -> int:
    """Resident bytes, and the transient bytes of the phase that has more."""
    phases = {phase: sum(term.bytes for term in terms if term.phase == phase) for phase in _PHASES}
    return phases["resident"] + max(phases["forward_backward"], phases["optimizer"])


def memory_table(
    specs: Sequence[ParamSpec],
    plan: Plan,
    settings: CostSettings,
    precision: Precision,
    *,
    world_size: int,
    backend: str,
    prefetch: int = 1,
    keep_all: bool = False,
    strategies: Sequence[StrategyVariant] = STRATEGY_VARIANTS,
) -> dict[StrategyVariant, list[Term]]:
    """The terms of each of `strategies`.

    `plan` is matrix_fsdp's, over one shard group of a job of `world_size` ranks. `prefetch`: units
    gathered ahead. `keep_all`: no unit is freed between forward and backward.
    """
    return {
        name: [
            *_resident(name, specs, plan, settings, precision, world_size),
            *_transient(name, specs, plan.world_size, precision, backend, prefetch, keep_all),
        ]
        for name in strategies
    }


_PHASES: tuple[Phase, ...] = ("resident", "forward_backward", "optimizer")


def _resident(
    strategy: StrategyVariant,
    specs: Sequence[ParamSpec],
    plan: Plan,
    settings: CostSettings,
    precision: Precision,
    world_size: int,
) -> list[Term]:
    if strategy == "matrix_fsdp":
        held = max(rank_bytes(plan, settings), key=lambda part: part.total)
    elif strategy in ("zero1_owner", "ddp"):
        whole = _sum(specs, settings)
        held = (
            whole
            if strategy == "ddp"
            else whole._replace(optimizer_state=_owned_state(specs, settings, world_size))
        )
    else:
        held = _sum(specs, settings, shards=plan.world_size)
    return [
        Term("parameters", precision.stored, held.parameters, "resident"),
        Term("gradients", precision.stored, held.gradients, "resident"),
        Term(
            f"{settings.rule.name} and AdamW state",
            _state_dtype(settings, precision),
            held.optimizer_state,
            "resident",
        ),
    ]


def _transient(
    strategy: StrategyVariant,
    specs: Sequence[ParamSpec],
    shard_ranks: int,
    precision: Precision,
    backend: str,
    prefetch: int,
    keep_all: bool,
) -> list[Term]:
    if strategy in ("zero1_owner", "ddp"):
        if precision.compute == precision.stored:
            return []
        cast = sum(spec.numel for spec in specs) * precision.compute_bytes
        return [Term("weights as autocast casts them", precision.compute, cast, "forward_backward")]
    units = unit_sizes(specs)
    window = len(units) if keep_all else 1 + prefetch
    gathered = _largest_window([unit.numel for unit in units], window)
    ours = strategy == "matrix_fsdp"
    in_flight = REDUCTIONS_IN_FLIGHT[backend] if ours else FSDP2_REDUCTIONS_IN_FLIGHT
    computed, reduced = _full_gradients(
        [unit.trainable for unit in units if unit.trainable],
        in_flight,
        precision,
        # matrix_fsdp reduces gradients where autograd made them, unless they are cast
        copies=not ours or precision.compute != precision.reduce,
    )
    terms = [
        Term(
            f"{window} gathered units",
            precision.compute,
            gathered * precision.compute_bytes,
            "forward_backward",
        ),
        Term(
            "full gradients in backward",
            precision.compute,
            computed * precision.compute_bytes,
            "forward_backward",
        ),
        Term(
            f"full gradients of {in_flight} in reduction",
            precision.reduce,
            reduced * precision.reduce_bytes,
            "forward_backward",
        ),
    ]
    if ours:
        return terms
    largest = max((unit.numel for unit in units), default=0)
    terms.append(
        Term(
            "all-gather buffer of a unit",
            precision.compute,
            largest * precision.compute_bytes,
            "forward_backward",
        )
    )
    return [*terms, _exchange_term(strategy, specs, units, shard_ranks, precision)]


def _exchange_term(
    strategy: StrategyVariant,
    specs: Sequence[ParamSpec],
    units: Sequence[UnitSize],
    shard_ranks: int,
    precision: Precision,
) -> Term:
    """What FSDP2 holds of whole matrices while it steps."""
    matrix = sum(unit.matrix for unit in units)
    match strategy:
        case "fsdp2_gather_each":
            largest = max(
                (spec.numel for spec in specs if spec.role == "matrix" and spec.trainable),
                default=0,
            )
            name, numel = "one gathered update", largest
        case "fsdp2_gather_once":
            name, numel = "all gathered updates", matrix
        case _:
            name, numel = "exchanged updates, both ways", 2 * matrix // shard_ranks
    return Term(name, precision.update, numel * precision.update_bytes, "optimizer")


def _sum(specs: Sequence[ParamSpec], settings: CostSettings, shards: int = 1) -> ResidentBytes:
    """Bytes of all parameters on the fullest of `shards` ranks, each with ceil(R / shards) rows."""
    parts = [0, 0, 0]
    for spec in specs:
        rows = -(-spec.shape[0] // shards)
        for kind, part in enumerate(block_cost(spec, settings).resident):
            parts[kind] += part * rows // spec.block_rows
    return ResidentBytes(*parts)


def _owned_state(specs: Sequence[ParamSpec], settings: CostSettings, ranks: int) -> int:
    """Optimizer state of zero1_owner's fullest rank: its share of the matrices, and the whole tail.

    The share is even, or the largest matrix's state where that is more, since it cannot be cut.
    """
    matrix, largest, tail = 0, 0, 0
    for spec in specs:
        state = _sum([spec], settings).optimizer_state
        if spec.role == "tail":
            tail += state
        else:
            matrix, largest = matrix + state, max(largest, state)
    return tail + max(-(-matrix // ranks), largest)


def _largest_window(sizes: Sequence[int], length: int) -> int:
    """The largest sum of `length` neighbours."""
    return max(
        (sum(sizes[start : start + length]) for start in range(max(1, len(sizes) - length + 1))),
        default=0,
    )


def _full_gradients(
    sizes: Sequence[int], in_flight: int, precision: Precision, *, copies: bool
) -> tuple[int, int]:
    """(as backward made them, in reduction): elements of full gradients when most bytes are alive.

    `sizes` are those of the trainable units, in forward order. While a unit's backward makes
    gradients, the `in_flight` units after it are in reduction. Then the farthest of these is waited
    for, and the unit's own reduction begins. Where that `copies` the gradients (into reduce dtype,
    or into FSDP2's buffer), both copies are alive. The longer life of tied weights' gradients, from
    the backward of their last module to that of their first, is not counted.
    """

    def alive(unit: int) -> tuple[int, int]:
        *near, farthest = [*sizes[unit + 1 :], *[0] * in_flight][:in_flight]
        most = max(farthest, sizes[unit]) if copies else farthest
        return sizes[unit], sum(near) + most

    return max(
        map(alive, range(len(sizes))),
        key=lambda parts: parts[0] * precision.compute_bytes + parts[1] * precision.reduce_bytes,
        default=(0, 0),
    )


def _state_dtype(settings: CostSettings, precision: Precision) -> str:
    return "float32" if settings.rule.keeps_float32 else precision.stored
