"""Muon on row-sharded DTensors is Muon on whole matrices, by every MuonExchange."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from matrixtitan.fsdp.api import make_transport
from matrixtitan.optim.muon import Muon
from matrixtitan.rules import MuonRule
from matrixtitan.strategies.fsdp2_collectives import TransportAllGather
from matrixtitan.strategies.matrix_exchange import (
    AllToAll,
    GatherEach,
    GatherOnce,
    MuonExchange,
    ShardedUpdate,
    assign_owners,
    make_buckets,
    shard_bounds,
)
from tests.lib.count_collectives import CollectiveCounter
from tests.lib.distributed import run_distributed

SHAPES: dict[str, tuple[int, ...]] = {
    "square": (12, 12),
    "uneven": (7, 20),
    "tall": (30, 5),
    "fewer rows than ranks": (2, 9),
    "same as square": (12, 12),
    "heads": (12, 8),
    "stack": (5, 6, 4),
}
HEAD_ROWS = 4
EXCHANGES = ("gather_each", "gather_once", "gather_once_direct", "all_to_all")


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_muon(params: dict[str, Tensor]) -> Muon:
    named = [(name, param) for name, param in params.items() if name != "heads"]
    groups = [{"params": named}, {"params": [("heads", params["heads"])], "block_rows": HEAD_ROWS}]
    return Muon(groups, lr=0.1, weight_decay=0.01)


def make_exchange(name: str) -> MuonExchange:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "gather_each": GatherEach,
        "gather_once": GatherOnce,
        "gather_once_direct": lambda mesh: GatherOnce(
            mesh, TransportAllGather(make_transport("auto", mesh.get_group(), torch.device("cpu")))
        ),
        "all_to_all": AllToAll,
    }[name](mesh)


class Trained(NamedTuple):
    """Weights and momenta after the last step, and what that step communicated."""

    weights: dict[str, Tensor]
    momenta: dict[str, Tensor]
    calls: dict[str, int]
    nbytes: float


def train(name: str, steps: int) -> Trained:
    exchange = make_exchange(name)
    params = {
        fqn: nn.Parameter(distribute_tensor(value, exchange.mesh, [Shard(0)]))
        for fqn, value in values(0).items()
    }
    muon = make_muon(params)
    for step in range(steps):
        for fqn, gradient in values(1 + step).items():
            params[fqn].grad = distribute_tensor(gradient, exchange.mesh, [Shard(0)])
        with CollectiveCounter() as counter:
            exchange.step(muon)
    momenta = {
        fqn: muon.state[param]["momentum_buffer"].full_tensor() for fqn, param in params.items()
    }
    weights = {fqn: param.detach().full_tensor() for fqn, param in params.items()}
    return Trained(weights, momenta, dict(counter.calls_by_op()), counter.logical_bytes)


def reference(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    params = {fqn: nn.Parameter(value) for fqn, value in values(0).items()}
    muon = make_muon(params)
    for step in range(steps):
        for fqn, gradient in values(1 + step).items():
            params[fqn].grad = gradient
        muon.step()
    momenta = {fqn: muon.state[param]["momentum_buffer"] for fqn, param in params.items()}
    return {fqn: param.detach() for fqn, param in params.items()}, momenta


def train_all(steps: int) -> dict[str, Trained]:
    return {name: train(name, steps) for name in EXCHANGES}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_muon_on_whole_matrices(world_size: int) -> None:
    weights, momenta = reference(steps=3)
    for results in run_distributed(train_all, world_size, 3):
        for found in results.values():
            torch.testing.assert_close(found.momenta, momenta, rtol=0, atol=0)
            torch.testing.assert_close(found.weights, weights, rtol=2e-5, atol=2e-5)


def padded_rows(rows: int, world_size: int) -> int:
    return ceil(rows / world_size) * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_way_takes_its_own_path_and_bytes(world_size: int) -> None:
    matrices = [shape for shape in SHAPES.values() if len(shape) == 2]
    others = (world_size - 1) / world_size
    padded = 4 * sum(padded_rows(rows, world_size) * cols for rows, cols in matrices)
    exact = 4 * sum(rows * cols for rows, cols in matrices)

    results = run_distributed(train_all, world_size, 1)
    for result in results:
        gather_each, gather_once, direct, all_to_all = (result[name] for name in EXCHANGES)
        assert gather_each.calls == {"all_gather_into_tensor": len(matrices)}
        # one for each of Muon's parameter groups
        assert gather_once.calls == {"_allgather_base_": 2}
        assert direct.calls == {"send": 2 * (world_size - 1)}
        for gathered in (gather_each, gather_once, direct):
            assert gathered.nbytes == pytest.approx(others * padded)
        assert set(all_to_all.calls) == {"alltoall_base_"}, "no gather anywhere"
        assert all_to_all.calls["alltoall_base_"] % 2 == 0
    total = sum(result["all_to_all"].nbytes for result in results)
    assert total == pytest.approx(2 * (exact - exchange_to_self(world_size))), (
        "not one padded element"
    )


def exchange_to_self(world_size: int) -> int:
    """Bytes of the rows that an owner holds of its own matrices: they do not travel."""
    kept = 0
    for fqns in ([f for f in SHAPES if f not in ("heads", "stack")], ["heads"]):
        updates = [
            make_update(fqn, SHAPES[fqn], HEAD_ROWS if fqn == "heads" else None) for fqn in fqns
        ]
        for bucket in make_buckets(updates, world_size):
            for rank, owned in enumerate(bucket):
                for index in owned:
                    rows, cols = updates[index].shape
                    start, stop = shard_bounds(rows, world_size, rank)
                    kept += 4 * (stop - start) * cols
    return kept


def make_update(fqn: str, shape: tuple[int, ...], block_rows: int | None = None) -> ShardedUpdate:
    rows, cols = shape
    cpu = torch.device("cpu")
    return ShardedUpdate(
        fqn, lambda: torch.empty(0, cols), (rows, cols), block_rows, MuonRule(), torch.float32, cpu
    )


def test_buckets_hold_every_matrix_once() -> None:
    updates = [
        make_update(f"layers.{layer}.{name}", shape)
        for layer in range(6)
        for name, shape in (("wq", (64, 64)), ("w1", (160, 64)), ("w2", (64, 160)))
    ]
    buckets = make_buckets(updates, 4)
    assert 2 <= len(buckets) <= 6
    assert sorted(index for bucket in buckets for owned in bucket for index in owned) == list(
        range(len(updates))
    )
    loads = [sum(updates[i].flops for bucket in buckets for i in bucket[rank]) for rank in range(4)]
    assert max(loads) < 1.2 * sum(loads) / 4


def test_owners_are_balanced_and_deterministic() -> None:
    costs = [("b", 3), ("a", 3), ("c", 2), ("d", 2), ("e", 2)]
    assert assign_owners(costs, 2) == [1, 0, 0, 1, 0]
    assert assign_owners([], 3) == []


@pytest.mark.parametrize(("rows", "world_size"), [(7, 3), (2, 4), (8, 4), (5, 4), (1, 1)])
def test_bounds_are_those_of_dtensor(rows: int, world_size: int) -> None:
    chunks = list(torch.arange(rows).chunk(world_size))
    for rank in range(world_size):
        start, stop = shard_bounds(rows, world_size, rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == expected


def gradient_of_a_plain_tensor() -> str:
    exchange = make_exchange("all_to_all")
    param = nn.Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4)
    with pytest.raises(TypeError, match="DTensor") as error:
        exchange.step(Muon([param]))
    return str(error.value)


def test_a_plain_tensor_is_refused() -> None:
    assert all("(4, 4)" in message for message in run_distributed(gradient_of_a_plain_tensor, 2))
