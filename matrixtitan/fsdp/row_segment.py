"""RowSegment: some rows of a larger tensor, as PyTorch Distributed Checkpoint (DCP) saves them.

A RowSegment is a tensor of the full shape without storage of its own. It answers DCP's
checkpointable protocol (methods with double underscores, which DCP looks up by name) with the rows
that this rank holds, and with no chunk where it holds none. It supports no arithmetic and no copy.
Next: `state_dict.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

CONVERSIONS = frozenset({"to", "cpu", "cuda", "type", "contiguous", "clone", "detach", "numpy"})
"""Methods of Tensor that copy or convert."""


def _refuse(operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation} on a RowSegment: it only describes rows to save or load; use its .rows, "
        "torch.distributed.checkpoint.save for a whole state dict, or handle.state_dict(full=True) "
        "on what fully_shard returned for full tensors"
    )


class RowSegment(Tensor):
    """Rows [start, start + n) of a tensor of shape `full_shape`; n may be 0.

    `rows` has shape (n, *full_shape[1:]), and is shared, not copied. A load writes into it in
    place.
    """

    rows: Tensor
    start: int

    @staticmethod
    def __new__(cls, rows: Tensor, full_shape: Sequence[int], start: int) -> RowSegment:
        if (
            rows.shape[1:] != torch.Size(full_shape[1:])
            or not 0 <= start <= full_shape[0] - rows.shape[0]
        ):
            raise ValueError(
                f"rows of shape {tuple(rows.shape)} from row {start} do not lie in "
                f"{tuple(full_shape)}"
            )
        return Tensor._make_wrapper_subclass(
            cls, torch.Size(full_shape), dtype=rows.dtype, device=rows.device, requires_grad=False
        )

    def __init__(self, rows: Tensor, full_shape: Sequence[int], start: int) -> None:
        self.rows = rows.detach()
        self.start = start

    # the base class's takes a private argument
    def __repr__(self) -> str:  # type: ignore[override]
        stop = self.start + self.rows.shape[0]
        return f"RowSegment(rows [{self.start}, {stop}) of {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # a conversion that has nothing to do returns its argument without a dispatch
        if getattr(func, "__name__", None) in CONVERSIONS:
            _refuse(f"Tensor.{func.__name__}")
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        _refuse(str(func))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling (torch.save)")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("copy.deepcopy")

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size([self.start] + [0] * (self.dim() - 1))
        return ChunkStorageMetadata(offsets=offsets, sizes=self.rows.shape)

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        if not self.rows.shape[0]:
            return []
        chunk = self._chunk
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
        )
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk] if self.rows.shape[0] else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is not None and index.offset != self._chunk.offsets:
            raise RuntimeError(f"{index.fqn}: no rows at {tuple(index.offset)} in {self!r}")
        return self.rows


def local_rows(tensor: Tensor, full_shape: Sequence[int], start: int) -> Tensor | None:
    """What to save or load of a tensor on this rank.

    A whole tensor is returned detached, and rows of one as a RowSegment. None if no rows are here.
    A DTensor must be sharded along dim 0 at most; ValueError otherwise.
    """
    if isinstance(tensor, DTensor):
        return _dtensor_rows(tensor)
    if tensor.shape == torch.Size(full_shape):
        return tensor.detach()
    if tensor.shape[0] == 0:
        return None
    return RowSegment(tensor, full_shape, start)


def _dtensor_rows(tensor: DTensor) -> Tensor | None:
    local = tensor.to_local()
    if local.shape == tensor.shape:
        return local.detach()
    if local.numel() == 0:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    if any(chunk.offsets[1:]) or chunk.sizes[1:] != tensor.shape[1:]:
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements} is not "
            "sharded by rows; only Shard(0) and Replicate() are checkpointed"
        )
    return RowSegment(local, tensor.shape, chunk.offsets[0])
