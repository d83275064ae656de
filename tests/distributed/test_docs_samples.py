"""The Python samples of README and docs/library.md run on two ranks, and their losses fall."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
def test_sample_runs_on_two_ranks(page: str, tmp_path: Path) -> None:
    (sample,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    script = tmp_path / "sample.py"
    script.write_text(sample)
    launcher = ("SLURM_", "TORCHELASTIC_", "MASTER_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1", "--local-ranks-filter", "0", str(script)),
        ],
        cwd=tmp_path,
        env={
            **inherited,
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5, done.stdout
    assert losses[-1] < 0.8 * losses[0]
