"""Imports point one way, and the runtime can be lifted out. Reads the source, executes nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [
    {"matrixtitan.plan", "matrixtitan.options", "matrixtitan.extras", "models"},
    {"matrixtitan.rules"},
    # data.sources: the config reads from there which types of sources there are
    {
        "matrixtitan.config",
        "matrixtitan.data.sources",
        "matrixtitan.log",
        "matrixtitan.mistakes",
        "matrixtitan.progress",
    },
    {"matrixtitan.in_place"},
    {"matrixtitan.ranks"},
    {"matrixtitan.mesh"},
    {"matrixtitan.data"},
    {"matrixtitan.fsdp"},
    {"matrixtitan.optim"},
    {"matrixtitan.activation_checkpoint"},
    {"matrixtitan.strategies"},
    {"matrixtitan.predict"},
    {"matrixtitan.parallelize"},
    {"matrixtitan.assemble"},
    {"matrixtitan.stuck_weights"},
    {
        "matrixtitan.curves",
        "matrixtitan.metrics",
        "matrixtitan.profiler",
        "matrixtitan.run_folder",
    },
    {"matrixtitan.checkpoint"},
    {"matrixtitan.trainer"},
    {"train"},
    {"matrixtitan.export"},
    {"matrixtitan.tools"},
    {"matrixtitan.__main__"},
]
"""A module may import its own layer and earlier ones."""
EXTRA_RULES = {
    "matrixtitan.plan": {"matrixtitan.plan"},
    "matrixtitan.rules": {"matrixtitan.rules", "matrixtitan.plan", "matrixtitan.options"},
    "matrixtitan.predict": {"matrixtitan.predict", "matrixtitan.plan", "matrixtitan.extras"},
    "matrixtitan.fsdp": {"matrixtitan.fsdp", "matrixtitan.plan"},
    "models": {"models"},
}
"""Prefix -> the only project modules that it may import."""
AROUND_OPTIMIZERS = {f"matrixtitan.optim.{name}" for name in ("build", "lr_schedule")}
"""What of optim is for the trainer. The rest, the optimizers, can be lifted out."""
PURE = [
    f"matrixtitan.{name}"
    for name in ("plan", "options", "rules", "predict", "config", "curves", "mistakes", "ranks")
]
"""These must not import torch."""


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def sources() -> list[Path]:
    return [
        ROOT / "train.py",
        *sorted((ROOT / "matrixtitan").rglob("*.py")),
        *sorted((ROOT / "models").rglob("*.py")),
    ]


MODULES = {module_name(path) for path in sources()}


def imports(source: str, at_run_time: bool = False) -> set[str]:
    """Every module that `source` names. `at_run_time` leaves out imports for the type checker."""
    tree = ast.parse(source)
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
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            below = {f"{module}.{alias.name}" for alias in node.names}
            found |= {module} | (below & (MODULES | {"torch.distributed"}))
    return found


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def layer(name: str) -> int | None:
    for index, prefixes in enumerate(LAYERS):
        if any(within(name, prefix) for prefix in prefixes):
            return index
    return None


def violations(name: str, source: str) -> list[str]:
    """What is wrong with the imports of module `name`, a sentence each."""
    imported = imports(source)
    found = [
        f"{name} imports {other}: write the whole name" for other in imported if other[0] == "."
    ]
    if name == "matrixtitan":
        return [*found, *(f"{name} imports {other}" for other in imported & MODULES)]
    mine = layer(name)
    if mine is None:
        return [f"{name} is in no layer: add it to LAYERS where it belongs"]
    for other in imported:
        theirs = layer(other)
        if theirs is None:
            continue
        if theirs > mine:
            found.append(f"{name} imports {other}, which comes after it")
        for prefix, allowed in EXTRA_RULES.items():
            if within(name, prefix) and not any(within(other, a) for a in allowed):
                found.append(f"{name} imports {other}, not of {sorted(allowed)}")
    if (name == "models" or any(within(name, pure) for pure in PURE)) and any(
        within(other, "torch") for other in imports(source, at_run_time=True)
    ):
        found.append(f"{name} imports torch")
    if within(name, "matrixtitan.fsdp"):  # what lifting it out takes along: torch and the plan
        outside = {other.split(".")[0] for other in imported} - {"matrixtitan", "torch"}
        found += [f"{name} imports {other}" for other in outside - sys.stdlib_module_names]
    if within(name, "matrixtitan.optim") and name not in AROUND_OPTIMIZERS:
        ours = {other for other in imported if layer(other) is not None}
        along = ("optim", "rules", "options", "plan")
        taken = {o for o in ours if any(within(o, f"matrixtitan.{name}") for name in along)}
        bad = (ours - taken) | (ours & AROUND_OPTIMIZERS)
        bad |= {other for other in imported if within(other, "torch.distributed")}
        found += [f"{name} imports {other}, so it cannot be lifted out" for other in bad]
    if within(name, "matrixtitan.optim"):
        found += [
            f"{name} imports {other}" for other in imported if within(other, "matrixtitan.fsdp")
        ]
    return found


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


def test_a_config_is_read_without_torch() -> None:
    """In a fresh process, so that what a module imports in turn counts too."""
    check = "import sys, matrixtitan.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("matrixtitan.fsdp.unit", "import matrixtitan.trainer", "trainer, which comes after it"),
        (
            "matrixtitan.mesh",
            "from matrixtitan import config, trainer",
            "trainer, which comes after",
        ),
        (
            "matrixtitan.mesh",
            "def f():\n    from matrixtitan.predict import memory",
            "predict.memory, which",
        ),
        ("matrixtitan.plan.cost", "from matrixtitan.log import get_logger", "not of"),
        ("matrixtitan.plan.cost", "from matrixtitan.predict import memory", "not of"),
        ("matrixtitan.fsdp.unit", "from matrixtitan.predict import memory", "not of"),
        ("matrixtitan.predict.memory", "import matrixtitan.config", "not of"),
        ("matrixtitan.predict.memory", "import torch", "imports torch"),
        ("matrixtitan.fsdp.unit", "from matrixtitan import config", "matrixtitan.config, not of"),
        ("matrixtitan.fsdp.unit", "import numpy", "imports numpy"),
        (
            "matrixtitan.optim.muon",
            "from matrixtitan.fsdp.unit import Unit",
            "matrixtitan.fsdp.unit",
        ),
        ("matrixtitan.mesh", "from . import trainer", "imports .: write the whole name"),
        (
            "matrixtitan.mesh",
            "from .trainer import Trainer",
            "imports .trainer: write the whole name",
        ),
        ("matrixtitan.plan.cost", "import torch", "imports torch"),
        ("models", "import torch", "models imports torch"),
        ("models.llama", "import matrixtitan.options", "not of"),
        ("matrixtitan.optim.muon", "import torch.distributed as dist", "cannot be lifted out"),
        ("matrixtitan.optim.muon", "from matrixtitan.config import Config", "cannot be lifted out"),
        ("matrixtitan.optim", "from matrixtitan.optim import build", "cannot be lifted out"),
        ("matrixtitan.other", "", "is in no layer"),
        ("matrixtitan", "import matrixtitan.log", "matrixtitan imports matrixtitan.log"),
    ],
)
def test_the_check_sees_an_arrow_that_turns_round(name: str, source: str, complaint: str) -> None:
    assert any(complaint in found for found in violations(name, source))
