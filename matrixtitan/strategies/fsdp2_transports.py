"""All-gather and reduce-scatter for FSDP2 on gloo that cost (N - 1) / N of the bytes on the wire.

Owns direct exchanges built from sends and receives, given to FSDP2 through its public `set_custom_all_gather` and
`set_custom_reduce_scatter`. Gloo's own reduce-scatter is an all-reduce, which sends everything twice, and its
all-gather is slower inside a machine. It never decides when FSDP2 communicates. Next: `fsdp2.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

TAGS_PER_DIRECTION = 1 << 20
RECEIVES_AHEAD = 2
"""Buffers of the reduce-scatter: one is being added while the next arrives."""


class Exchange(dist.Work):
    """Several sends and receives as one work handle, which FSDP2 waits for where it needs the result."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors  # alive until everything was sent

    def wait(self, timeout: object = None) -> bool:
        for work in self._works:
            work.wait()
        self._works, self._tensors = (), ()
        return True


class DirectAllGather:
    """Every rank sends its shard to every other; always asynchronous, so that FSDP2's prefetched unshards overlap."""

    def __init__(self) -> None:
        self._calls = count()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Fill output_tensor (N n,) with every rank's input_tensor (n,); the handle says when it is there."""
        rank, size = group.rank(), group.size()
        tag = next(self._calls) % TAGS_PER_DIRECTION
        shards = output_tensor.view(size, -1)
        if (
            shards[rank].data_ptr() != input_tensor.data_ptr()
        ):  # FSDP2's input is its place in the output
            shards[rank].copy_(input_tensor)
        works = [
            _issued(dist.irecv(shards[peer], group=group, group_src=peer, tag=tag))
            for peer in _others(rank, size, step=-1)
        ]
        works += [
            _issued(dist.isend(shards[rank], group=group, group_dst=peer, tag=tag))
            for peer in _others(rank, size, step=1)
        ]
        return Exchange(works, [output_tensor])


class DirectReduceScatter:
    """Every rank sends to every other that one's part, and adds what it receives, in a fixed order."""

    def __init__(self) -> None:
        self._calls = count()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum part r of every rank's input_tensor (N n,) into rank r's output_tensor (n,).

        Done when it returns: on a CPU FSDP2 reads the output straight away. ValueError for anything but a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"DirectReduceScatter adds; FSDP2 asked for {op}: set_force_sum_reduction_for_comms(True)"
            )
        rank, size = group.rank(), group.size()
        tag = TAGS_PER_DIRECTION + next(self._calls) % TAGS_PER_DIRECTION
        parts = input_tensor.view(size, -1)
        sends = [
            _issued(dist.isend(parts[peer], group=group, group_dst=peer, tag=tag))
            for peer in _others(rank, size, step=1)
        ]
        peers = _others(rank, size, step=-1)
        buffers = [torch.empty_like(output_tensor) for _ in range(min(RECEIVES_AHEAD, len(peers)))]

        def receive(index: int) -> dist.Work:
            buffer = buffers[index % RECEIVES_AHEAD]
            return _issued(dist.irecv(buffer, group=group, group_src=peers[index], tag=tag))

        receives = [receive(index) for index in range(len(buffers))]
        output_tensor.copy_(parts[rank])
        for index in range(len(peers)):
            receives[index].wait()
            output_tensor.add_(buffers[index % RECEIVES_AHEAD])
            if index + RECEIVES_AHEAD < len(peers):
                receives.append(receive(index + RECEIVES_AHEAD))
        for send in sends:
            send.wait()


def _others(rank: int, size: int, step: int) -> list[int]:
    """The other ranks, nearest first in the direction of `step`: senders spread over receivers."""
    return [(rank + step * distance) % size for distance in range(1, size)]


def _issued(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
