"""What each strategy sends in a step, by formula: ours, and those that it is compared with.

Owns the strategies' names and their logical bytes. Memory is in `memory.py`, times in `traffic.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import Literal, NamedTuple

from matrixtitan.plan.cost import Parameter

Strategy = Literal[
    "matrix_fsdp",
    "fsdp2_gather_each",
    "fsdp2_gather_once",
    "fsdp2_all_to_all",
    "zero1_owner",
    "ddp",
]
"""What `parallelism.strategy` may name; for fsdp2 together with `optimizer.matrix_exchange`."""

STRATEGIES: tuple[Strategy, ...] = (
    "matrix_fsdp",
    "fsdp2_gather_each",
    "fsdp2_gather_once",
    "fsdp2_all_to_all",
    "zero1_owner",
    "ddp",
)


class UnitSize(NamedTuple):
    """Elements of one unit, and how often its weights are gathered in a microbatch."""

    numel: int
    trainable: int
    matrix: int  # trainable elements of the matrix role
    gathers: int = (
        2  # 1 where they are kept between forward and backward, or not needed in backward
    )


class StepBytes(NamedTuple):
    """Logical bytes that one rank sends in one step, the mean over ranks."""

    forward_backward: int
    optimizer: int


def unit_sizes(
    params: Iterable[Parameter], gathered_once: Iterable[str] = (), row_multiple: int = 1
) -> list[UnitSize]:
    """Sizes of the units in order of first appearance.

    Units named in `gathered_once` are gathered in forward alone. Rows are padded to `row_multiple`,
    as FSDP2 does for its N equal shards.
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
    strategy: Strategy,
    units: Sequence[UnitSize],
    world_size: int,
    *,
    param_bytes: int,
    grad_bytes: int,
    update_bytes: int = 4,
    stored_bytes: int = 4,
    microbatches: int = 1,
) -> StepBytes:
    """Bytes sent per rank per step; c = (N - 1) / N, and an element has b (computed), g (reduced),
    u (update) or s (stored) bytes on the wire.

    Sharded strategies: c ((1 + resharded) b + g) a microbatch; replicated ones all-reduce their
    gradients once a step, 2 c g. Optimizer step, P trainable matrix elements: gather_each and
    gather_once c P u, all_to_all 2 c (P / N) u, zero1_owner c P s, ours and ddp 0.
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
