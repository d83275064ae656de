"""The progress line: redrawn on a terminal, now and then in a log, and gone at the end."""

from __future__ import annotations

import io

import pytest

from matrixtitan.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminals_line_is_redrawn_and_cleared() -> None:
    stream = Terminal()
    bar = ProgressBar(stream=stream)
    bar.update("1/4 loss 5", 1 / 4)
    bar.update("2/4", 1 / 2)
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().split("\r\x1b[K")[1:] == [
        f"[{'#' * 7}{'-' * 21}] 1/4 loss 5",
        f"[{'#' * 14}{'-' * 14}] 2/4",
    ]
    bar.clear()
    assert stream.getvalue().endswith("2/4\r\x1b[K")
    length = len(stream.getvalue())
    bar.clear()
    assert len(stream.getvalue()) == length, "nothing is drawn"


def test_a_line_without_a_share_has_no_bar_and_one_of_too_much_a_full_one() -> None:
    stream = Terminal()
    bar = ProgressBar(stream=stream)
    bar.update("3 MB")
    bar.update("4 MB", 1.5)
    assert stream.getvalue() == f"\r\x1b[K3 MB\r\x1b[K[{'#' * 28}] 4 MB"


def test_a_log_has_a_line_now_and_then_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream, silent = io.StringIO(), io.StringIO()
    bars = [ProgressBar(15.0, stream), ProgressBar(stream=silent)]
    for now in (110.0, 115.0, 120.0, 129.0, 130.0):
        for bar in bars:
            bar.update(f"at {now:.0f} s")
    for bar in bars:
        bar.clear()
    assert stream.getvalue() == "at 115 s\nat 130 s\n"
    assert silent.getvalue() == ""
