"""`fully_shard`: make any nn.Module data-parallel, each matrix whole on one rank.

Owns the argument checks, the order of the steps, and the choice of the transport. It computes and
moves nothing: each step is a file of its own. Next, in the order of the steps: `groups.py`,
`units.py`, `assignment.py`, `roles.py` and `agreement.py`. Then `hooks.py` (when things happen),
`unit.py` (what happens) and `handle.py` (what the caller gets).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from matrixtitan.fsdp.agreement import compare_plans, gather_integers, order_check
from matrixtitan.fsdp.assignment import (
    ROOT,
    Assignment,
    assign_to_units,
    check_plan,
    check_units,
    specs_of,
)
from matrixtitan.fsdp.groups import (
    Groups,
    backend_of,
    groups_of,
    mesh_or_default,
    new_group_like,
)
from matrixtitan.fsdp.handle import MatrixFSDP
from matrixtitan.fsdp.hooks import Schedule, UnitState
from matrixtitan.fsdp.mixed_precision import MixedPrecisionPolicy
from matrixtitan.fsdp.param import ShardedParam
from matrixtitan.fsdp.roles import Decision, decide, doubt
from matrixtitan.fsdp.state_dict import install_hooks
from matrixtitan.fsdp.streams import Channel
from matrixtitan.fsdp.transports import Transport, ranks_on_this_machine, transport_class
from matrixtitan.fsdp.unit import Communication, Unit
from matrixtitan.fsdp.units import Units, find_units
from matrixtitan.plan.planner import PlanSettings, make_plan
from matrixtitan.plan.shard import Plan
from matrixtitan.plan.transport_registry import REDUCTIONS_IN_FLIGHT, transport_spec

ReshardAfterForward = Literal["default", "always", "never"]
GradientReduction = Literal["mean", "sum"]


def fully_shard(
    model: nn.Module,
    *,
    units: Units = None,
    mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
    plan_settings: PlanSettings | None = None,
    tail_patterns: Sequence[str] = (),
    matrix_patterns: Sequence[str] = (),
    ignored_params: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    reshard_after_forward: ReshardAfterForward | bool = "default",
    transport: str = "auto",
    prefetch: int = 1,
    gradient_reduction: GradientReduction = "mean",
    timeout: timedelta | None = None,
    report: bool = True,
) -> MatrixFSDP:
    """Shard `model` in place so that each matrix lies whole on one rank, its owner.

    units: which modules are gathered together. None finds the repeated blocks and the embeddings:
        see `find_units`. Otherwise a class or several, a callable `(name, module) -> bool`, or
        names in forward order, such as `[["embed"], ["layers.0"], ["norm", "head"]]`. A unit of
        names may have several modules. All remaining parameters form the root unit. Units that
        share a weight are joined.
    mesh: one axis (shard), or two (replicate, shard). None: all ranks shard; without a process
        group, one process. Where `init_process_group` was given a `device_id`, all of its ranks
        must call this at the same point, each with its own mesh: NCCL then splits new groups off
        the group of all ranks.
    plan: who owns what, equal on all ranks. None makes one from the model's shapes.
    plan_settings: settings of the plan that is made if `plan` is None.
    tail_patterns: full-name patterns of parameters that are not hidden matrices, for the plan that
        is made if `plan` is None. Embeddings, output heads and routers are recognised: see
        `decide`. One warning names the weights of an unknown kind, which go to the tail.
    matrix_patterns: full-name patterns of parameters that are matrices, for the same plan. A
        convolution's filter of four or more dimensions is the matrix (out, the rest).
    ignored_params: parameters that are not sharded. Each rank keeps them whole, and their
        gradients are the caller's to reduce. Parameters without elements are left alone too.
    device: the device of the weights. None: their present device, or the mesh's for a meta model.
    mp_policy: dtypes of compute, of summed gradients and of outputs: see MixedPrecisionPolicy.
    reshard_after_forward: "default" frees every unit's weights after its forward, except those of
        the last unit and of the root unit; "always", or True as in FSDP2, those of every unit;
        "never", or False, none.
    transport: how weights travel: "grouped", "ring" or "star"; "auto" chooses one by the backend
        and by how many of the ranks share a machine.
    prefetch: how many units to gather ahead.
    gradient_reduction: the mean or the sum over all ranks of the mesh.
    timeout: of the process groups that this makes. None: PyTorch's default.
    report: whether rank 0 prints `summary()` of the result to stderr.

    A model on the meta device needs `materialize()` on the result. Otherwise each rank keeps its
    rows of the values that it has, which must be the same on all ranks.

    Make optimizers over `local_parameters()`, or over `model.parameters()` before a forward or
    after a backward. Between the two call `reshard()` first: a gathered unit has its unsharded
    parameters in place, and those are never stepped.

    Raises ValueError for an argument that has no meaning, a unit that does not exist, mixed
    dtypes in a unit, a plan that does not fit the model, or a transport that does not run on the
    group's backend.
    Raises RuntimeError where plans differ between ranks, or where another rank found a mistake
    that this rank does not have.
    """
    mesh = mesh_or_default(mesh)
    groups = groups_of(mesh)
    device = device or _device_of(model, mesh)
    decisions: dict[str, Decision] = {}
    try:
        _check_arguments(reshard_after_forward, transport, prefetch, gradient_reduction)
        assignment = assign_to_units(model, find_units(model, units), ignored_params)
        if plan is None:
            decisions = decide(model, assignment.params, tail_patterns, matrix_patterns)
            specs = specs_of(assignment, decisions)
            plan = make_plan(specs, groups.shard_ranks, plan_settings or PlanSettings())
        check_plan(plan, assignment, groups.shard_ranks)
        check_units(assignment)
    except Exception:
        # The other ranks wait in the comparison, so this rank joins it. The comparison's error is
        # dropped, since this rank's own error says more.
        with suppress(RuntimeError):
            compare_plans(None, groups, device)
        raise
    compare_plans(plan, groups, device)
    is_first = mesh is None or mesh.get_rank() == 0
    if is_first and (warning := doubt(decisions)) is not None:
        warnings.warn(warning, stacklevel=2)

    communication = _communication(groups, device, transport, gradient_reduction, timeout)
    built = [
        _build_unit(name, assignment, plan, communication, mp_policy)
        for name in assignment.modules_of
    ]
    states = [
        UnitState(unit, index, keep=_is_kept(reshard_after_forward, unit, index == len(built) - 1))
        for index, unit in enumerate(built)
    ]
    schedule = Schedule(
        model,
        states,
        prefetch=prefetch,
        max_reductions=REDUCTIONS_IN_FLIGHT["nccl" if device.type == "cuda" else "gloo"],
        check_order=order_check(groups, device, [unit.name for unit in built]),
        mp_policy=mp_policy,
    )
    install_hooks(param for unit in built for param in unit.params)
    sharded = MatrixFSDP(model, plan, built, schedule, communication, groups.shard, decisions)
    if report and is_first:
        print(sharded.summary(), file=sys.stderr)
    return sharded


# --- the steps of fully_shard ------------------------------------------------------------------


def _device_of(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    for param in model.parameters():
        if not param.is_meta:
            return param.device
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_arguments(
    reshard_after_forward: object, transport: str, prefetch: int, gradient_reduction: str
) -> None:
    """ValueError for a value that has no meaning; the message names the argument."""
    if not isinstance(reshard_after_forward, bool):
        words = get_args(ReshardAfterForward)
        _check_choice("reshard_after_forward", reshard_after_forward, words, " or a bool")
    if transport != "auto":
        transport_spec(transport)
    _check_choice("gradient_reduction", gradient_reduction, get_args(GradientReduction))
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(
            f"fully_shard: prefetch is {prefetch!r}; give a number of units, 0 to gather none ahead"
        )


def _check_choice(argument: str, value: object, words: Sequence[str], besides: str = "") -> None:
    if value not in words:
        raise ValueError(
            f"fully_shard: {argument} is {value!r}; use one of {', '.join(words)}{besides}"
        )


def _communication(
    groups: Groups,
    device: torch.device,
    transport: str,
    gradient_reduction: str,
    timeout: timedelta | None,
) -> Communication:
    """Two transports, since weights and gradients may be in flight between two ranks at once.

    Each has a process group of its own, in which messages match by order.
    """
    unshard = reduce = None
    if groups.shard is not None and groups.shard_ranks > 1:
        unshard, reduce = make_transports(transport, groups.shard, device, timeout, count=2)
    return Communication(
        rank=groups.shard_rank,
        world_size=groups.shard_ranks,
        device=device,
        unshard=unshard,
        reduce=reduce,
        replicas=groups.replicas,
        unshard_channel=Channel(device),
        reduce_channel=Channel(device),
        replica_channel=Channel(device),
        gradient_divisor=groups.all_ranks if gradient_reduction == "mean" else 1,
    )


def _build_unit(
    name: str,
    assignment: Assignment,
    plan: Plan,
    communication: Communication,
    mp_policy: MixedPrecisionPolicy,
) -> Unit:
    """One unit, filled with this rank's rows of the model's values.

    A unit on the meta device has no values, and waits for `materialize`.
    """
    params = [
        ShardedParam(
            shard,
            assignment.slots_of[shard.fqn],
            communication.rank,
            assignment.params[shard.fqn].dtype,
            shard.trainable,
        )
        for shard in plan.shards
        if assignment.unit_of[shard.fqn] == name
    ]
    unit = Unit(name, assignment.modules_of[name], params, communication, mp_policy)

    def copy_rows(fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor) -> None:
        out.copy_(assignment.params[fqn].detach()[start : start + out.shape[0]])

    if any(not assignment.params[param.fqn].is_meta for param in params):
        unit.materialize(copy_rows)
    else:
        for param in params:
            param.use_sharded()
    return unit


def _is_kept(reshard_after_forward: ReshardAfterForward | bool, unit: Unit, is_last: bool) -> bool:
    """Whether `unit` stays gathered between forward and backward."""
    if reshard_after_forward == "default":
        return is_last or unit.name == ROOT
    return reshard_after_forward in ("never", False)


# --- the transport -----------------------------------------------------------------------------


def make_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None
) -> Transport:
    """The transport `name`, or what "auto" chooses, over the ranks of `group`.

    The transport gets a new process group. All ranks of `group` call this. `timeout` is the new
    group's; None: PyTorch's default. Raises ValueError for a name that is not registered, or a
    transport that does not run on the group's backend.
    """
    return make_transports(name, group, device, timeout, count=1)[0]


def make_transports(
    name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta | None = None,
    *,
    count: int,
) -> list[Transport]:
    """`count` transports as `make_transport` makes one; they are chosen once."""
    ranks, backend = dist.get_process_group_ranks(group), backend_of(group, device)
    per_host = ranks_on_this_machine(len(ranks))
    if name == "auto" and backend == "gloo":
        # machines may have different numbers of ranks, and all ranks must choose alike
        hosts = gather_integers([per_host], group, device, "choosing a transport")
        per_host = min(ranks_there for (ranks_there,) in hosts)
    chosen = transport_class(name, len(ranks), per_host, backend)
    return [chosen(new_group_like(group, device, timeout)) for _ in range(count)]
