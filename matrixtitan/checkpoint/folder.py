"""The checkpoint folder: which `step-N` are complete, and how one is published or deleted.

A checkpoint is written as `step-N.writing`, and renamed to `step-N` when everything in it is on
disk. One that is being replaced is called `step-N.replaced` until then, and one that is being
deleted is called `step-N.deleting`. So a folder named `step-N` is complete at any moment, whenever
the job is killed.

What cannot be deleted (open files on NFS, no permission) is logged and stays, and later saves
choose other names (`step-N.writing-2`). Links are unlinked, never followed. Nothing here
communicates: rank 0 alone changes the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO

from matrixtitan.checkpoint.errors import CheckpointError
from matrixtitan.checkpoint.integrity import CHECKSUMS_FILE
from matrixtitan.checkpoint.metadata import METADATA_FILE
from matrixtitan.log import get_logger

logger = get_logger()

_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"(step-\d+)\.(writing|replaced|deleting)(?:-(\d+))?")
PROBE = ".probe-"
"""Prefix of the files by which ranks see, at the start, that they share the folder."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def _free_name(final: Path, state: str) -> Path:
    """`step-N.state`, or `step-N.state-2` and so on where a leftover has that name."""
    path, number = final.with_name(f"{final.name}.{state}"), 1
    while os.path.lexists(path):
        number += 1
        path = final.with_name(f"{final.name}.{state}-{number}")
    return path


def make_writing_folder(folder: Path, step: int) -> Path:
    """Make a new and empty folder to write the checkpoint of `step` into."""
    left = folder / f"step-{step}.writing"
    if os.path.lexists(left):
        discard(left)
    path = _free_name(step_folder(folder, step), "writing")
    path.mkdir(parents=True)
    return path


def lock(folder: Path) -> BinaryIO:
    """Keep other runs from writing to `folder` until the returned file is closed.

    The end of the process closes it too. CheckpointError if another run has the lock: often ranks
    that outlived their launcher. On a file system without locks this only logs a warning. The lock
    is not `flock`'s, which a worker process of the loader would still hold after its rank has died.
    """
    path = folder.with_name(f"{folder.name}.lock")
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise CheckpointError(
                f"another run is writing to {folder} (it has {path} locked): end it, or choose "
                "another job.dump_folder"
            ) from None
        logger.warning("%s cannot be locked (%s): start no second run there", path, error)
    return file


def list_steps(folder: Path) -> tuple[list[int], list[str]]:
    """(steps of the complete checkpoints, newest first; names of the incomplete ones)."""
    complete, incomplete = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _STEP.fullmatch(path.name):
            # If one of the two is missing, the checkpoint is damaged, not unfinished.
            # os.path.exists is also False for what cannot be looked at, such as a link to a disk
            # that is gone.
            if os.path.exists(path / METADATA_FILE) or os.path.exists(path / CHECKSUMS_FILE):
                complete.append(int(match[1]))
            else:
                incomplete.append(path.name)
        elif _LEFTOVER.fullmatch(path.name):
            incomplete.append(path.name)
    return sorted(complete, reverse=True), sorted(incomplete)


def publish(folder: Path, step: int, written: Path) -> Path:
    """Make `written` the complete checkpoint of `step`, in place of an older one."""
    final = step_folder(folder, step)
    fsync_folder(written)
    replaced = final.rename(_free_name(final, "replaced")) if os.path.lexists(final) else None
    written.rename(final)
    fsync_folder(folder)
    if replaced is not None:
        discard(replaced)
    return final


def recover(folder: Path) -> list[str]:
    """Clear what a killed job left behind, while nobody is saving. Returns a line for each act.

    What cannot be deleted is logged and stays. OSError only if a checkpoint cannot get its name
    back.
    """
    done = []
    # of several leftovers of one name the highest number is the newest
    found = [(m, path) for path in folder.iterdir() if (m := _LEFTOVER.fullmatch(path.name))]
    for match, path in sorted(found, key=lambda f: (f[0][1], int(f[0][3] or 1)), reverse=True):
        final = folder / match[1]
        if match[2] == "replaced" and not os.path.lexists(final):
            path.rename(final)
            done.append(
                f"restored {final.name}: a save of the same step was interrupted as it took its "
                "place"
            )
        elif discard(path):
            done.append(f"removed {path.name}: its save or deletion was interrupted")
    for path in folder.glob(f"{PROBE}*"):
        unlink_probe(path)
    return done


def discard(path: Path) -> bool:
    """Delete `step-N`, or a leftover of it. Returns whether it is gone.

    It is renamed first, so that no half-deleted folder has the name of a checkpoint. A failure is
    only logged. What could not be deleted is then `step-N.deleting`, and the next start tries
    again.
    """
    match = _LEFTOVER.fullmatch(path.name)
    try:
        if match is None or match[2] != "deleting":
            final = path.with_name(match[1]) if match else path
            path = path.rename(_free_name(final, "deleting"))
        _delete(path)
    except OSError as error:
        logger.warning("could not delete %s: %s; it stays, and the run goes on", path, error)
        return False
    return True


def _delete(path: Path) -> None:
    """Delete as much of it as possible; OSError if something stays. A link is not followed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError:
        # the first failure ended rmtree: delete the rest
        shutil.rmtree(path, ignore_errors=True)
        if os.path.lexists(path):
            raise


def unlink_probe(path: Path) -> None:
    """Delete a probe. A failure is only logged."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("could not delete %s: %s; it stays, and the run goes on", path, error)


def write_file(path: Path, data: bytes) -> None:
    """Write and fsync."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Names in a folder are on disk only after the folder itself is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
