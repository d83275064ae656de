"""`fully_shard` refuses arguments that have no meaning, and takes FSDP2's bools."""

from __future__ import annotations

import re
from typing import Any

import pytest

from matrixtitan.fsdp import fully_shard
from tests.lib.toy import batch, make_toy, toy_units

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"gradient_reduction": "avg"},
        "gradient_reduction is 'avg'; use one of mean, sum",
    ),
    (
        {"reshard_after_forward": "sometimes"},
        "reshard_after_forward is 'sometimes'; use one of default, always, never or a bool",
    ),
    ({"reshard_after_forward": 1}, "reshard_after_forward is 1; use one of default"),
    ({"prefetch": -1}, "prefetch is -1; give a number of units"),
    ({"prefetch": "1"}, "prefetch is '1'; give a number of units"),
    ({"transport": "rign"}, "transport is 'rign'; use one of auto, grouped, ring, star"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=str)
def test_an_argument_without_a_meaning_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Without a process group too, where most of them would have no effect."""
    with pytest.raises(ValueError, match=re.escape(message)):
        fully_shard(make_toy(), units=toy_units(), **arguments)


ALL = ["(root)", "embed", "blocks.0", "blocks.1", "blocks.2", "norm+head"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("default", ["(root)", "norm+head"]),
        ("always", []),
        (True, []),
        ("never", ALL),
        (False, ALL),
    ],
)
def test_units_that_stay_gathered_after_forward(given: Any, kept: list[str]) -> None:
    model = make_toy()
    sharded = fully_shard(model, units=toy_units(), reshard_after_forward=given)
    model(*batch(0))
    assert [unit.name for unit in sharded.units if unit.state == "unsharded"] == kept
