"""The folder that a run writes to: `job.dump_folder`, with the folders in it that config keys name.

Makes them before anything slow is built, so that a name that is taken by a file, or a full disk, is
one message at the start. The checkpoint folder is `checkpoint/`'s own. Next: `trainer.py`.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from matrixtitan.config import Config
from matrixtitan.curves import FILE_NAME

_PROBE_BYTES = 1 << 16
"""Written and deleted again: more than a full disk still takes beside a folder's entries."""


def make_run_folder(config: Config) -> None:
    """Make all folders; ValueError, naming the key, for a folder that cannot be made or written.

    A file of an earlier run must be writable too: a folder in its place is found here.
    """
    for key, folder in _folders(config):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free space, or set it to a folder on another disk" if full else _REMEDY
            raise ValueError(f"{key} cannot be made or written: {error}; {remedy}") from error
    for name in _FILES:
        path = Path(config.job.dump_folder) / name
        try:
            if path.exists():
                path.open("ab").close()
        except OSError as error:
            raise ValueError(
                f"job.dump_folder holds {name}, which cannot be written: {error}; move it away, or "
                "set the key to another folder"
            ) from error


_FILES = ("config.toml", FILE_NAME, "plan.json")
"""Files that every run writes, or appends to, in `job.dump_folder`."""


_REMEDY = "set it to a folder that can be"


def _folders(config: Config) -> Iterator[tuple[str, Path]]:
    """(key, folder) of what this run will write to."""
    run, metrics, profiling = Path(config.job.dump_folder), config.metrics, config.profiling
    yield "job.dump_folder", run
    if metrics.enable_tensorboard:
        yield "metrics.save_tb_folder", run / metrics.save_tb_folder
    if profiling.enable_profiling:
        yield "profiling.save_traces_folder", run / profiling.save_traces_folder
    if profiling.enable_memory_snapshot:
        yield "profiling.save_memory_snapshot_folder", run / profiling.save_memory_snapshot_folder
