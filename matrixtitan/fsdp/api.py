"""`fully_shard`: make any nn.Module data-parallel with owner-shaped shards, and the handle that it returns.

Owns argument checks, the assignment of parameters to units, and the wiring. Read `hooks.py` next for when things
happen, `unit.py` for what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from matrixtitan.fsdp.hooks import Schedule, UnitState
from matrixtitan.fsdp.param import ShardedParam, Slot
from matrixtitan.fsdp.streams import Channel, failure
from matrixtitan.fsdp.transports import Transport, ranks_on_this_machine, transport_class
from matrixtitan.fsdp.unit import Communication, FillRows, Unit
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.planner import PlanSettings, make_plan
from matrixtitan.plan.roles import param_specs
from matrixtitan.plan.shard import ParamSpec, Plan
from matrixtitan.plan.transports import REDUCTIONS_IN_FLIGHT

ROOT = "(root)"
"""Name of the unit of all parameters that no listed unit holds."""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """`param_dtype`: what computes and travels (None: the stored dtype); floating inputs of units are cast to it.
    `reduce_dtype`: what gradients are summed in (None: as they come). `output_dtype`: of the model's outputs."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None


class MatrixFSDP:
    """Handle of a sharded model. Call the model as before; `model.parameters()` are this rank's rows."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: list[Unit],
        schedule: Schedule,
        communication: Communication,
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.units = units
        self.rank = communication.rank
        self.shard_group = shard_group
        """Ranks that share one copy of the weights; None for a single process."""
        self._schedule = schedule
        self._communication = communication

    def materialize(self, fill_rows: FillRows | None = None) -> None:
        """Allocate this rank's weights, and fill them with `fill_rows(fqn, full_shape, start, out)`.

        Needed once after sharding a model that was built on the meta device, before optimizers are made. None leaves
        zeros, for a checkpoint to be loaded into.
        """
        for unit in self.units:
            unit.materialize(fill_rows)

    def set_reduce_gradients(self, reduce: bool) -> None:
        """False: the next backwards accumulate full gradients on every rank, in reduce dtype; the next backward after
        True reduces the sum."""
        self._schedule.reduce_gradients = reduce

    def reshard(self) -> None:
        """Free every gathered unit now."""
        self._schedule.reshard()

    def local_parameters(self) -> list[LocalParam]:
        """The rows that this rank owns, in model order."""
        params = {param.fqn: param for unit in self.units for param in unit.params}
        return [
            LocalParam(
                fqn=shard.fqn,
                tensor=params[shard.fqn].sharded,
                full_shape=shard.shape,
                role=shard.role,
                block_rows=shard.block_rows,
                start=segment.start,
                trainable=shard.trainable,
            )
            for shard in self.plan.shards
            if (segment := shard.segment(self.rank)) is not None
        ]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of transient weights alive on this rank now."""
        return sum(unit.transient_nbytes for unit in self.units)

    def close(self) -> None:
        """Stop the transports' threads, without waiting for peers where a step was broken off."""
        for transport in (self._communication.unshard, self._communication.reduce):
            if transport is not None:
                transport.close()


def fully_shard(
    model: nn.Module,
    *,
    units: Sequence[Sequence[str]],
    mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
    plan_settings: PlanSettings | None = None,
    tail_patterns: Sequence[str] = (),
    device: torch.device | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    reshard_after_forward: Literal["default", "always", "never"] = "default",
    transport: str = "auto",
    prefetch: int = 1,
    gradient_reduction: Literal["mean", "sum"] = "mean",
    timeout: timedelta | None = None,
) -> MatrixFSDP:
    """Shard `model` in place so that each matrix lies whole on one rank, its owner.

    units: module names gathered together, in forward order, e.g. `[["embed"], ["layers.0"], ["norm", "head"]]`; all
        remaining parameters form the root unit. A unit of several modules is for weights that they share.
    mesh: one axis (shard), or two (replicate, shard). None: all ranks shard; without a process group, one process.
        Where `init_process_group` was given a `device_id`, all of its ranks must call this at the same point, each with
        its own mesh: NCCL then splits groups off the whole one.
    plan: who owns what; None makes one from the model's shapes. It must be equal on all ranks.
    tail_patterns: full-name patterns of 2D parameters that are not hidden matrices (an output head); embeddings are
        recognised.
    device: where weights live; None: where they are, or for a meta model the mesh's device.
    reshard_after_forward: "default" keeps the last unit between forward and backward, "never" all.
    prefetch: how many units to gather ahead.
    gradient_reduction: over all ranks of the mesh.
    timeout: of the groups that it makes; None: PyTorch's default.

    A model on the meta device needs `materialize()` on the result. Otherwise each rank keeps its rows of the values
    that it has, which must be the same on all ranks.

    Make optimizers over `local_parameters()`, or over `model.parameters()` before a forward or after a backward. In
    between `reshard()` comes first: a unit that is gathered has its unsharded parameters there, which nothing steps.

    Raises ValueError for a unit name that does not exist, a parameter in two units, mixed dtypes in a unit, or a plan
    that does not fit the model; RuntimeError where plans differ between ranks, or where another rank found a mistake
    that this one does not have.
    """
    mesh = _mesh_or_default(mesh)
    shard_ranks = mesh.size(mesh.ndim - 1) if mesh is not None else 1
    named = dict(_named_parameters(model))
    device = device or _device_of(named.values(), mesh)
    try:
        modules_of, slots_of, unit_of = _assign_units(model, units)
        if plan is None:
            specs = _specs(model, named, unit_of, tail_patterns)
            plan = make_plan(specs, shard_ranks, plan_settings or PlanSettings())
        _check_plan(plan, named, unit_of, shard_ranks)
        _check_units(named, unit_of)
    except Exception:
        if mesh is not None:
            with suppress(RuntimeError):  # this rank's own error says more
                _compare_plans(None, mesh, device)
        raise

    communication, shard_group = _communication(
        mesh, plan, device, transport, gradient_reduction, timeout
    )
    built: list[Unit] = []
    for name, modules in modules_of.items():
        params = [
            ShardedParam(
                shard,
                slots_of[shard.fqn],
                communication.rank,
                named[shard.fqn].dtype,
                shard.trainable,
            )
            for shard in plan.shards
            if unit_of[shard.fqn] == name
        ]
        unit = Unit(
            name, modules, params, communication, mp_policy.param_dtype, mp_policy.reduce_dtype
        )
        if any(not named[param.fqn].is_meta for param in params):
            unit.materialize(_rows_of(named))
        else:
            for param in params:
                param.use_sharded()
        built.append(unit)

    states = [
        UnitState(
            unit,
            index,
            keep=reshard_after_forward == "never"
            or (
                reshard_after_forward == "default"
                and (unit.name == ROOT or index == len(built) - 1)
            ),
        )
        for index, unit in enumerate(built)
    ]
    schedule = Schedule(
        model,
        states,
        prefetch=prefetch,
        max_reductions=REDUCTIONS_IN_FLIGHT["nccl" if device.type == "cuda" else "gloo"],
        check_order=_order_check(communication, shard_group, [unit.name for unit in built]),
        param_dtype=mp_policy.param_dtype,
        output_dtype=mp_policy.output_dtype,
    )
    return MatrixFSDP(model, plan, built, schedule, communication, shard_group)


def _mesh_or_default(mesh: DeviceMesh | None) -> DeviceMesh | None:
    if mesh is None:
        if not dist.is_initialized():
            return None
        return dist.init_device_mesh(
            "cuda" if "nccl" in dist.get_backend_config() else "cpu",
            (dist.get_world_size(),),
            mesh_dim_names=("dp_shard",),
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of one axis (shard) or two (replicate, shard), not {mesh.ndim}"
        )
    return mesh


def _named_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return model.named_parameters()  # a shared parameter appears once, under its first name


def _assign_units(
    model: nn.Module, units: Sequence[Sequence[str]]
) -> tuple[dict[str, list[nn.Module]], dict[str, list[Slot]], dict[str, str]]:
    """Modules of each unit, slots of each parameter, unit of each parameter; a parameter belongs to its innermost."""
    modules = dict(model.named_modules(remove_duplicate=False))
    modules_of: dict[str, list[nn.Module]] = {ROOT: [model]}
    unit_of_module: dict[str, str] = {}
    for names in units:
        unit = "+".join(names)
        for name in names:
            if name not in modules or name == "":
                raise ValueError(f"units names the module {name!r}, which the model does not have")
            if name in unit_of_module:
                raise ValueError(f"units names the module {name!r} twice")
            unit_of_module[name] = unit
        modules_of[unit] = [modules[name] for name in names]
    first_name: dict[nn.Parameter, str] = {param: fqn for fqn, param in _named_parameters(model)}
    slots_of: dict[str, list[Slot]] = {}
    unit_of: dict[str, str] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        module_name, _, attribute = fqn.rpartition(".")
        enclosing = module_name
        while enclosing and enclosing not in unit_of_module:
            enclosing = enclosing.rpartition(".")[0]
        unit = unit_of_module.get(enclosing, ROOT)
        first = first_name[param]
        if unit_of.setdefault(first, unit) != unit:
            raise ValueError(
                f"{first} is shared by two units, {unit_of[first]!r} and {unit!r} (as {fqn}); list the modules that "
                "share it as one unit"
            )
        slot = Slot(modules[module_name], attribute)
        if slot not in slots_of.setdefault(first, []):
            slots_of[first].append(slot)
    return modules_of, slots_of, unit_of


def _specs(
    model: nn.Module,
    named: dict[str, nn.Parameter],
    unit_of: dict[str, str],
    tail_patterns: Sequence[str],
) -> list[ParamSpec]:
    embeddings = [
        f"{name}.weight".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    return param_specs(
        [(fqn, tuple(param.shape), param.requires_grad) for fqn, param in named.items()],
        unit_of,
        tail_patterns=tail_patterns,
        embedding_fqns=[fqn for fqn in embeddings if fqn in named],
    )


def _check_plan(
    plan: Plan, named: dict[str, nn.Parameter], unit_of: dict[str, str], shard_ranks: int
) -> None:
    if plan.world_size != shard_ranks:
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, the mesh shards over {shard_ranks}"
        )
    planned = set(plan.by_fqn)
    if planned != set(named):
        raise ValueError(
            f"the plan does not fit the model: it lacks {sorted(set(named) - planned)} and has "
            f"{sorted(planned - set(named))} besides"
        )
    for shard in plan.shards:
        if shard.shape != tuple(named[shard.fqn].shape):
            raise ValueError(
                f"the plan's shape of {shard.fqn} is {shard.shape}, the model's {tuple(named[shard.fqn].shape)}"
            )
        if shard.unit != unit_of[shard.fqn]:
            raise ValueError(
                f"the plan puts {shard.fqn} into unit {shard.unit!r}, `units` into {unit_of[shard.fqn]!r}"
            )
        if shard.trainable != named[shard.fqn].requires_grad:
            raise ValueError(
                f"the plan's trainable={shard.trainable} for {shard.fqn} is not its requires_grad"
            )


def _check_units(named: dict[str, nn.Parameter], unit_of: dict[str, str]) -> None:
    """A unit's parameters have one dtype, and are all on the meta device or none."""
    for unit in dict.fromkeys(unit_of.values()):
        params = {fqn: param for fqn, param in named.items() if unit_of[fqn] == unit}
        if len({param.dtype for param in params.values()}) > 1:
            raise ValueError(
                f"unit {unit!r} mixes dtypes: "
                + ", ".join(f"{fqn} is {param.dtype}" for fqn, param in params.items())
                + "; make them one dtype, or put them into different units"
            )
        if len({param.is_meta for param in params.values()}) > 1:
            raise ValueError(
                f"unit {unit!r} is partly on the meta device; build the whole model there, or none of it"
            )


def _device_of(params: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> torch.device:
    for param in params:
        if not param.is_meta:
            return param.device
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _communication(
    mesh: DeviceMesh | None,
    plan: Plan,
    device: torch.device,
    transport: str,
    gradient_reduction: str,
    timeout: timedelta | None,
) -> tuple[Communication, dist.ProcessGroup | None]:
    """Make the process groups; one for each kind of traffic, since both may be in flight between two ranks."""
    rank, shard_group, replicas = 0, None, None
    transports: list[Transport | None] = [None, None]
    divisor = 1
    if mesh is not None:
        _compare_plans(plan, mesh, device)
        shard_group = mesh.get_group(mesh.ndim - 1)
        rank = dist.get_rank(shard_group)
        if gradient_reduction == "mean":
            divisor = mesh.size()
        if mesh.ndim == 2 and mesh.size(0) > 1:
            replicas = mesh.get_group(0)
        if plan.world_size > 1:
            transports = [make_transport(transport, shard_group, device, timeout) for _ in range(2)]
    return (
        Communication(
            rank=rank,
            world_size=plan.world_size,
            device=device,
            unshard=transports[0],
            reduce=transports[1],
            replicas=replicas,
            unshard_channel=Channel(device),
            reduce_channel=Channel(device),
            replica_channel=Channel(device),
            gradient_divisor=divisor,
        ),
        shard_group,
    )


def make_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None
) -> Transport:
    """The transport of that name, or "auto", over the ranks of `group`, in a group of its own. All ranks call it.

    `timeout` is its own group's; None: PyTorch's default.
    """
    ranks, backend = dist.get_process_group_ranks(group), _backend(group, device)
    per_host = ranks_on_this_machine(len(ranks))
    if name == "auto" and backend == "gloo":  # machines may have different numbers of ranks
        counts = _gather_integers([per_host], group, device, "choosing a transport")
        per_host = min(count for (count,) in counts)
    chosen = transport_class(name, len(ranks), per_host, backend)
    options = _ahead_of_compute(timeout) if backend == "nccl" else None
    own = dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
    )
    return chosen(own)


def _ahead_of_compute(timeout: timedelta | None) -> object:
    """NCCL's kernels before those of a matrix product that is queued already, or they would wait for all of it."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout  # new_group sets it too, and warns where it was another
    return options


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """What carries `device`'s tensors in a group that may have several backends, such as "cpu:gloo,cuda:nccl"."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends[device.type]


def _gather_integers(
    values: list[int], group: dist.ProcessGroup, device: torch.device, what: str
) -> list[list[int]]:
    """Every rank's `values`, in group rank order; `what` they are for is named in errors."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(gathered, mine, group=group)
    except RuntimeError as error:
        raise failure(what, error) from error
    return [tensor.tolist() for tensor in gathered]


def _compare_plans(plan: Plan | None, mesh: DeviceMesh, device: torch.device) -> None:
    """Before anything else communicates: RuntimeError on all ranks of the mesh unless all have the same plan.

    None: this rank found a mistake, and raises that itself when the others know.
    """
    digest = plan.digest if plan is not None else "0" * 64
    words = [dist.get_rank(), *(int(digest[i : i + 8], 16) for i in range(0, 64, 8))]
    size = len(words)
    # shard groups first, then what each found over replicas: no rank raises before all know all
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) == 1:
            continue
        gathered = _gather_integers(
            words, mesh.get_group(axis), device, "comparing the sharding plans of all ranks"
        )
        words = list(chain.from_iterable(gathered))
    found = {words[i]: words[i + 1 : i + size] for i in range(0, len(words), size)}
    if plan is None:
        return
    mistaken = [rank for rank, other in found.items() if not any(other)]
    if mistaken:
        raise RuntimeError(
            f"ranks {mistaken} found a mistake in their model, units or plan, which their own errors name; this rank "
            "has none. Build the same model with the same settings on every rank"
        )
    first = min(found)
    different = [rank for rank, other in found.items() if other != found[first]]
    if different:
        raise RuntimeError(
            f"the sharding plans differ between ranks: {different} disagree with rank {first} (this rank's digest is "
            f"{digest[:16]}). Build the same model with the same settings on every rank"
        )


def _order_check(
    communication: Communication, group: dist.ProcessGroup | None, names: list[str]
) -> Callable[[int], None]:
    def check(index: int) -> None:
        if group is None or communication.world_size == 1:
            return
        gathered = _gather_integers(
            [index],
            group,
            communication.device,
            f"agreeing that {names[index]} is gathered next",
        )
        indices = [values[0] for values in gathered]
        if any(other != index for other in indices):
            listing = ", ".join(
                f"rank {rank}: {names[other]}" for rank, other in enumerate(indices)
            )
            raise RuntimeError(
                f"ranks run different units at the same time ({listing}); every rank must run the same units in the "
                "same order, since all ranks gather them together"
            )

    return check


def _rows_of(named: dict[str, nn.Parameter]) -> FillRows:
    """Fill from a model that has its values already."""

    def fill(fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor) -> None:
        out.copy_(named[fqn].detach()[start : start + out.shape[0]])

    return fill
