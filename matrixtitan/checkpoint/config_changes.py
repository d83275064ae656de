"""What changed in the configuration between a save and a resume: logged; refused if it reorders the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DATA_ORDER_KEYS = (
    "data.sources",
    "data.seed",
    "data.validation_fraction",
    "debug.seed",
    "model.tokenizer_path",
    "training.seq_len",
)
"""Another value gives window number n other content: a resume would skip some text and repeat other."""


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"section.key": value}, tables inside lists left as they are."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def changed_keys(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value, current value)} of those that differ; None where one side lacks the key."""
    before, after = flatten(saved), flatten(current)
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def check_config(saved: Mapping[str, Any], current: Mapping[str, Any], *, allow: bool) -> list[str]:
    """A line for each changed key. ValueError if one would change the data's order and `allow` is False."""
    changes = changed_keys(saved, current)
    refused = [key for key in changes if key in DATA_ORDER_KEYS]
    if refused and not allow:
        listed = "; ".join(
            f"{key} was {changes[key][0]!r} and is {changes[key][1]!r}" for key in refused
        )
        raise ValueError(
            f"the data's order would change on this resume: {listed}. Put the saved values back, or go on from there "
            "with checkpoint.allow_config_change = true"
        )
    return [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items()]
