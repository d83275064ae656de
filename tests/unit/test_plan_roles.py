"""Roles and block rows from names and shapes; errors of patterns name the nearest parameters."""

from __future__ import annotations

from typing import Any

import pytest

from matrixtitan.plan.roles import param_specs

SHAPES = [
    ("tok_embeddings.weight", (512, 64), True),
    ("layers.0.attention.wq.weight", (64, 64), True),
    ("layers.0.attention.wk.weight", (32, 64), True),
    ("layers.0.experts.w1", (8, 128, 64), True),
    ("layers.0.attention_norm.weight", (64,), False),
    ("layers.0.conv.weight", (16, 3, 2, 2), True),
    ("layers.10.attention.wq.weight", (64, 64), True),
    ("head.output.weight", (512, 64), True),
]


def _unit(fqn: str) -> str:
    return fqn.split(".weight")[0].rsplit(".", 1)[0]


def _specs(**options: Any) -> dict[str, Any]:
    return {spec.fqn: spec for spec in param_specs(SHAPES, _unit, **options)}


def test_roles_and_block_rows_follow_the_shape() -> None:
    specs = _specs(tail_patterns=["head.*", "tok_embeddings.weight"])
    assert {fqn: (spec.role, spec.block_rows) for fqn, spec in specs.items()} == {
        "tok_embeddings.weight": ("tail", 1),
        "layers.0.attention.wq.weight": ("matrix", 64),
        "layers.0.attention.wk.weight": ("matrix", 32),
        "layers.0.experts.w1": ("matrix", 1),
        "layers.0.attention_norm.weight": ("tail", 1),
        "layers.0.conv.weight": ("tail", 1),
        "layers.10.attention.wq.weight": ("matrix", 64),
        "head.output.weight": ("tail", 1),
    }
    assert list(specs) == [fqn for fqn, _, _ in SHAPES]
    assert not specs["layers.0.attention_norm.weight"].trainable


def test_heads_are_blocks() -> None:
    specs = _specs(per_head_patterns={"layers.*.wq.weight": 16})
    assert specs["layers.0.attention.wq.weight"].block_rows == 16
    assert specs["layers.10.attention.wq.weight"].block_rows == 16
    assert specs["layers.0.attention.wk.weight"].block_rows == 32


def test_units_come_from_a_mapping_or_a_function() -> None:
    mapping = {fqn: "all" for fqn, _, _ in SHAPES}
    assert {spec.unit for spec in param_specs(SHAPES, mapping)} == {"all"}
    del mapping["layers.0.experts.w1"]
    with pytest.raises(ValueError, match=r"layers\.0\.experts\.w1 belongs to no unit"):
        param_specs(SHAPES, mapping)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail_patterns": ["layers.*.wqq.weight"]}, r"layers\.\*\.attention\.wq\.weight"),
        ({"tail_patterns": ["output.weight"]}, r"'output\.weight' matches no .*head\.output"),
        ({"per_head_patterns": {"layers.3.attention.wk": 16}}, r"per_head.*\*\.attention\.wk"),
        ({"tail_patterns": ["tok_embedding.weight"]}, r"near: tok_embeddings\.weight"),
        ({"per_head_patterns": {"*.wk.weight": 24}}, r"24 rows do not divide the 32 rows"),
        ({"per_head_patterns": {"*.wk.weight": 0}}, r"0 rows do not divide"),
        ({"per_head_patterns": {"*.experts.*": 8}}, r"experts\.w1 of shape \(8, 128, 64\).*2D"),
        ({"per_head_patterns": {"*_norm.weight": 8}}, r"attention_norm\.weight .* role tail"),
        ({"per_head_patterns": {"*.wk.*": 8, "*.attention.*": 16}}, r"wk\.weight matches 2 "),
    ],
)  # fmt: skip
def test_wrong_patterns_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _specs(**options)


def test_a_pattern_is_case_sensitive_and_covers_the_full_name() -> None:
    with pytest.raises(ValueError, match="matches no parameter"):
        _specs(tail_patterns=["Head.*"])
    with pytest.raises(ValueError, match="full names"):
        _specs(tail_patterns=["wq"])


def test_an_empty_model_has_no_specs() -> None:
    assert param_specs([], {}) == []
    with pytest.raises(ValueError, match="the model has none"):
        param_specs([], {}, tail_patterns=["*"])


def test_zero_rows_are_allowed() -> None:
    (spec,) = param_specs([("empty", (0, 4), True)], {"empty": "u"})
    assert (spec.role, spec.block_rows) == ("matrix", 1)
