"""PyTorch's own `fully_shard` (FSDP2), with a Muon step that first brings each matrix together.

Owns the wrapping (units, policies, sums instead of means, collectives on gloo) and the choice of
the exchange. AdamW steps the tail on DTensors, which needs no communication. Next:
`matrix_exchange.py`, the three ways to bring a matrix together; `fsdp2_collectives.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from matrixtitan.config import OptimizerConfig
from matrixtitan.config.checks import problems_with_fsdp2
from matrixtitan.fsdp import InitRows
from matrixtitan.fsdp.api import ReshardAfterForward, make_transports
from matrixtitan.fsdp.grad_norm import clip_grad_norm_
from matrixtitan.fsdp.transports import Transport
from matrixtitan.optim.base import MatrixOptimizer
from matrixtitan.optim.build import Optimizers
from matrixtitan.optim.muon import Muon
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.strategies.base import DataParallel
from matrixtitan.strategies.fsdp2_collectives import TransportAllGather, TransportReduceScatter
from matrixtitan.strategies.matrix_exchange import (
    AllToAll,
    GatherEach,
    GatherOnce,
    MuonExchange,
    shard_bounds,
)

TransportChoice = Literal["auto", "tuned", "stock"]
ExchangeName = Literal["gather_each", "gather_once", "all_to_all"]


class FSDP2(DataParallel):
    """Each parameter is cut by rows over the mesh's last axis; a first axis, if any, replicates.

    model: on the meta device.
    units: names of the modules that are gathered together, in forward order.
    dtype, param_dtype, reduce_dtype: of stored weights; of gathered weights; of gradients on the
        wire. None: no cast.
    reshard_after_forward: "default" keeps the last unit gathered between forward and backward, as
        matrix_fsdp does; "always" frees every unit, "never" none.
    reduce_each_microbatch: every backward reduces, so that the full gradients of one unit at most
        are alive. False accumulates full gradients until the last microbatch.
    transports: "tuned" replaces gloo's collectives in forward and backward by our transports,
        "stock" leaves PyTorch's, "auto" is "tuned" on gloo and "stock" elsewhere.
    prefetch: how many units are gathered ahead in forward.
    timeout: of the process groups that this makes. None: PyTorch's default.

    Raises ValueError for "tuned" on another backend than gloo.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[ParamSpec],
        *,
        units: Sequence[Sequence[str]],
        mesh: DeviceMesh,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: ReshardAfterForward = "default",
        reduce_each_microbatch: bool = True,
        transports: TransportChoice = "auto",
        matrix_exchange: ExchangeName = "all_to_all",
        prefetch: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        self.model = model
        self.shard_mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
        self.shard_group = self.shard_mesh.get_group()
        if mesh.size() == self.shard_mesh.size():
            # on a mesh with a replicate axis, even of size 1, FSDP2 all-reduces each gradient again
            mesh = self.shard_mesh
        self._specs = {spec.fqn: spec for spec in specs}
        self._device = device
        self._reduce_each_microbatch = reduce_each_microbatch
        self.tuned = transports == "tuned" or (
            transports == "auto" and self.shard_group.name() == "gloo"
        )
        if self.tuned and self.shard_group.name() != "gloo":
            raise ValueError(
                "parallelism.fsdp2_transports 'tuned' is for gloo, the backend is "
                f"{self.shard_group.name()}: use 'stock', whose collectives NCCL has tuned "
                "already, or 'auto'"
            )
        self._gather = self._scatter = None
        self._transports: list[Transport] = []
        if self.tuned:
            self._transports = make_transports("auto", self.shard_group, device, timeout, count=2)
            self._gather = TransportAllGather(self._transports[0])
            self._scatter = TransportReduceScatter(self._transports[1])
        self.exchange = make_exchange(matrix_exchange, self.shard_mesh, self._gather)
        model.to(dtype=dtype)
        # inputs are not cast: tables that blocks take as arguments keep their precision
        policy = MixedPrecisionPolicy(
            param_dtype=None if param_dtype == dtype else param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,
        )
        self._units = [
            _shard_unit(
                model,
                names,
                mesh,
                policy,
                reshard=_reshards(reshard_after_forward, index, len(units)),
            )
            for index, names in enumerate(units)
        ]
        self._root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._set_communication(prefetch)

    def _set_communication(self, prefetch: int) -> None:
        for module in self._fsdp_modules():
            # sums, since the loss is divided by the global number of tokens already
            module.set_gradient_divide_factor(1.0)
            # gloo has neither averages nor premultiplied sums
            module.set_force_sum_reduction_for_comms(True)
            if self.tuned:
                module.set_custom_all_gather(cast(Any, self._gather))
                module.set_custom_reduce_scatter(cast(Any, self._scatter))
        for index, unit in enumerate(self._units):
            unit.set_modules_to_forward_prefetch(self._units[index + 1 : index + 1 + prefetch])
            if isinstance(unit, nn.Embedding):
                # the gradient of an embedding does not need its weight
                unit.set_unshard_in_backward(False)

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def materialize(self, init_rows: InitRows | None) -> None:
        self.model.to_empty(device=self._device)
        if init_rows is None:
            return
        with torch.no_grad():
            for param in self.local_parameters():
                assert isinstance(param.tensor, DTensor)
                rows = param.tensor.to_local()
                if rows.numel():
                    init_rows(param.fqn, param.full_shape, param.start, rows)

    def set_reduce_gradients(self, reduce: bool) -> None:
        self._root.set_requires_gradient_sync(reduce or self._reduce_each_microbatch)

    def local_parameters(self) -> list[LocalParam]:
        """DTensors of the full shapes; `start` is this rank's first row."""
        for module in self._fsdp_modules():
            # a forward without gradients leaves the kept units gathered
            module.reshard()
        params = []
        for fqn, parameter in self.model.named_parameters():
            spec = self._specs[fqn]
            start, _ = shard_bounds(
                parameter.size(0), self.shard_group.size(), self.shard_group.rank()
            )
            params.append(
                LocalParam(
                    fqn,
                    parameter,
                    tuple(parameter.shape),
                    spec.role,
                    spec.block_rows,
                    start,
                    parameter.requires_grad,
                )
            )
        return params

    def build_optimizers(self, config: OptimizerConfig) -> Optimizers:
        for problem in problems_with_fsdp2(config):
            raise ValueError(problem)
        optimizers = super().build_optimizers(config)
        for optimizer in optimizers.optimizers:
            if isinstance(optimizer, MatrixOptimizer) and not isinstance(optimizer, Muon):
                raise ValueError(
                    f"{type(optimizer).__name__} is no Muon: it would step rows of matrices under "
                    "parallelism.strategy fsdp2; use matrix_fsdp"
                )
        return optimizers

    def step(self, optimizers: Optimizers) -> None:
        for optimizer in optimizers.optimizers:
            if isinstance(optimizer, Muon):
                self.exchange.step(optimizer)
            else:
                optimizer.step()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        gradients = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                gradients.append(parameter.grad.to_local())
        return clip_grad_norm_(gradients, max_norm, self.shard_group, device=self._device)

    def close(self) -> None:
        """Stop the transports' threads."""
        for transport in self._transports:
            transport.close()


def make_exchange(
    name: ExchangeName, mesh: DeviceMesh, all_gather: TransportAllGather | None
) -> MuonExchange:
    """The MuonExchange of `optimizer.matrix_exchange` over a one-dimensional mesh."""
    if name == "gather_each":
        return GatherEach(mesh)
    if name == "gather_once":
        return GatherOnce(mesh, all_gather)
    return AllToAll(mesh)


def _shard_unit(
    model: nn.Module,
    names: Sequence[str],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard: bool,
) -> FSDPModule:
    modules = [model.get_submodule(name) for name in names]
    if len(modules) == 1:
        return fully_shard(modules[0], mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)[0]


def _reshards(policy: ReshardAfterForward, index: int, units: int) -> bool:
    return policy == "always" or (policy == "default" and index < units - 1)
