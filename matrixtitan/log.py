"""The logger: one line per record, tagged with the rank that wrote it.

Rank 0 logs INFO; all ranks log warnings and errors. So the log of a 64-node job stays readable.
Imports nothing of the package.
"""

from __future__ import annotations

import logging
import os
import sys

NAME = "matrixtitan"


def get_logger() -> logging.Logger:
    """The package's logger; `logging.getLogger(__name__)` inside the package is its child."""
    return logging.getLogger(NAME)


def init_logger() -> None:
    """Send the package's records to standard error. For programs to call once, not libraries."""
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
