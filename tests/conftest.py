"""Every test starts from the same random state and one thread, as ranks do."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
