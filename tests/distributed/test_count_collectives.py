"""The counter sees every way in which PyTorch communicates, and its bytes are the formulas'."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.lib.count_collectives import CollectiveCounter, no_collectives
from tests.lib.distributed import run_distributed

Counts = dict[str, tuple[int, float]]


def summary(counter: CollectiveCounter) -> Counts:
    ops = {event.op for event in counter.events}
    return {
        op: (len(e := [x.logical_bytes for x in counter.events if x.op == op]), sum(e))
        for op in ops
    }


def count_each_kind() -> list[Counts]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []

    def counted(fn: object) -> None:
        assert callable(fn)
        with CollectiveCounter() as counter:
            fn()
        results.append(summary(counter))

    whole = torch.ones(world_size * 10)
    part = torch.ones(10)
    counted(lambda: dist.all_reduce(whole))
    counted(lambda: dist.all_gather_into_tensor(whole, part))
    counted(lambda: dist.reduce_scatter_tensor(part, whole))
    counted(lambda: dist.broadcast(whole, src=0, async_op=True).wait())
    splits = [3 * (peer + 1) for peer in range(world_size)]
    received = torch.empty(world_size * splits[rank])
    counted(
        lambda: dist.all_to_all_single(
            received,
            torch.ones(sum(splits)),
            output_split_sizes=[splits[rank]] * world_size,
            input_split_sizes=splits,
        )
    )
    group = dist.new_group(list(range(world_size)))
    counted(lambda: dist.all_reduce(whole, group=group, async_op=True).wait())
    counted(dist.barrier)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_of_each_operation(world_size: int) -> None:
    for rank, results in enumerate(run_distributed(count_each_kind, world_size)):
        whole, others = 40.0 * world_size, (world_size - 1) / world_size
        all_to_all = 4.0 * sum(3 * (peer + 1) for peer in range(world_size) if peer != rank)
        assert results == [
            {"allreduce_": (1, pytest.approx(2 * others * whole))},
            {"_allgather_base_": (1, pytest.approx(others * whole))},
            {"_reduce_scatter_base_": (1, pytest.approx(others * whole))},
            {"broadcast_": (1, pytest.approx(others * whole))},
            {"alltoall_base_": (1, pytest.approx(all_to_all))},
            {"allreduce_": (1, pytest.approx(2 * others * whole))},
            {"barrier": (1, 0.0)},
        ]


def send_from_another_thread() -> Counts:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(5)

    def exchange() -> None:
        sending = dist.isend(torch.ones(5), dst=(rank + 1) % world_size)
        dist.recv(received, src=(rank - 1) % world_size)
        sending.wait()

    with CollectiveCounter() as counter:
        thread = threading.Thread(target=exchange)
        thread.start()
        thread.join()
        exchange()
    exchange()  # after the counter: not counted
    return summary(counter)


def test_sends_of_other_threads_are_counted() -> None:
    assert run_distributed(send_from_another_thread, 2) == [{"send": (2, 40.0)}] * 2


def count_frameworks() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bytes_of = {}
    replicated = DistributedDataParallel(nn.Linear(8, 8, bias=False))
    with CollectiveCounter() as counter:
        replicated(torch.ones(2, 8)).sum().backward()
    bytes_of["ddp"] = counter.logical_bytes
    sharded = nn.Linear(8, 8, bias=False)
    fully_shard(sharded, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded(torch.ones(2, 8)).sum().backward()
    with CollectiveCounter() as counter:
        sharded(torch.ones(2, 8)).sum().backward()
    bytes_of["fsdp2"] = counter.logical_bytes
    matrix = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    with CollectiveCounter() as counter:
        matrix.full_tensor()
    bytes_of["full_tensor"] = counter.logical_bytes
    return bytes_of


def test_ddp_fsdp2_and_dtensor_are_seen() -> None:
    for result in run_distributed(count_frameworks, 4):
        weight = 8 * 8 * 4 * 3 / 4
        assert result == {"ddp": 2 * weight, "fsdp2": 2 * weight, "full_tensor": weight}


def assert_silence() -> None:
    with no_collectives():
        torch.ones(3).sum()
    with pytest.raises(AssertionError, match="allreduce_"), no_collectives():
        dist.all_reduce(torch.ones(1))


def test_no_collectives_fails_on_the_first_one() -> None:
    run_distributed(assert_silence, 2)
