"""All-gather and reduce-scatter for FSDP2 on gloo, by MatrixFSDP's own transports.

gloo's reduce-scatter is an all-reduce, which sends everything twice. These two send (N - 1) / N of
the bytes. So on gloo the two runtimes have equally good collectives, and differ only in what they
send and when. FSDP2 gets these collectives by its public `set_custom_all_gather` and
`set_custom_reduce_scatter`, and decides when they run. Next: `fsdp2.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.fsdp.streams import Work
from matrixtitan.fsdp.transports import OwnedTensor, Transport


class TransportWork(dist.Work):
    """A transport's works as one work handle, which FSDP2 waits for where it needs the result."""

    def __init__(self, works: Sequence[Work], shards: Sequence[OwnedTensor]) -> None:
        super().__init__()
        self._works = works
        # the transport needs them alive until its works were waited for
        self._shards = shards

    def wait(self, timeout: object = None) -> bool:
        for work in self._works:
            work.wait()
        self._works, self._shards = (), ()
        return True


class _OnTransport:
    """What FSDP2 asks of either collective besides the call itself."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TransportAllGather(_OnTransport):
    """FSDP2's all-gather; always asynchronous, so that prefetched unshards overlap."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Fill `output_tensor` (N n,) with every rank's `input_tensor` (n,).

        The output is there once the returned work was waited for.
        """
        shards = _even_shards(output_tensor, group.size())
        mine = shards[group.rank()].tensor
        # FSDP2's own input is a view of its place in the output
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        return TransportWork(self._transport.unshard(shards), shards)


class TransportReduceScatter(_OnTransport):
    """FSDP2's reduce-scatter; it adds in a fixed order, so two runs are bitwise identical."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum part r of every rank's `input_tensor` (N n,) into rank r's `output_tensor` (n,).

        The input is overwritten. The sum is done when this returns, because on a CPU FSDP2 reads
        the output at once. Raises ValueError for another operation than a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"TransportReduceScatter adds; FSDP2 asked for {op}: "
                "set_force_sum_reduction_for_comms(True)"
            )
        shards = _even_shards(input_tensor, group.size())
        for work in self._transport.reduce(shards):
            work.wait()
        output_tensor.copy_(shards[group.rank()].tensor)


def _even_shards(tensor: Tensor, world_size: int) -> list[OwnedTensor]:
    """`tensor` in equal parts, of which rank r owns part r."""
    return [
        OwnedTensor(owner, part) for owner, part in enumerate(tensor.view(world_size, -1).unbind())
    ]
