"""Units: which modules are gathered together, found in a model or chosen by the caller.

Owns the four ways to say units: nothing, names, classes or a callable. It looks at modules alone,
and never at ranks. Next: `assignment.py`, which assigns parameters to the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

ChooseModule = Callable[[str, nn.Module], bool]
Units = Sequence[Sequence[str]] | Sequence[type[nn.Module]] | type[nn.Module] | ChooseModule | None
"""The argument `units` of `fully_shard`."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, so no hook could gather their weights."""


def find_units(model: nn.Module, units: Units = None) -> list[list[str]]:
    """The names of the modules of each unit, in the model's order unless names were given.

    None finds the repeated blocks of the model and its embeddings. The blocks are the modules of
    the classes that `_no_split_modules` names (Hugging Face), on the model or on its submodules. A
    model without any has as blocks the elements of each ModuleList or Sequential whose elements all
    have parameters and one class. A class or several, or a callable `(name, module) -> bool`,
    chooses modules instead. Of nested modules the outermost is the unit.

    Raises ValueError for a choice that no module meets, and for a value of another kind.
    """
    if units is None:
        blocks = _no_split_blocks(model) or _repeated_blocks(model)
        return _outermost(
            model, lambda _, module: module in blocks or isinstance(module, nn.Embedding)
        )
    if isinstance(units, type):
        units = (units,)
    if callable(units):
        chosen = _outermost(model, units)
        if not chosen:
            raise ValueError("units: the callable chooses no module that has parameters")
        return chosen
    entries = list(units)
    classes = tuple(entry for entry in entries if isinstance(entry, type))
    if not classes:
        return [_names(entry) for entry in entries]
    if len(classes) < len(entries):
        raise ValueError("units mixes classes and names; give either of them")
    for cls in classes:
        if not any(isinstance(module, cls) for module in model.modules()):
            raise ValueError(f"units names the class {cls.__name__}, which no module has")
    return _outermost(model, lambda _, module: isinstance(module, classes))


def _names(entry: object) -> list[str]:
    if isinstance(entry, str) or not isinstance(entry, Sequence):
        raise ValueError(
            f"units has the entry {entry!r}; give each unit as a list of module names, or give "
            "classes, or a callable (name, module) -> bool"
        )
    return list(entry)


def _outermost(model: nn.Module, choose: ChooseModule) -> list[list[str]]:
    """One unit for each chosen module that has parameters and lies in no chosen module."""

    def walk(prefix: str, parent: nn.Module) -> Iterator[list[str]]:
        for child_name, module in parent.named_children():
            name = f"{prefix}{child_name}"
            if module in seen:
                continue
            seen.add(module)
            callable_module = not isinstance(module, CONTAINERS)
            if callable_module and choose(name, module) and _has_parameters(module):
                seen.update(module.modules())
                yield [name]
            else:
                yield from walk(f"{name}.", module)

    seen: set[nn.Module] = set()
    return list(walk("", model))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _no_split_blocks(model: nn.Module) -> set[nn.Module]:
    """The modules of the classes that Hugging Face's `_no_split_modules` name."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return {module for module in model.modules() if type(module).__name__ in names}


def _repeated_blocks(model: nn.Module) -> set[nn.Module]:
    """The elements of each list of modules that all have parameters and one class."""
    blocks: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            elements = list(module)
            alike = len({type(element) for element in elements}) == 1
            if alike and all(map(_has_parameters, elements)):
                blocks.update(elements)
    return blocks
