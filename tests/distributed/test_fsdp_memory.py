"""How much is alive when: gathered weights, full gradients, and what a rank keeps for good."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from matrixtitan.fsdp import MatrixFSDP, fully_shard
from matrixtitan.fsdp.hooks import MAX_REDUCTIONS_IN_FLIGHT
from matrixtitan.fsdp.unit import Reduction, Unit
from matrixtitan.plan.cost import rank_bytes
from matrixtitan.plan.planner import PlanSettings
from tests.lib.count_collectives import CollectiveCounter, no_collectives
from tests.lib.distributed import run_distributed
from tests.lib.toy import batch, make_toy, share, toy_units

DEPTH = 6


def sharded_toy(
    prefetch: int, reshard: str, transport: str = "auto"
) -> tuple[nn.Module, MatrixFSDP]:
    model = make_toy(depth=DEPTH)
    sharded = fully_shard(
        model,
        units=toy_units(depth=DEPTH),
        tail_patterns=("head.weight",),
        prefetch=prefetch,
        transport=transport,
        reshard_after_forward=reshard,  # type: ignore[arg-type]
    )
    return model, sharded


def storage_alive(prefetch: int, reshard: str, transport: str) -> None:
    """At every block's forward and backward: gathered units at most 1 + prefetch, besides those kept by choice."""
    model, sharded = sharded_toy(prefetch, reshard, transport)
    gathered: list[int] = []
    gradients: list[int] = []

    def look(*_: object) -> None:
        kept = {
            unit.name for unit in sharded.units if reshard == "never" or unit is sharded.units[-1]
        }
        gathered.append(
            sum(1 for unit in sharded.units if unit.transient_nbytes and unit.name not in kept)
        )
        gradients.append(sum(r._pending is not None for r in sharded._schedule._reductions))

    for module in [block.up for block in model.blocks]:
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    tokens, labels = (share(t, dist.get_rank(), dist.get_world_size()) for t in batch(0))
    for _ in range(3):
        model(tokens, labels).backward()
    assert len(gathered) == 3 * 2 * DEPTH
    if reshard == "never":
        assert max(gathered) == 0  # all are kept
    else:
        assert max(gathered[2 * DEPTH :]) == 1 + prefetch, gathered
    assert 1 <= max(gradients) <= MAX_REDUCTIONS_IN_FLIGHT, gradients
    assert sharded.gathered_nbytes == 0
    sharded.close()


@pytest.mark.parametrize("reshard", ["default", "always", "never"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathered_units_and_reductions_in_flight_are_bounded(prefetch: int, reshard: str) -> None:
    run_distributed(storage_alive, 2, prefetch, reshard, "auto")


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_ring_keeps_to_the_same_bounds(prefetch: int) -> None:
    run_distributed(storage_alive, 2, prefetch, "default", "ring")


def resident() -> tuple[list[int], int]:
    model, sharded = sharded_toy(1, "default")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, labels = (share(t, dist.get_rank(), dist.get_world_size()) for t in batch(0))
    model(tokens, labels).backward()
    optimizer.step()
    tensors = [local.tensor for local in sharded.local_parameters()]
    kept = [
        t for p in tensors for t in (p, p.grad, *(s for s in optimizer.state[p].values() if s.ndim))
    ]
    planned = rank_bytes(sharded.plan, PlanSettings(matrix_optimizer="adamw"))
    storages = {p.grad.untyped_storage()._cdata: p.grad.untyped_storage() for p in tensors}  # type: ignore[union-attr]
    behind = sum(storage.nbytes() for storage in storages.values())
    assert (
        behind == planned[sharded.rank].gradients
    )  # rows do not hold on to the gradient that they are of
    return [rank.total for rank in planned], sum(t.numel() * t.element_size() for t in kept)  # type: ignore[union-attr]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_resident_bytes_are_the_plans_to_the_byte(world_size: int) -> None:
    answers = run_distributed(resident, world_size)
    for rank, (planned, held) in enumerate(answers):
        assert held == planned[rank], (rank, held, planned)


def owner_addresses() -> None:
    """Where compute and stored dtype agree the owner computes from its own storage, which never moves."""
    model, sharded = sharded_toy(1, "default")
    before = {local.fqn: local.tensor.data_ptr() for local in sharded.local_parameters()}
    seen: dict[str, set[int]] = {}

    def look(module: nn.Module, *_: object) -> None:
        seen.setdefault(names[module], set()).add(module.weight.data_ptr())  # type: ignore[operator, union-attr]

    names = {
        module: f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    for module in names:
        module.register_forward_pre_hook(look)
    tokens, labels = (share(t, dist.get_rank(), dist.get_world_size()) for t in batch(0))
    for _ in range(2):
        model(tokens, labels).backward()
    whole = [
        s for s in sharded.plan.shards if s.is_whole and s.owner == sharded.rank and s.fqn in seen
    ]
    for shard in whole:
        assert seen[shard.fqn] == {before[shard.fqn]}, shard.fqn
    for local in sharded.local_parameters():
        assert local.tensor.data_ptr() == before[local.fqn]


def test_owner_buffers_are_pinned() -> None:
    run_distributed(owner_addresses, 2)


def communication_of_a_step(prefetch: int) -> None:
    model, _ = sharded_toy(prefetch, "default")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = (share(t, dist.get_rank(), dist.get_world_size()) for t in batch(0))
    model(tokens, labels).backward()  # records the order
    optimizer.zero_grad()
    events: list[str] = []
    start_unshard, start_reduce = Unit.start_unshard, Unit.start_reduce

    def log_unshard(unit: Unit) -> None:
        if unit.state == "sharded" and unit.params:
            events.append(f"gather {unit.name}")
        start_unshard(unit)

    def log_reduce(unit: Unit) -> Reduction:
        events.append(f"reduce {unit.name}")
        return start_reduce(unit)

    Unit.start_unshard, Unit.start_reduce = log_unshard, log_reduce  # type: ignore[method-assign]
    with CollectiveCounter() as counter:
        model(tokens, labels).backward()
    Unit.start_unshard, Unit.start_reduce = start_unshard, start_reduce  # type: ignore[method-assign]
    assert counter.events
    with no_collectives():
        optimizer.step()
    blocks = [f"blocks.{i}" for i in range(DEPTH)]
    forward = [f"gather {name}" for name in ["embed", *blocks, "norm+head"]]
    if prefetch == 0:
        backward = [x for name in reversed(blocks) for x in (f"gather {name}", f"reduce {name}")]
        assert events == [*forward, "reduce norm+head", *backward, "reduce embed"], events
    else:
        # each block is gathered while its successor's backward still runs: before that one's reduction
        assert events[: len(forward)] == forward
        again = [event for event in events[len(forward) :] if event.startswith("gather")]
        assert again == [f"gather {name}" for name in reversed(blocks)]  # not the embedding
        order = [e for e in events if e.startswith("reduce")]
        assert order == [f"reduce {name}" for name in ["norm+head", *reversed(blocks), "embed"]]
        for earlier, later in zip(reversed(blocks), list(reversed(blocks))[1:], strict=False):
            assert events.index(f"gather {later}", len(forward)) < events.index(
                f"reduce {earlier}"
            ), events


@pytest.mark.parametrize("prefetch", [0, 1])
def test_order_of_events_and_no_collective_in_the_optimizer(prefetch: int) -> None:
    run_distributed(communication_of_a_step, 2, prefetch)
