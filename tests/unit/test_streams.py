"""What waits for a communication learns that it failed, however often it asks."""

from __future__ import annotations

import pytest
import torch

from matrixtitan.fsdp.streams import Channel, Pending


class Fake:
    """A work that fails with `message`, or counts how often it was waited for."""

    def __init__(self, message: str = "") -> None:
        self.message = message
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.message:
            raise RuntimeError(self.message)


def test_a_failed_communication_raises_at_every_wait() -> None:
    works = [Fake(), Fake("connection closed"), Fake()]
    pending = Pending(works, None, "gathering blocks.3")
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"gathering blocks\.3 failed: .*connection closed"):
            pending.wait()
    assert [work.waits for work in works] == [1, 1, 0]


def test_a_finished_communication_is_waited_for_once() -> None:
    """A second wait for a message of gloo's would be for another one."""
    works = [Fake(), Fake()]
    pending = Pending(works, None, "gathering blocks.3")
    pending.wait()
    pending.wait()
    assert [work.waits for work in works] == [1, 1]


def test_a_communication_that_cannot_begin_fails_where_it_is_awaited() -> None:
    def issue() -> list[Fake]:
        raise RuntimeError("connection closed")

    pending = Channel(torch.device("cpu")).submit(issue, "gathering blocks.3")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"gathering blocks\.3 failed: .*connection closed"):
            pending.wait()
