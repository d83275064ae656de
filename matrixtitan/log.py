"""The logger: one line per record, tagged with the rank that wrote it.

INFO from rank 0 alone, warnings and errors from every rank, so that a 64-node job's log can be
read. Imports nothing of the package."""

from __future__ import annotations

import logging
import os
import sys

NAME = "matrixtitan"


def get_logger() -> logging.Logger:
    """The package's logger; `logging.getLogger(__name__)` inside the package is its child."""
    return logging.getLogger(NAME)


def init_logger() -> None:
    """Send the package's records to standard error. Called once by the program, never by the
    library."""
    rank = os.environ.get("RANK", "0")
    logger = get_logger()
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s [rank {rank}] %(levelname)s %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == "0" else logging.WARNING)
    logger.propagate = False
