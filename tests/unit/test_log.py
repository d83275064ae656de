"""Records carry the rank, and rank 0 alone logs information."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from matrixtitan.log import get_logger, init_logger


@pytest.fixture
def bare_logger() -> Iterator[logging.Logger]:
    logger = get_logger()
    before, logger.handlers = logger.handlers, []
    level, propagate = logger.level, logger.propagate
    yield logger
    logger.handlers, logger.propagate = before, propagate
    logger.setLevel(level)


@pytest.mark.parametrize(("rank", "says_info"), [("0", True), ("3", False)])
def test_rank_is_shown_and_info_is_rank_zeros(
    bare_logger: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    says_info: bool,
) -> None:
    monkeypatch.setenv("RANK", rank)
    init_logger()
    init_logger()  # twice must not double the lines
    bare_logger.info("hello")
    bare_logger.warning("careful")
    lines = capsys.readouterr().err.splitlines()
    assert sum("hello" in line for line in lines) == int(says_info)
    assert [f"[rank {rank}] WARNING careful" in line for line in lines].count(True) == 1
