"""The differences between two nested tables: two configs, or two descriptions of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A line for each key whose value differs; None where one side lacks the key."""
    before, after = _flatten(saved), _flatten(current)
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"section.key": value}; tables inside lists stay as they are."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
