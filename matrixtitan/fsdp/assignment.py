"""Assignment: the unit that each parameter belongs to, and whether a plan fits it.

Owns the units' names, the places where a shared parameter hangs, and the checks of units and plan
against the model. It allocates nothing and never communicates. Which rank owns which rows is in the
plan (`plan/planner.py`). Next: `agreement.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from matrixtitan.fsdp.param import Slot, has_gradient_hooks
from matrixtitan.fsdp.roles import Decision
from matrixtitan.plan.shard import ParamSpec, Plan

ROOT = "(root)"
"""Name of the unit of all parameters that no listed unit holds."""


@dataclass(frozen=True)
class Assignment:
    """A model cut into units. A shared parameter appears once, under its first name."""

    params: dict[str, nn.Parameter]
    """By full name, in model order."""
    modules_of: dict[str, list[nn.Module]]
    """The modules of each unit: first the root unit's, then those listed, in order."""
    slots_of: dict[str, list[Slot]]
    """Everywhere that a parameter hangs."""
    unit_of: dict[str, str]
    """The unit of each parameter."""


def assign_to_units(
    model: nn.Module,
    units: Sequence[Sequence[str]],
    ignored_params: Collection[nn.Parameter] = (),
) -> Assignment:
    """Assign each parameter to the innermost unit around it.

    Units that share a parameter are joined into one. Where the root unit shares it too, they become
    part of the root unit. `ignored_params` and parameters without elements belong to no unit.

    ValueError for a name that is no module or is listed twice.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    # by module and not by name: a shared module has several names
    index_of_module: dict[nn.Module, int] = {}
    for index, names in enumerate(units):
        for name in names:
            if name not in modules or name == "":
                raise ValueError(f"units names the module {name!r}, which the model does not have")
            if modules[name] in index_of_module:
                raise ValueError(f"units names the module {name!r} twice")
            index_of_module[modules[name]] = index
    ignored = set(ignored_params)
    params = {
        fqn: param
        for fqn, param in model.named_parameters()
        if param.numel() and param not in ignored
    }
    first_name = {param: fqn for fqn, param in params.items()}
    slots_of: dict[str, list[Slot]] = {}
    holders: dict[str, set[int]] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        if param not in first_name:
            continue
        module_name, _, attribute = fqn.rpartition(".")
        enclosing = module_name
        while enclosing and modules[enclosing] not in index_of_module:
            enclosing = enclosing.rpartition(".")[0]
        first = first_name[param]
        holders.setdefault(first, set()).add(
            index_of_module[modules[enclosing]] if enclosing else _ROOT_INDEX
        )
        slot = Slot(modules[module_name], attribute)
        if slot not in slots_of.setdefault(first, []):
            slots_of[first].append(slot)
    joined = _join(len(units), holders.values())
    names_of: dict[int, list[str]] = {}
    for index, names in enumerate(units):
        names_of.setdefault(joined[index], []).extend(names)
    names_of.pop(_ROOT_INDEX, None)
    unit_name = {index: "+".join(names) for index, names in names_of.items()}
    modules_of = {ROOT: [model]}
    for index, names in names_of.items():
        modules_of[unit_name[index]] = [modules[name] for name in names]
    unit_name[_ROOT_INDEX] = ROOT
    unit_of = {fqn: unit_name[joined[min(held)]] for fqn, held in holders.items()}
    return Assignment(params, modules_of, slots_of, unit_of)


_ROOT_INDEX = -1


def _join(count: int, shared: Iterable[set[int]]) -> dict[int, int]:
    """The first unit of those that each of `count` units is joined with, by index."""
    first = {index: index for index in range(_ROOT_INDEX, count)}
    for indices in shared:
        targets = {first[index] for index in indices}
        if len(targets) > 1:
            lowest = min(targets)
            first = {
                index: lowest if target in targets else target for index, target in first.items()
            }
    return first


def specs_of(assignment: Assignment, decisions: Mapping[str, Decision]) -> list[ParamSpec]:
    """What a planner needs to know of each parameter.

    A matrix stays whole. A stack of matrices (E, R, C) may be cut between its matrices, and a tail
    parameter anywhere.
    """
    specs = []
    for fqn, param in assignment.params.items():
        shape, role = tuple(param.shape), decisions[fqn].role
        rows = shape[0] if role == "matrix" and len(shape) != 3 else 1
        specs.append(
            ParamSpec(fqn, shape, role, assignment.unit_of[fqn], rows, param.requires_grad)
        )
    return specs


def check_plan(plan: Plan, assignment: Assignment, shard_ranks: int) -> None:
    """ValueError unless `plan` is for this model, these units and this many ranks."""
    params, unit_of = assignment.params, assignment.unit_of
    if plan.world_size != shard_ranks:
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, the mesh shards over {shard_ranks}; plan "
            "for the ranks of the shard axis"
        )
    planned = set(plan.by_fqn)
    if planned != set(params):
        raise ValueError(
            f"the plan does not fit the model: it lacks {sorted(set(params) - planned)} and has "
            f"{sorted(planned - set(params))} besides; make it from this model's parameters"
        )
    for shard in plan.shards:
        shape = tuple(params[shard.fqn].shape)
        if shard.shape != shape:
            raise ValueError(
                f"the plan's shape of {shard.fqn} is {shard.shape}, the model's is {shape}; make "
                "the plan from this model's parameters"
            )
        if shard.unit != unit_of[shard.fqn]:
            raise ValueError(
                f"the plan puts {shard.fqn} into unit {shard.unit!r}, the argument units into "
                f"{unit_of[shard.fqn]!r}; give both the same units"
            )
        if shard.trainable != params[shard.fqn].requires_grad:
            raise ValueError(
                f"the plan says trainable={shard.trainable} for {shard.fqn}, which is not its "
                "requires_grad; set requires_grad before planning"
            )


def check_units(assignment: Assignment) -> None:
    """ValueError for a unit of several dtypes, or one that is partly on the meta device.

    Also for a parameter with gradient hooks, which would not run.
    """
    for fqn, param in assignment.params.items():
        if has_gradient_hooks(param):
            raise ValueError(
                f"{fqn} has a gradient hook, which would not run once the parameter is sharded; "
                "remove it, and call register_post_accumulate_grad_hook on the sharded parameter "
                "after fully_shard"
            )
    unit_of = assignment.unit_of
    for unit in dict.fromkeys(unit_of.values()):
        params = {fqn: param for fqn, param in assignment.params.items() if unit_of[fqn] == unit}
        if len({param.dtype for param in params.values()}) > 1:
            raise ValueError(
                f"unit {unit!r} mixes dtypes: "
                + ", ".join(f"{fqn} is {param.dtype}" for fqn, param in params.items())
                + "; make them one dtype, or put them into different units"
            )
        if len({param.is_meta for param in params.values()}) > 1:
            raise ValueError(
                f"unit {unit!r} is partly on the meta device; build the whole model there, or none "
                "of it"
            )
