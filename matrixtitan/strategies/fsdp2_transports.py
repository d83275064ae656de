"""All-gather and reduce-scatter for FSDP2 on gloo: MatrixFSDP's own transports, moving FSDP2's even shards.

Given to FSDP2 through its public `set_custom_all_gather` and `set_custom_reduce_scatter`. They cost (N - 1) / N of the
bytes on the wire, where gloo's own reduce-scatter is an all-reduce, which sends everything twice. What remains between
the two runtimes is what they move and when. It never decides when FSDP2 communicates. Next: `fsdp2.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.fsdp.streams import Work
from matrixtitan.fsdp.transports import OwnedTensor, Transport


class Moving(dist.Work):
    """What a transport is moving, as one work handle, which FSDP2 waits for where it needs the result."""

    def __init__(self, works: Sequence[Work], pieces: Sequence[OwnedTensor]) -> None:
        super().__init__()
        self._works = works
        self._pieces = pieces  # alive until everything was sent

    def wait(self, timeout: object = None) -> bool:
        for work in self._works:
            work.wait()
        self._works, self._pieces = (), ()
        return True


class TransportAllGather:
    """Always asynchronous, so that FSDP2's prefetched unshards overlap."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

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
        pieces = _even_pieces(output_tensor, group.size())
        mine = pieces[group.rank()].tensor
        if mine.data_ptr() != input_tensor.data_ptr():  # FSDP2's is its place in the output
            mine.copy_(input_tensor)
        return Moving(self._transport.unshard(pieces), pieces)


class TransportReduceScatter:
    """Sums in a fixed order."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

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
        """Sum part r of every rank's input_tensor (N n,) into rank r's output_tensor (n,); the input is overwritten.

        Done when it returns: on a CPU FSDP2 reads the output straight away. ValueError for anything but a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"TransportReduceScatter adds; FSDP2 asked for {op}: set_force_sum_reduction_for_comms(True)"
            )
        pieces = _even_pieces(input_tensor, group.size())
        for work in self._transport.reduce(pieces):
            work.wait()
        output_tensor.copy_(pieces[group.rank()].tensor)


def _even_pieces(tensor: Tensor, world_size: int) -> list[OwnedTensor]:
    """Part r belongs to rank r."""
    return [
        OwnedTensor(owner, part) for owner, part in enumerate(tensor.view(world_size, -1).unbind())
    ]
