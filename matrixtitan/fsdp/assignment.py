"""Assignment: the unit that each parameter belongs to, and whether a plan fits it.

Owns the units' names, the places where a shared parameter hangs, and the checks of units and plan
against the model. It allocates nothing and never communicates. Which rank owns which rows is in the
plan (`plan/planner.py`). Next: `agreement.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from matrixtitan.fsdp.param import Slot, has_gradient_hooks
from matrixtitan.plan.roles import param_specs
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


def assign_to_units(model: nn.Module, units: Sequence[Sequence[str]]) -> Assignment:
    """Assign each parameter to the innermost unit around it.

    ValueError for a name that is no module or is listed twice, and for a parameter that two units
    share.
    """
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
    params = dict(model.named_parameters())
    first_name = {param: fqn for fqn, param in params.items()}
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
                f"{first} is shared by two units, {unit_of[first]!r} and {unit!r} (as {fqn}); list "
                "the modules that share it as one unit"
            )
        slot = Slot(modules[module_name], attribute)
        if slot not in slots_of.setdefault(first, []):
            slots_of[first].append(slot)
    return Assignment(params, modules_of, slots_of, unit_of)


def specs_of(
    model: nn.Module, assignment: Assignment, tail_patterns: Sequence[str]
) -> list[ParamSpec]:
    """What a planner needs to know of each parameter.

    Embeddings are recognised by their module's type.
    """
    embeddings = [
        f"{name}.weight".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    params = assignment.params
    return param_specs(
        [(fqn, tuple(param.shape), param.requires_grad) for fqn, param in params.items()],
        assignment.unit_of,
        tail_patterns=tail_patterns,
        embedding_fqns=[fqn for fqn in embeddings if fqn in params],
    )


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
