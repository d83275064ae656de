"""The thread that moves chunks: order, errors, and what it keeps alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from matrixtitan.fsdp.background import Background, Steps, chunks


def test_chunks_are_about_equal_and_no_larger_than_asked() -> None:
    assert [part.nbytes for part in chunks(torch.zeros(24_576), 65_536)] == [49_152, 49_152]
    for numel, dtype in ((1, torch.float32), (49_999, torch.bfloat16), (2047, torch.float32)):
        tensor = torch.arange(numel, dtype=dtype)
        cut = chunks(tensor, 4094)  # 1023.5 elements of float32
        assert torch.equal(torch.cat(list(cut)), tensor)
        assert max(part.nbytes for part in cut) <= 4094
        assert max(map(len, cut)) - min(map(len, cut)) <= 1


def once(act: Callable[[], object]) -> Steps:
    yield False
    act()


def test_tasks_run_in_order() -> None:
    background, seen = Background("test"), []
    tasks = [background.submit(once(lambda i=i: seen.append(i))) for i in range(5)]  # type: ignore[misc]
    tasks[-1].wait()
    assert seen == [0, 1, 2, 3, 4]
    background.close()


def test_an_error_reaches_who_waits_and_ends_all_later_tasks() -> None:
    background, seen, submitted = Background("test"), [], threading.Event()

    def fail() -> None:
        submitted.wait()
        raise RuntimeError("a peer is gone")

    failing = background.submit(once(fail))
    later = [background.submit(once(lambda: seen.append(0))) for _ in range(2)]
    submitted.set()
    for task in (failing, *later):
        with pytest.raises(RuntimeError, match="a peer is gone"):
            task.wait()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        background.submit(once(lambda: seen.append(0)))
    background.close()
    assert not seen


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


def test_close_ends_an_idle_thread_and_waits_for_no_other() -> None:
    """What is in flight then waits for peers that an error or Ctrl-C may have stopped too."""
    idle, busy, answered = Background("idle"), Background("busy"), threading.Event()
    idle.submit(once(lambda: None)).wait()
    task = busy.submit(once(answered.wait))
    idle.close()
    busy.close()
    assert "idle" not in {thread.name for thread in threading.enumerate()}
    assert not task.done.is_set()
    answered.set()
    task.wait()


def overwrite(buffer: torch.Tensor, fail: bool) -> Steps:
    yield False
    buffer.zero_()
    if fail:
        raise RuntimeError("a peer is gone")


@pytest.mark.parametrize("fail", [False, True])
def test_a_finished_task_keeps_no_buffer_alive(fail: bool) -> None:
    """Neither a handle that the caller still has, nor the thread that waits for its next task."""
    background = Background("test")
    buffer = torch.zeros(10)
    alive = weakref.ref(buffer)
    task = background.submit(overwrite(buffer, fail))
    if fail:
        with pytest.raises(RuntimeError, match="a peer is gone"):
            task.wait()
    else:
        task.wait()
    del buffer
    assert alive() is None
    background.close()
