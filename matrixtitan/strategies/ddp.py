"""The full-matrix reference: PyTorch's DistributedDataParallel; every rank steps every weight.

Owns the wrapping alone: gradients are summed and not averaged, and names have no prefix. Every rank
has the same full-matrix optimizers, and the norm for clipping needs no collective. Next:
`zero1_owner.py`, built on this one.
"""

# Without `from __future__ import annotations`: DDP checks the annotations of its communication
# hook, and they must be objects.

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from matrixtitan.fsdp import InitRows
from matrixtitan.fsdp.grad_norm import clip_grad_norm_
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.strategies.base import DataParallel

CommHook = Callable[[dist.ProcessGroup, dist.GradBucket], torch.futures.Future[Tensor]]


def _sum_gradients(reduce_dtype: torch.dtype | None) -> CommHook:
    """A communication hook that sums: DDP's own would divide by the world size.

    The loss is divided by the global number of tokens already.
    """

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        # the bucket itself where the dtypes agree
        sent = buffer.to(reduce_dtype)
        work = dist.all_reduce(sent, group=group, async_op=True)

        def write_back(_: torch.futures.Future[list[Tensor]]) -> Tensor:
            return buffer if sent is buffer else buffer.copy_(sent)

        return work.get_future().then(write_back)

    return hook


class _Autocast(nn.Module):
    """Runs the model with its matrix products in `dtype`; the weights stay in their stored dtype.

    It uses autocast, because checkpointed blocks recompute under the same autocast.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
        super().__init__()
        self.inner = model
        self._dtype = dtype
        self._device_type = device_type

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        with torch.autocast(self._device_type, dtype=self._dtype):
            output: Tensor = self.inner(*args, **kwargs)
        return output


class DDP(DataParallel):
    """Every rank holds the whole model; gradients are summed bucket by bucket during backward.

    `model` may be on the meta device. `materialize` allocates it and wraps it, so `self.model` is
    the bare model before and the wrapped one after. A single rank has nothing to reduce, and its
    model stays bare. `specs` gives every parameter's role and block rows. Where `param_dtype`
    differs from the stored dtype, forward runs under autocast. `reduce_dtype` is the dtype of
    gradients on the wire; None: their own. Raises ValueError for a parameter without a spec.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[ParamSpec],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self._inner = model
        self._materialized = False
        self._specs = {spec.fqn: spec for spec in specs}
        self._group = group
        self._device = device
        self._param_dtype = param_dtype
        self._reduce_dtype = reduce_dtype
        missing = [name for name, _ in model.named_parameters() if name not in self._specs]
        if missing:
            raise ValueError(f"no ParamSpec for {missing}: every parameter needs one")

    def materialize(self, init_rows: InitRows | None) -> None:
        if self._materialized:
            raise RuntimeError("materialize was called twice")
        self._materialized = True
        self._inner.to_empty(device=self._device)
        with torch.no_grad():
            for name, parameter in self._inner.named_parameters():
                if name not in self._specs:
                    raise RuntimeError(
                        f"{name} appeared with materialization: a weight registered in two modules"
                    )
                if init_rows is not None:
                    init_rows(name, tuple(parameter.shape), 0, parameter.data)
        wrapped = self._inner
        stored = {parameter.dtype for parameter in self._inner.parameters()}
        if self._param_dtype is not None and stored != {self._param_dtype}:
            wrapped = _Autocast(self._inner, self._param_dtype, self._device.type)
        self.model = wrapped
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return
        # Nothing needs to be broadcast: init_rows and checkpoints give every rank the same weights,
        # and the only buffers are tables that every rank computes alike.
        with warnings.catch_warnings():
            # its successor, forward_sync_buffers, is not in PyTorch 2.11
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            ddp = DistributedDataParallel(
                wrapped,
                process_group=self._group,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        ddp.register_comm_hook(ddp.process_group, _sum_gradients(self._reduce_dtype))
        self.model = ddp

    def set_reduce_gradients(self, reduce: bool) -> None:
        """DDP reduces what has accumulated, so it must reduce only once, in the last microbatch."""
        if not self._materialized:
            raise RuntimeError("materialize the model before training it")
        if isinstance(self.model, DistributedDataParallel):
            # what DDP.no_sync() sets; forward reads it
            self.model.require_backward_grad_sync = reduce

    def local_parameters(self) -> list[LocalParam]:
        return [
            LocalParam(
                name,
                parameter,
                tuple(parameter.shape),
                self._specs[name].role,
                self._specs[name].block_rows,
                trainable=parameter.requires_grad,
            )
            for name, parameter in self._inner.named_parameters()
        ]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        gradients = [p.grad for p in self._inner.parameters() if p.grad is not None]
        return clip_grad_norm_(gradients, max_norm, None, device=self._device)
