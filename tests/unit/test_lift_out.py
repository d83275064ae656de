"""`fsdp` with `plan`, copied out of the repository alone, still passes tests that need only them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIFTED = ["matrixtitan/__init__.py", "matrixtitan/fsdp", "matrixtitan/plan"]
TESTS = [
    "tests/unit/test_background.py",
    "tests/unit/test_plan_roles.py",
    "tests/distributed/test_fsdp.py",
]
LIBRARY = ["tests/lib/distributed.py", "tests/lib/toy.py"]
SELECTED = [
    *TESTS[:2],
    f"{TESTS[2]}::test_matches_plain_training_at_every_world_size[2]",
    "alone.py",
]
ALONE = """
import importlib.util
import matrixtitan.fsdp

def test_nothing_else_of_the_package_is_here():
    for name in ("matrixtitan.config", "matrixtitan.predict", "matrixtitan.optim", "models"):
        assert importlib.util.find_spec(name) is None, name
"""


@pytest.mark.slow
def test_fsdp_and_plan_run_alone(tmp_path: Path) -> None:
    for name in (*LIFTED, *LIBRARY, *TESTS):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    for package in ("tests", "tests/lib", "tests/unit", "tests/distributed"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SELECTED],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
