"""The thread that moves chunks: order, errors, and what it keeps alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from matrixtitan.fsdp.background import Background, Steps


def once(act: Callable[[], object]) -> Steps:
    yield False
    act()


def test_tasks_run_in_order_and_errors_reach_the_waiter() -> None:
    background, seen = Background("test"), []
    tasks = [background.submit(once(lambda i=i: seen.append(i))) for i in range(5)]  # type: ignore[misc]
    wrong = background.submit(once(lambda: 1 / 0))
    after = background.submit(once(lambda: seen.append(5)))
    tasks[-1].wait()
    with pytest.raises(RuntimeError, match="division by zero"):
        wrong.wait()
    after.wait()
    assert seen == [0, 1, 2, 3, 4, 5]
    background.close()


def test_the_next_task_begins_where_one_says_so_and_goes_on_after_it() -> None:
    background, seen, submitted = Background("test"), [], threading.Event()

    def task(name: str, waits: int, open_from: int) -> Steps:
        seen.append(f"{name} begins")
        submitted.wait()
        for step in range(waits):
            yield step >= open_from
            seen.append(f"{name} {step}")

    tasks = [background.submit(task(name, 3, 1)) for name in "abc"]
    submitted.set()
    for each in tasks:
        each.wait()
    background.close()
    assert seen == [
        *("a begins", "a 0", "b begins", "a 1", "a 2"),  # b says that c may not begin yet
        *("b 0", "c begins", "b 1", "b 2"),
        *("c 0", "c 1", "c 2"),
    ]


def test_close_finishes_what_was_submitted() -> None:
    background, seen = Background("test"), []
    for i in range(3):
        background.submit(once(lambda i=i: seen.append(i)))  # type: ignore[misc]
    background.close()
    assert seen == [0, 1, 2]


def test_a_finished_task_keeps_no_buffer_alive() -> None:
    """Neither a handle that the caller still has, nor the thread that waits for its next task."""
    background = Background("test")
    buffer = torch.zeros(10)
    alive = weakref.ref(buffer)
    task = background.submit(once(buffer.zero_))
    task.wait()
    del buffer
    assert alive() is None
    background.close()
