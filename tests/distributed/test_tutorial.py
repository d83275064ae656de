"""The commands of docs/tutorial.md run, in order and in one shell, in a fresh checkout.

Only `pip` is a stand-in, because a test installs nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8


def commands(page: Path) -> str:
    """The text of the page's `sh` blocks, in order."""
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_of_the_tutorial_runs(tmp_path: Path) -> None:
    for name in ("matrixtitan", "models", "tools", "train_configs", "run_train.sh", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    # The environment that runs the tests stands in for the one that the first command builds.
    bin_folder = tmp_path / ".venv/bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "activate").touch()
    (bin_folder / "pip").write_text('#!/bin/sh\necho "$@" >>pip-arguments.txt\n')
    (bin_folder / "pip").chmod(0o755)
    path = f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    launcher = ("SLURM_", "TORCHELASTIC_", "NPROC", "NNODES", "NODE_", "MASTER_", "MATRIXTITAN_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands(ROOT / "docs/tutorial.md")],
        cwd=tmp_path,
        env={
            **inherited,
            "PATH": path,
            "STEPS": str(STEPS),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    screen = done.stdout + done.stderr
    assert done.returncode == 0, screen
    assert (tmp_path / "pip-arguments.txt").read_text() == "install -e .[tools] transformers\n"
    for run in ("muon", "soap"):
        assert f"{run}: validation loss " in done.stdout, screen
        assert (tmp_path / f"outputs/tutorial/{run}/checkpoint/step-{STEPS}/.metadata").exists()
    for name in ("config.toml", "metrics.jsonl", "tb"):
        assert (tmp_path / "outputs/tutorial/muon" / name).exists(), f"section 7 lists {name}"
    assert screen.count("\ndef ") >= 2, "generate.py and transformers both go on from the prompt"
