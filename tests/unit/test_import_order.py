"""Imports point one way, and the runtime can be lifted out: read from the source, so nothing is executed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [  # a module may import its own layer and earlier ones
    {"matrixtitan.config", "matrixtitan.log"},
    {"matrixtitan.mesh"},
    {"matrixtitan.data"},
    {"models"},
    {"matrixtitan.plan"},
    {"matrixtitan.fsdp"},
    {"matrixtitan.optim"},
    {"matrixtitan.activation_checkpoint"},
    {"matrixtitan.strategies"},
    {"matrixtitan.parallelize"},
    {"matrixtitan.metrics", "matrixtitan.profiler"},
    {"matrixtitan.checkpoint"},
    {"matrixtitan.trainer"},
    {"train"},
]
EXTRA_RULES = {  # prefix -> the only project modules that it may import besides its own
    "matrixtitan.plan": {"matrixtitan.plan"},
    "matrixtitan.fsdp": {"matrixtitan.fsdp", "matrixtitan.plan"},
    "models": {"models"},
}
PURE = ["matrixtitan.plan", "matrixtitan.config"]  # must not import torch


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def sources() -> list[Path]:
    return [
        ROOT / "train.py",
        *sorted((ROOT / "matrixtitan").rglob("*.py")),
        *sorted((ROOT / "models").rglob("*.py")),
    ]


def imports(path: Path, at_run_time: bool = False) -> set[str]:
    """`at_run_time`: without what is imported for the type checker alone."""
    tree = ast.parse(path.read_text())
    if at_run_time:
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def layer(name: str) -> int | None:
    for index, prefixes in enumerate(LAYERS):
        if any(within(name, prefix) for prefix in prefixes):
            return index
    return None


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    name = module_name(path)
    if name == "matrixtitan":
        return
    mine = layer(name)
    assert mine is not None, f"{name} is in no layer: add it to LAYERS where it belongs"
    for imported in imports(path):
        other = layer(imported)
        assert other is None or other <= mine, f"{name} imports {imported}, which comes after it"
        for prefix, allowed in EXTRA_RULES.items():
            if within(name, prefix) and other is not None:
                assert any(within(imported, a) for a in allowed), f"{name} imports {imported}"
    if any(within(name, pure) for pure in PURE):
        assert not any(within(imported, "torch") for imported in imports(path, at_run_time=True)), (
            f"{name} imports torch"
        )
    if within(name, "matrixtitan.fsdp"):  # what lifting it out takes along: torch and the plan
        outside = {imported.split(".")[0] for imported in imports(path)} - {"matrixtitan", "torch"}
        assert outside <= sys.stdlib_module_names, f"{name} imports {outside}"
    if within(name, "matrixtitan.optim"):
        assert not any(within(imported, "matrixtitan.fsdp") for imported in imports(path))


def test_the_check_sees_an_arrow_that_turns_round() -> None:
    assert (layer("matrixtitan.trainer") or 0) > (layer("matrixtitan.fsdp.unit") or 99)
    assert "matrixtitan.trainer" in imports(ROOT / "train.py")
