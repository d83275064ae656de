"""The tensors inside a module's arguments and outputs, however these are nested.

Owns two walks over tuples, lists, dicts and dataclasses, in the same order. They never copy a
tensor. Next: `mixed_precision.py` and `hooks.py`, which use them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, dicts and dataclasses, in a fixed order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with `fn` applied to each tensor, in the order of `tensors_in`."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        mapped = {key: map_tensors(value, fn) for key, value in tree.items()}
        return mapped if type(tree) is dict else type(tree)(**mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, fn) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, fn) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            f.name: map_tensors(getattr(tree, f.name), fn)
            for f in dataclasses.fields(tree)
            if f.init
        }
        return dataclasses.replace(tree, **changes)
    return tree
