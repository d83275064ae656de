"""What can be lifted out, copied out of the repository alone, passes tests that need only that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALONE = """
import importlib.util
import {package}

def test_nothing_else_of_the_package_is_here():
    for name in {absent}:
        assert importlib.util.find_spec(name) is None, name
"""


CONFTEST = f"""
import sys

# an editable install puts the repository on the path, which would add what was left out
sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]
"""


class Lift(NamedTuple):
    """Files to copy, and the tests to run on the copy."""

    package: str
    copied: tuple[str, ...]
    left_out: tuple[str, ...]
    absent: tuple[str, ...]
    selected: tuple[str, ...]


FSDP = Lift(
    package="matrixtitan.fsdp",
    copied=(
        "matrixtitan/fsdp",
        "matrixtitan/plan",
        "tests/lib/distributed.py",
        "tests/lib/toy.py",
        "tests/unit/test_background.py",
        "tests/unit/test_plan_roles.py",
        "tests/distributed/test_fsdp.py",
    ),
    left_out=(),
    absent=("matrixtitan.config", "matrixtitan.predict", "matrixtitan.optim", "models"),
    selected=(
        "tests/unit/test_background.py",
        "tests/unit/test_plan_roles.py",
        "tests/distributed/test_fsdp.py::test_matches_plain_training_at_every_world_size[2]",
    ),
)
OPTIM = Lift(
    package="matrixtitan.optim",
    copied=(
        "matrixtitan/optim",
        "matrixtitan/rules",
        "matrixtitan/options.py",
        "matrixtitan/plan",
        "tests/lib/references.py",
        "tests/lib/forced_form.py",
        "tests/unit/test_optim_muon.py",
        "tests/unit/test_optim_factors.py",
    ),
    left_out=("build.py", "lr_schedule.py"),
    absent=("matrixtitan.config", "matrixtitan.fsdp", "matrixtitan.trainer", "models"),
    selected=("tests/unit/test_optim_muon.py", "tests/unit/test_optim_factors.py"),
)


def copy(lift: Lift, target: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", *lift.left_out)
    for name in ("matrixtitan/__init__.py", *lift.copied):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, path, ignore=ignore)
        else:
            shutil.copy(ROOT / name, path)
    for package in ("tests", "tests/lib", "tests/unit", "tests/distributed"):
        (target / package).mkdir(exist_ok=True)
        (target / package / "__init__.py").touch()
    (target / "alone.py").write_text(ALONE.format(package=lift.package, absent=lift.absent))
    (target / "conftest.py").write_text(CONFTEST)
    (target / "pytest.ini").write_text("[pytest]\npythonpath = .\n")


@pytest.mark.slow
@pytest.mark.parametrize("lift", [FSDP, OPTIM], ids=lambda lift: lift.package)
def test_a_package_runs_alone(lift: Lift, tmp_path: Path) -> None:
    copy(lift, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *lift.selected,
            "alone.py",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout, done.stdout
