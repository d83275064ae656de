"""Tables of options: documented keys with a range, and the checks of their values.

A config section and an optimizer's rule are both such tables. A key's default, meaning, range and
the setting that it depends on stand once, where the key is declared. `--help`, the docs and every
check read them from there. Imports nothing of the project and no torch. Next: `rules/`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, NamedTuple

LARGEST = 2**31 - 1
"""The upper limit of a whole number whose key sets none of its own. Products of two such numbers,
such as the tokens in a step, then fit 64 bits."""


class Range(NamedTuple):
    """The finite numbers that a key takes. None is no bound; `below` itself is not taken."""

    low: float | None = None
    high: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        return (
            _is_finite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def wanted(self, value: float) -> str:
        """What `value`, which is outside, must be instead."""
        return str(self) if _is_finite(value) else f"finite and {self}"

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"from {self.low} to {self.high}"
        bounds = [] if self.low is None else [f"at least {self.low}"]
        bounds += [] if self.high is None else [f"at most {self.high}"]
        bounds += [] if self.below is None else [f"below {self.below}"]
        return " and ".join(bounds)


class Needs(NamedTuple):
    """A key acts only where `key`, of its own table or a `section.key`, has one of `values`."""

    key: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.key} {' or '.join(_word(value) for value in self.values)}"


def key(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    below: float | None = None,
    needs: Needs | None = None,
) -> Any:
    """A key of a table: its default, meaning and range, and what must be set for it to act."""
    bounds = Range(low, high, below)
    metadata = {"doc": doc, "range": bounds if any(b is not None for b in bounds) else None}
    return field(default=default, metadata={**metadata, "needs": needs})


@dataclass(frozen=True)
class Options:
    """A table of keys made by `key`."""

    def problems(self) -> Iterator[str]:
        """A sentence for each value that is not allowed; each begins with its key."""
        hints = hints_of(type(self))
        for name, hint in hints.items():
            yield from _type_problems(name, hint, getattr(self, name))
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            yield from _range_problems(option, value)
            if int in (hints[option.name], *typing.get_args(hints[option.name])):
                yield from _size_problems(option, value)

    def without_effect(self, value_of: Mapping[str, Any]) -> Iterator[str]:
        """A sentence for each key that was changed from its default and has no effect.

        `value_of` has the value of every key of the config, by "section.key".
        """
        for option in dataclasses.fields(self):
            needs: Needs | None = option.metadata.get("needs")
            if needs is None or getattr(self, option.name) == option.default:
                continue
            value = value_of[needs.key] if "." in needs.key else getattr(self, needs.key)
            if value not in needs.values:
                yield (
                    f"{option.name} is set, but has no effect: it needs {needs}, and that is "
                    f"{_word(value)}. Remove one of the two"
                )

    def require(self, prefix: str = "") -> None:
        """ValueError with every problem, each key after `prefix` ("lr_scheduler.")."""
        problems = [prefix + problem for problem in self.problems()]
        if problems:
            raise ValueError("\n".join(problems))


def hints_of(cls: Any) -> dict[str, Any]:
    """The types of a table's keys, in order."""
    hints = typing.get_type_hints(cls)
    return {option.name: hints[option.name] for option in dataclasses.fields(cls)}


def not_one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """The sentence for a `value` that is none of `choices`."""
    known = list(choices)
    listed = ", ".join(map(repr, known))
    return f"{name} is {value!r}; choose {listed}{did_you_mean(value, known)}"


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """The end of a message: the choice that looks like `value`, or "" if none does."""
    near = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _type_problems(name: str, hint: Any, value: Any) -> Iterator[str]:
    """Wrong types. A config's loader has checked them before; other callers have not."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal and value not in choices:
        yield not_one_of(name, value, choices)
    if hint is int and not isinstance(value, Integral):
        yield f"{name} is {value!r}; it must be a whole number"


def _range_problems(option: dataclasses.Field[Any], value: Any) -> Iterator[str]:
    bounds: Range | None = option.metadata.get("range")
    if bounds is None or value is None:
        return
    if isinstance(value, tuple):
        for item in value:
            if not bounds.holds(item):
                yield f"{option.name} holds {item}; each must be {bounds.wanted(item)}"
    elif not bounds.holds(value):
        yield f"{option.name} is {value}; it must be {bounds.wanted(value)}"


def _size_problems(option: dataclasses.Field[Any], value: Any) -> Iterator[str]:
    """Whole numbers that PyTorch, or arithmetic with another key, could not represent."""
    bounds: Range = option.metadata.get("range") or Range()
    if bounds.high is None and isinstance(value, int) and value > LARGEST:
        yield f"{option.name} is {value}; it must be at most {LARGEST}"


def _is_finite(value: float) -> bool:
    """Like math.isfinite, which raises for a whole number that no float can hold."""
    return isinstance(value, int) or math.isfinite(value)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
