"""Each transport against the plain definition of its two directions, with even, uneven and absent owners."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from matrixtitan.fsdp import transports
from matrixtitan.fsdp.background import CHUNK_BYTES
from matrixtitan.fsdp.streams import Work
from matrixtitan.fsdp.transports import OwnedTensor, runtime_class
from matrixtitan.plan.transports import TRANSPORTS
from tests.lib.distributed import run_distributed

BIG = 3 * CHUNK_BYTES // 4 + 5  # elements of float32: several chunks and a rest
SIZES: dict[
    str, list[tuple[int, int]]
] = {  # (owner, numel); an owner beyond the world is taken modulo its size
    "even": [(0, 64), (1, 64), (2, 64), (3, 64)],
    "one owner": [(1, 1000)],
    "uneven, an owner twice": [(2, 7), (0, 300), (2, 1), (1, 129)],
    "many chunks": [(0, BIG), (1, 3), (3, BIG // 2)],
}


def content(piece: int, numel: int, rank: int) -> torch.Tensor:
    """Small integers: their sums are exact, also in bfloat16."""
    return ((torch.arange(numel) * (piece + 3) + 5 * rank) % 7).float()


def move(
    name: str, layouts: list[list[tuple[int, int]]], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Gather and reduce each layout, all in flight at once: operations of one transport must not mix."""
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = "nccl" if device == "cuda" else "gloo"
    weights_way, gradients_way = (
        runtime_class(name)(dist.new_group(backend=backend)) for _ in range(2)
    )
    gathered, reduced, works = [], [], []
    for sizes in layouts:
        weights, gradients = [], []
        for index, (owner, numel) in enumerate(sizes):
            owner %= world
            full = content(index, numel, owner).to(device, dtype)
            piece = OwnedTensor(owner, full.clone() if rank == owner else torch.zeros_like(full))
            weights.append((full, piece))
            total = sum(content(index, numel, other) for other in range(world))
            mine = content(index, numel, rank).to(device, dtype)
            gradients.append((total.to(device, dtype), OwnedTensor(owner, mine)))  # type: ignore[union-attr]
        works += weights_way.unshard([piece for _, piece in weights])
        works += gradients_way.reduce([piece for _, piece in gradients])
        gathered += weights
        reduced += gradients
        time.sleep(0.002 * rank)  # ranks come at different times
    for work in works:
        work.wait()
    for full, piece in gathered:
        assert torch.equal(piece.tensor, full), (name, piece.owner)
    for total, piece in reduced:
        if piece.owner == rank:
            assert torch.equal(piece.tensor, total), (name, piece.owner)
    weights_way.close()
    gradients_way.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_moves_every_piece(name: str, sizes: str, world_size: int) -> None:
    run_distributed(move, world_size, name, [SIZES[sizes]] * 3, torch.float32)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_operations_of_different_owners_follow_each_other(name: str, world_size: int) -> None:
    layouts = [[(owner, 50 + owner)] for owner in range(world_size)] + list(SIZES.values())
    run_distributed(move, world_size, name, layouts + layouts[::-1], torch.float32)


def move_across_machines(sizes: list[tuple[int, int]]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # every rank on a machine of its own
    transports.ADD_BYTES = 64  # many more chunks than receives are posted ahead
    move("star", [sizes] * 3, torch.float32)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("sizes", ["even", "one owner", "uneven, an owner twice"])
def test_star_across_machines_moves_every_piece(sizes: str, world_size: int) -> None:
    run_distributed(move_across_machines, world_size, SIZES[sizes])


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_moves_bfloat16(name: str) -> None:
    run_distributed(move, 3, name, list(SIZES.values()), torch.bfloat16)


def sends_in_flight() -> int:
    """Most sends of one gather that this rank had issued and not yet seen done."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # every rank on a machine of its own
    transport = runtime_class("star")(dist.new_group())
    alive = most = 0
    isend = dist.isend

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            nonlocal alive
            self.work.wait()
            alive -= 1

    def counted(*args: Any, **kwargs: Any) -> Watched:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return Watched(isend(*args, **kwargs))

    rank, world = dist.get_rank(), dist.get_world_size()
    pieces = [OwnedTensor(owner, torch.full((1000,), float(rank))) for owner in range(world)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        for work in transport.unshard(pieces):
            work.wait()
    assert [piece.tensor[-1].item() for piece in pieces] == list(range(world))
    transport.close()
    return most


def test_star_sends_in_turn_across_machines() -> None:
    assert run_distributed(sends_in_flight, 4) == [1, 1, 1, 1]


def sent_ahead(direction: str) -> int:
    """Chunks of two operations, one an owner, that this rank of three sends before rank 2 joins in."""
    rank, world = dist.get_rank(), dist.get_world_size()
    transport = runtime_class("ring")(dist.new_group())
    flag, sent, isend = torch.zeros(1), 0, dist.isend

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        return isend(*args, **kwargs)

    def begin(count: int) -> list[Work]:
        return [
            work
            for _ in range(count)
            for work in getattr(transport, direction)(
                [OwnedTensor(owner, torch.ones(100)) for owner in range(world)]
            )
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        if rank == 1:
            works = begin(2)
            dist.send(flag, 0)  # only now: so rank 1 has both operations when the first chunk comes
            deadline = time.monotonic() + 10
            while sent < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            ahead = sent
            dist.send(flag, 2)
        elif rank == 0:
            dist.recv(flag, 1)
            works = begin(2)
            dist.recv(flag, 2)
            ahead = sent
            dist.send(flag, 2)
        else:
            dist.recv(flag, 1)
            dist.send(flag, 0)
            dist.recv(flag, 0)
            ahead = sent
            works = begin(2)
        for work in works:
            work.wait()
    assert sent == 2 * (world - 1)
    transport.close()
    return ahead


@pytest.mark.parametrize("direction", ["unshard", "reduce"])
def test_ring_begins_the_next_operation_once_it_has_sent_all_of_the_last(direction: str) -> None:
    """Each rank waits for what it must pass on, but not for what ends with it."""
    ahead = run_distributed(sent_ahead, 3, direction)
    # rank 0 lacks rank 2's chunk, which it must pass on; rank 1 has passed on rank 0's, and sent its next
    assert ahead == [1, 3, 0]


def reduce_irrational(name: str) -> torch.Tensor:
    transport = runtime_class(name)(dist.new_group())
    torch.manual_seed(dist.get_rank())
    tensors = [torch.randn(5000) for _ in range(dist.get_world_size())]
    for work in transport.reduce(
        [OwnedTensor(owner, tensor) for owner, tensor in enumerate(tensors)]
    ):
        work.wait()
    transport.close()
    return tensors[dist.get_rank()]


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_sums_are_the_same_bits_in_two_runs(name: str) -> None:
    first, second = (run_distributed(reduce_irrational, 4, name) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def die_in_the_middle(name: str) -> None:
    transport = runtime_class(name)(dist.new_group())
    dist.barrier()
    if dist.get_rank() == 1:
        raise SystemExit("gone")
    for work in transport.unshard([OwnedTensor(1, torch.zeros(1000))]):
        work.wait()


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_a_dead_rank_raises_where_its_data_is_awaited(name: str) -> None:
    messages = run_distributed(die_in_the_middle, 3, name, timeout=20, expect_failure=True)
    for rank in (0, 2):
        assert "RuntimeError" in messages[rank], messages[rank]


@pytest.mark.parametrize("call", ["broadcast", "reduce"])
def test_a_launch_on_nccl_is_asynchronous(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces at once, and the work of the launch, which NCCL's watchdog sees, to wait for; by stand-ins."""
    launch, issued = SimpleNamespace(works=["the launch"]), []

    @contextmanager
    def manager(**keys: Any) -> Iterator[SimpleNamespace]:
        assert keys["async_ops"]
        yield launch
        assert len(issued) == 2

    monkeypatch.setattr(dist.distributed_c10d, "_coalescing_manager", manager)
    monkeypatch.setattr(dist, call, lambda tensor, **keys: issued.append(keys))
    transport = object.__new__(runtime_class("grouped"))
    transport.group, transport.on_nccl, transport._pair = None, True, None  # type: ignore[attr-defined]
    move_all = transport.unshard if call == "broadcast" else transport.reduce
    assert move_all([OwnedTensor(0, torch.ones(3)), OwnedTensor(1, torch.ones(2))]) == [
        "the launch"
    ]
    assert all(keys["async_op"] for keys in issued)
