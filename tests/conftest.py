"""Every test starts from the same random state and with one thread, as ranks do.

Only tests that are marked for a GPU see one.
"""

from __future__ import annotations

import signal

import pytest
import torch

# A shell starts background jobs with SIGINT ignored, and processes that tests start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes that a test starts."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
