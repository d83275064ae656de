"""How many bytes are alive, and when: gathered weights, full gradients, and resident bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from matrixtitan.config import OptimizerConfig
from matrixtitan.fsdp import MatrixFSDP, MixedPrecisionPolicy, fully_shard, unit
from matrixtitan.fsdp.buffers import align_up, element_alignment
from matrixtitan.fsdp.unit import Reduction, Unit
from matrixtitan.optim.build import build_optimizers
from matrixtitan.plan.cost import ResidentBytes, rank_bytes
from matrixtitan.plan.planner import PlanSettings
from matrixtitan.plan.shard import ParamSpec, Plan, Segment
from matrixtitan.plan.transport_registry import REDUCTIONS_IN_FLIGHT
from matrixtitan.predict.memory import Precision, memory_table
from matrixtitan.rules import RULES
from tests.lib.count_collectives import CollectiveCounter, no_collectives
from tests.lib.distributed import run_distributed
from tests.lib.toy import batch, gathered_nbytes, make_toy, share, toy_units

DEPTH = 6


def sharded_toy(
    prefetch: int,
    reshard: str,
    transport: str = "auto",
    replicas: int = 1,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    plan: Plan | None = None,
    **kwargs: int,
) -> tuple[nn.Module, MatrixFSDP]:
    model = make_toy(depth=DEPTH, **kwargs)
    shard_ranks = dist.get_world_size() // replicas
    sharded = fully_shard(
        model,
        units=toy_units(depth=DEPTH),
        mesh=dist.init_device_mesh("cpu", (replicas, shard_ranks), mesh_dim_names=("r", "s")),
        plan=plan,
        tail_patterns=("head.weight",),
        mp_policy=mp_policy,
        prefetch=prefetch,
        transport=transport,
        reshard_after_forward=reshard,  # type: ignore[arg-type]
    )
    return model, sharded


def my_batch() -> tuple[Tensor, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, labels = batch(0)
    return share(tokens, rank, world), share(labels, rank, world)


class FullGradients:
    """Watches the storage of full gradients, unit by unit, by weak references.

    It counts the gradients as autograd made them, and the tensors that they travel in. A gradient
    that this rank owns whole becomes the owner's `.grad`, and is not counted once its reduction has
    begun.
    """

    def __init__(self, sharded: MatrixFSDP) -> None:
        self.of_units: dict[str, list[tuple[StorageWeakRef, int]]] = {}
        self.most = 0
        self.most_nbytes = 0
        self._sharded = sharded
        self._handles: list[RemovableHandle] = []
        self._start_reduce = Unit.start_reduce

    def __enter__(self) -> FullGradients:
        def start_reduce(unit: Unit) -> Reduction:
            reduction = self._start_reduce(unit)
            refs = self.of_units.setdefault(unit.name, [])
            owned = set()
            for moved in reduction._reduced:
                refs.append(weak(moved.tensor))
                whole = moved.tensor.nbytes == moved.tensor.untyped_storage().nbytes()
                if moved.owner == self._sharded.rank and whole:
                    owned.add(refs[-1][0].cdata)
            self.of_units[unit.name] = [ref for ref in refs if ref[0].cdata not in owned]
            self.look()
            return reduction

        def made(unit: Unit, param: Tensor) -> None:
            assert param.grad is not None
            refs = [ref for ref in self.of_units.get(unit.name, []) if not ref[0].expired()]
            self.of_units[unit.name] = [*refs, weak(param.grad)]
            self.look()

        for sharded_unit in self._sharded.units:
            for param in sharded_unit.params:
                assert param.unsharded is not None
                handle = param.unsharded.register_post_accumulate_grad_hook(
                    partial(made, sharded_unit)
                )
                self._handles.append(handle)
        Unit.start_reduce = start_reduce  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Unit.start_reduce = self._start_reduce  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()

    def look(self) -> int:
        """Units with a full gradient alive."""
        alive = {
            name: {ref.cdata: nbytes for ref, nbytes in refs if not ref.expired()}
            for name, refs in self.of_units.items()
        }
        self.most = max(self.most, units := sum(map(bool, alive.values())))
        self.most_nbytes = max(
            self.most_nbytes, sum(sum(storages.values()) for storages in alive.values())
        )
        return units


def weak(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    """A tensor's storage and its bytes."""
    storage = tensor.untyped_storage()
    return StorageWeakRef(storage), storage.nbytes()


def storage_alive(
    prefetch: int,
    reshard: str,
    transport: str,
    pack_below: int,
    in_flight: int = REDUCTIONS_IN_FLIGHT["gloo"],
) -> None:
    """At each block's forward and backward, at most 1 + prefetch units are gathered.

    Units that `reshard` keeps for backward are not counted.
    """
    unit.PACK_BELOW = pack_below
    model, sharded = sharded_toy(prefetch, reshard, transport)
    assert sharded._schedule.max_reductions == REDUCTIONS_IN_FLIGHT["gloo"]
    sharded._schedule.max_reductions = in_flight
    kept = {"always": [], "default": sharded.units[-1:], "never": sharded.units}[reshard]
    gathered: dict[str, list[int]] = {"forward": [], "backward": []}
    gradients = FullGradients(sharded)

    def look(direction: str) -> None:
        units = [u for u in sharded.units if u.transient_nbytes and u not in kept]
        gathered[direction].append(len(units))
        gradients.look()

    for module in [block.up for block in model.blocks]:
        module.register_forward_hook(lambda *_: look("forward"))
        module.register_full_backward_hook(lambda *_: look("backward"))
    with gradients:
        for _ in range(3):
            model(*my_batch()).backward()
            # none outlives backward
            assert gradients.look() == 0
    for direction, counts in gathered.items():
        assert len(counts) == 3 * DEPTH
        # with "never" all are kept; the first pass records the order and prefetches nothing
        most = 0 if reshard == "never" else 1 + prefetch
        assert max(counts[DEPTH:]) == most, (direction, counts)
    assert len(gradients.of_units) == DEPTH + 2
    # those in reduction, and one in backward
    assert gradients.most == 1 + in_flight
    assert gathered_nbytes(sharded) == 0
    sharded.close()


@pytest.mark.parametrize("reshard", ["default", "always", "never"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathered_units_and_reductions_in_flight_are_bounded(prefetch: int, reshard: str) -> None:
    run_distributed(storage_alive, 2, prefetch, reshard, "auto", unit.PACK_BELOW)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_ring_keeps_to_the_same_bounds(prefetch: int) -> None:
    run_distributed(storage_alive, 2, prefetch, "default", "ring", unit.PACK_BELOW)


@pytest.mark.parametrize("transport", ["auto", "ring"])
def test_gradients_that_travel_unpacked_are_bounded_alike(transport: str) -> None:
    run_distributed(storage_alive, 3, 1, "default", transport, 0)


def test_as_few_reductions_as_on_gpus_are_bounded_alike() -> None:
    in_flight = REDUCTIONS_IN_FLIGHT["nccl"]
    run_distributed(storage_alive, 2, 1, "default", "auto", unit.PACK_BELOW, in_flight)


def full_gradients_on_no_owner(reduce_dtype: torch.dtype, backend: str) -> int:
    """Rank 0 owns everything, so all of rank 1's gradients travel.

    Rank 0 returns the bytes of the memory table, and rank 1 the most bytes that it held.
    """
    unit.PACK_BELOW = 0
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    plan = sharded_toy(1, "default")[1].plan
    on_first = [replace(shard, segments=(Segment(0, 0, shard.shape[0]),)) for shard in plan.shards]
    plan = replace(plan, shards=tuple(on_first))
    model, sharded = sharded_toy(1, "default", mp_policy=policy, plan=plan)
    sharded._schedule.max_reductions = REDUCTIONS_IN_FLIGHT[backend]
    with FullGradients(sharded) as gradients:
        for _ in range(2):
            model(*my_batch()).backward()
    if sharded.rank:
        return gradients.most_nbytes
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    table = memory_table(
        [ParamSpec(s.fqn, s.shape, s.role, s.unit, s.block_rows) for s in plan.shards],
        plan,
        PlanSettings(),
        Precision(reduce=names[reduce_dtype]),
        world_size=2,
        backend=backend,
    )
    return sum(t.bytes for t in table["matrix_fsdp"] if t.name.startswith("full gradients"))


@pytest.mark.parametrize("backend", REDUCTIONS_IN_FLIGHT)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_full_gradients_are_the_memory_tables_to_the_byte(
    reduce_dtype: torch.dtype, backend: str
) -> None:
    """With each backend's number of reductions in flight, on gloo."""
    planned, held = run_distributed(full_gradients_on_no_owner, 2, reduce_dtype, backend)
    assert held == planned


def accumulated_sums(in_flight: int) -> None:
    """The first backward's sums wait and become the gradients; later sums are added by unit."""
    model, sharded = sharded_toy(1, "default")
    sharded._schedule.max_reductions = in_flight
    waiting: list[int] = []
    for module in [block.up for block in model.blocks]:
        module.register_full_backward_hook(
            lambda *_: waiting.append(sum(bool(r._mine) for r in sharded._schedule._reductions))
        )
    most = []
    for _ in range(3):
        model(*my_batch()).backward()
        most.append(max(waiting))
        waiting.clear()
    assert most == [DEPTH, in_flight + 1, in_flight + 1]
    sharded.close()


@pytest.mark.parametrize("in_flight", REDUCTIONS_IN_FLIGHT.values())
def test_accumulating_holds_no_second_copy_of_the_gradients(in_flight: int) -> None:
    run_distributed(accumulated_sums, 2, in_flight)


def accumulated() -> None:
    """Without reducing, every full gradient stays, once and in reduce dtype.

    The next reduction frees them all.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, sharded = sharded_toy(1, "default", mp_policy=policy)
    params = [param for unit in sharded.units for param in unit.params]
    made: list[StorageWeakRef] = []

    def remember(param: Tensor) -> None:
        assert param.grad is not None and param.grad.dtype == torch.bfloat16
        made.append(StorageWeakRef(param.grad.untyped_storage()))

    for param in params:
        param.unsharded.register_post_accumulate_grad_hook(remember)  # type: ignore[union-attr]
    sharded.set_reduce_gradients(False)
    for _ in range(2):
        model(*my_batch()).backward()
        kept = [param.unreduced_grad for param in params]
        assert all(grad is not None and grad.dtype == torch.float32 for grad in kept)
        assert storage_bytes(kept) == sum(4 * param.shard.numel for param in params)
        assert all(ref.expired() for ref in made)
        assert all(local.tensor.grad is None for local in sharded.local_parameters())
    assert len(made) == 2 * len(params)
    refs = [StorageWeakRef(grad.untyped_storage()) for grad in kept if grad is not None]
    del kept
    sharded.set_reduce_gradients(True)
    with FullGradients(sharded) as gradients:
        model(*my_batch()).backward()
        assert gradients.look() == 0
    # all gradients are small here, and travel packed
    assert all(ref.expired() for ref in [*refs, *made])


def test_accumulating_without_reducing_keeps_all_in_reduce_dtype() -> None:
    run_distributed(accumulated, 2)


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all storage behind `tensors`, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def resident(name: str, dim: int, replicas: int) -> None:
    """Resident storage has the plan's bytes, and the padding of the owner buffers besides."""
    model, sharded = sharded_toy(1, "default", replicas=replicas, dim=dim)
    local = sharded.local_parameters()
    optimizers = build_optimizers(local, OptimizerConfig(name=name))  # type: ignore[arg-type]
    for _ in range(2):
        optimizers.zero_grad()
        model(*my_batch()).backward()
        optimizers.step()
    state = [state.tensor for state in optimizers.state_tensors() if state.tensor.ndim]
    held = ResidentBytes(
        storage_bytes(param.tensor for param in local),
        storage_bytes(param.tensor.grad for param in local),
        storage_bytes(state),
    )
    settings = PlanSettings(rule=RULES[name]())
    planned = rank_bytes(sharded.plan, settings)[sharded.rank]
    alignment = element_alignment(torch.device("cpu"), torch.float32)
    padded = [align_up(param.tensor.numel(), alignment) for param in local]
    padding = 4 * (sum(padded) - sum(param.tensor.numel() for param in local))
    assert held == planned._replace(parameters=planned.parameters + padding)
    # rows of 16 floats fill whole lines of 64 bytes
    assert (padding == 0) == (dim == 16)
    assert gathered_nbytes(sharded) == 0


def resident_in_every_way(replicas: int) -> None:
    for name in ("adamw", "muon"):
        for dim in (8, 16):
            resident(name, dim, replicas)


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (4, 1), (4, 2)])
def test_resident_bytes_are_the_plans_to_the_byte(world_size: int, replicas: int) -> None:
    run_distributed(resident_in_every_way, world_size, replicas)


def owner_addresses() -> None:
    """Where compute and stored dtype agree, an owner computes from its owner buffer.

    The buffer never moves.
    """
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
    tokens, labels = my_batch()
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


def communication_of_a_step(prefetch: int, transport: str) -> None:
    model, sharded = sharded_toy(prefetch, "default", transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = my_batch()
    # the first step records the order
    model(tokens, labels).backward()
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
    backward = list(reversed(blocks))
    assert events[: len(forward)] == forward
    events = events[len(forward) :]
    gathers = [event for event in events if event.startswith("gather")]
    reductions = [event for event in events if event.startswith("reduce")]
    # not the embedding, whose backward needs no weight
    assert gathers == [f"gather {name}" for name in backward]
    assert reductions == [f"reduce {name}" for name in ["norm+head", *backward, "embed"]]
    # before a block's reduction, `prefetch` blocks more have been gathered, and no others
    for i, name in enumerate(backward):
        begun = events[: events.index(f"reduce {name}")].count
        ahead = [begun(f"gather {other}") for other in backward[i:]]
        assert ahead == [int(j <= prefetch) for j in range(len(ahead))], (name, events)
    sharded.close()


@pytest.mark.parametrize("transport", ["auto", "ring"])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_order_of_events_and_no_collective_in_the_optimizer(prefetch: int, transport: str) -> None:
    run_distributed(communication_of_a_step, 2, prefetch, transport)
