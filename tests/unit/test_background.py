"""The thread that moves chunks: order, errors, and what it keeps alive."""

from __future__ import annotations

import weakref

import pytest
import torch

from matrixtitan.fsdp.background import Background


def test_tasks_run_in_order_and_errors_reach_the_waiter() -> None:
    background, seen = Background("test"), []
    tasks = [background.submit(lambda i=i: seen.append(i)) for i in range(5)]  # type: ignore[misc]
    wrong = background.submit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    tasks[-1].wait()
    assert seen == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="division by zero"):
        wrong.wait()
    background.close()


def test_a_finished_task_keeps_no_buffer_alive() -> None:
    """Neither a handle that the caller still has, nor the thread that waits for its next task."""
    background = Background("test")
    buffer = torch.zeros(10)
    alive = weakref.ref(buffer)
    task = background.submit(buffer.zero_)
    task.wait()
    del buffer
    assert alive() is None
    background.close()
