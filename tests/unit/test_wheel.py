"""The wheel: what it holds, and that the runtime and the optimizers need torch alone."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from matrixtitan import __version__
from matrixtitan.extras import CHECKOUT_NEEDED

ROOT = Path(__file__).resolve().parents[2]

LIBRARIES = """
import importlib.metadata, importlib.util, pathlib, sys

import matrixtitan.fsdp, matrixtitan.optim

for name in ("models", "numpy", "tensorboard", "tiktoken", "tomli", "torchdata"):
    assert importlib.util.find_spec(name) is None, name
installed = pathlib.Path(matrixtitan.__file__).parent
assert installed.is_relative_to(sys.path[0]), installed
assert (installed / "py.typed").is_file()
assert matrixtitan.__version__ == importlib.metadata.version("matrixtitan")
print(matrixtitan.__version__)

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
before = [param.detach().clone() for param in model.parameters()]
sharded = matrixtitan.fsdp.fully_shard(model, units=[["0"], ["2"]])
params = sharded.local_parameters()
assert sorted({p.role for p in params}) == ["matrix", "tail"]
matrices = [(p.fqn, p.tensor) for p in params if p.role == "matrix"]
tail = [(p.fqn, p.tensor) for p in params if p.role == "tail"]
muon = matrixtitan.optim.Muon([{"params": matrices}], lr=0.02)
adamw = torch.optim.AdamW([{"params": tail}], lr=0.003)
model(torch.randn(4, 8)).square().mean().backward()
muon.step()
adamw.step()
for old, new in zip(before, model.parameters(), strict=True):
    assert new.isfinite().all() and not torch.equal(old, new)
sharded.close()
"""

COMMANDS = """
import contextlib, importlib, io, pkgutil, sys

import matrixtitan
from matrixtitan.__main__ import TOOLS, main
from matrixtitan.extras import CheckoutNeeded

for tool in sorted(path.stem for path in TOOLS.glob("[a-z]*.py")):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([tool, "--help"])
        except SystemExit as end:  # argparse's, after the help
            code = end.code
    print(tool, code, error.getvalue(), end="" if error.getvalue() else "\\n")
found = pkgutil.walk_packages(matrixtitan.__path__, "matrixtitan.", onerror=lambda name: None)
for module in found:
    if not module.name.endswith("__main__"):
        with contextlib.suppress(CheckoutNeeded):
            importlib.import_module(module.name)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build from, because setuptools leaves its build folder beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, source)
    for name in ("matrixtitan", "models"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    return source


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=checkout)
    (built,) = (checkout / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    install(str(wheel), target=target)
    return target


def install(*what: str, target: Path) -> None:
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index")
    options = ("--no-deps", "--no-build-isolation", "--target", str(target))
    run(*pip, *options, *what, cwd=target)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_with(path: list[Path], program: str, cwd: Path) -> str:
    """In an interpreter that sees the standard library and `path`: no site-packages, no cwd."""
    path_first = f"import sys; sys.path[:0] = {[str(folder) for folder in path]}\n"
    return run("-I", "-S", "-c", path_first + program, cwd=cwd)


def torch_alone(folder: Path) -> Path:
    """Links in `folder` to torch and its requirements, as torch's metadata names them."""
    names, seen = ["torch"], set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for path in importlib.metadata.files(name) or ():
            link = folder / path.parts[0]
            if path.parts[0] not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(importlib.metadata.distribution(name).locate_file(path.parts[0]))
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"matrixtitan-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"matrixtitan", metadata}
    assert "matrixtitan/py.typed" in names
    assert any(name.startswith("matrixtitan/data/assets/") for name in names)


@pytest.mark.slow
def test_the_libraries_need_torch_alone(installed: Path, tmp_path: Path) -> None:
    (links := tmp_path / "links").mkdir()
    path = [installed, torch_alone(links)]
    assert run_with(path, LIBRARIES, cwd=tmp_path).strip() == __version__


@pytest.mark.slow
def test_what_needs_a_checkout_says_so_in_one_line(installed: Path, tmp_path: Path) -> None:
    """Every tool prints its help or this line. Every module is imported or raises this error."""
    packages = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    lines = run_with([installed, packages], COMMANDS, cwd=tmp_path).splitlines()
    refusal = f"2 matrixtitan: {CHECKOUT_NEEDED}"
    results = dict(line.split(" ", 1) for line in lines)
    assert all(result.strip() in ("0", refusal) for result in results.values()), lines
    assert results["plan"] == results["generate"] == results["launch"] == refusal


@pytest.mark.slow
def test_an_editable_install_finds_the_models(checkout: Path, tmp_path: Path) -> None:
    install("--editable", str(checkout), target=tmp_path)
    program = (
        f"import site; site.addsitedir({str(tmp_path)!r}); import models; print(models.__file__)"
    )
    found = run("-I", "-S", "-c", program, cwd=tmp_path).strip()
    assert Path(found) == checkout / "models" / "__init__.py"
