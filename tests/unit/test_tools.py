"""Every tool starts the way its own text and the docs say: as a script, from the repository, nothing installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.name for path in (ROOT / "tools").glob("*.py") if "__main__" in path.read_text()
)


def test_there_are_scripts() -> None:
    assert {"bench.py", "bench_muon.py", "ns_table.py", "plan.py", "sweep.py"} <= set(SCRIPTS)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-E", f"tools/{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize(("option", "value"), [("--rounds", "0"), ("--flavor", "150m")])
def test_wrong_arguments_of_bench_muon(option: str, value: str) -> None:
    done = run("bench_muon.py", option, value)
    assert done.returncode == 2
    assert option in done.stderr.splitlines()[-1]
