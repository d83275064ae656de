"""What each strategy sends in a step, by formula: matrix_fsdp, and those that it is compared with.

Owns the names of the predicted strategies, and their logical bytes. Next: `traffic.py`, for the
busiest rank and link and for times; `memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import Literal, NamedTuple, get_args

from matrixtitan.plan.cost import SpecOrShard

StrategyVariant = Literal[
    "matrix_fsdp",
    "fsdp2_gather_each",
    "fsdp2_gather_once",
    "fsdp2_all_to_all",
    "zero1_owner",
    "ddp",
]
"""What `parallelism.strategy` may name; fsdp2 together with its `optimizer.matrix_exchange`."""

STRATEGY_VARIANTS: tuple[StrategyVariant, ...] = get_args(StrategyVariant)


class UnitSize(NamedTuple):
    """Elements of one unit, and how often its weights are gathered in a microbatch."""

    numel: int
    trainable: int
    matrix: int
    """Trainable elements of the matrix role."""
    gathers: int = 2
    """1 where the weights are kept from forward to backward, or backward does not need them."""


class StepBytes(NamedTuple):
    """Logical bytes that a rank sends in one step: the mean over ranks."""

    forward_backward: int
    optimizer: int


def unit_sizes(
    params: Iterable[SpecOrShard], gathered_once: Iterable[str] = (), row_multiple: int = 1
) -> list[UnitSize]:
    """Sizes of the units, in order of first appearance.

    Units named in `gathered_once` are gathered in forward only. Rows are padded to a multiple of
    `row_multiple`, as FSDP2 pads them for its N equal shards.
    """
    once = set(gathered_once)
    sizes: dict[str, UnitSize] = {}
    for param in params:
        size = sizes.setdefault(param.unit, UnitSize(0, 0, 0, 1 if param.unit in once else 2))
        padded = ceil(param.shape[0] / row_multiple) * row_multiple * prod(param.shape[1:])
        sizes[param.unit] = UnitSize(
            size.numel + padded,
            size.trainable + padded * param.trainable,
            size.matrix + padded * (param.trainable and param.role == "matrix"),
            size.gathers,
        )
    return list(sizes.values())


def strategy_bytes(
    strategy: StrategyVariant,
    units: Sequence[UnitSize],
    world_size: int,
    *,
    param_bytes: int,
    grad_bytes: int,
    update_bytes: int = 4,
    stored_bytes: int = 4,
    microbatches: int = 1,
) -> StepBytes:
    """Bytes that a rank sends in a step, the mean over ranks.

    Below, c = (N - 1) / N, P are the trainable matrix elements, and an element has b
    (`param_bytes`), g (`grad_bytes`), u (`update_bytes`) or s (`stored_bytes`) bytes on the wire.

    Forward and backward: a sharded strategy sends c (gathers b + g) per element and microbatch. A
    replicated one all-reduces its gradients once a step, 2 c g per element.

    Optimizer step: gather_each and gather_once send c P u, all_to_all 2 c (P / N) u, zero1_owner
    c P s, matrix_fsdp and ddp nothing.
    """
    share = (world_size - 1) / world_size
    gathered = sum(unit.numel * unit.gathers for unit in units) * param_bytes
    reduced = sum(unit.trainable for unit in units) * grad_bytes
    matrix = sum(unit.matrix for unit in units)
    replicated = strategy in ("zero1_owner", "ddp")
    sent = 2 * reduced if replicated else (gathered + reduced) * microbatches
    optimizer = {
        "matrix_fsdp": 0.0,
        "fsdp2_gather_each": share * matrix * update_bytes,
        "fsdp2_gather_once": share * matrix * update_bytes,
        "fsdp2_all_to_all": 2 * share * matrix / world_size * update_bytes,
        "zero1_owner": share * matrix * stored_bytes,
        "ddp": 0.0,
    }[strategy]
    return StepBytes(round(share * sent), round(optimizer))
