"""The checkpoint folder: which `step-N` are complete, and the moves that make one complete or gone.

A checkpoint is written as `step-N.writing` and renamed to `step-N` when everything in it is on disk; one that is being
replaced is `step-N.replaced` until then, and one being deleted is `step-N.deleting`. So a folder named `step-N` is
complete at any moment, whenever the job is killed. Nothing here communicates: rank 0 alone changes the folder.
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
_LEFTOVER = re.compile(r"step-\d+\.(writing|replaced|deleting)")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def writing_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.writing"


def lock(folder: Path) -> BinaryIO:
    """Keep other runs from writing to `folder` until the returned file is closed or this process ends.

    CheckpointError if one does: perhaps ranks that outlived their launcher. A file system without locks is logged. Not
    `flock`: a loader's worker would hold that on after the death of its rank.
    """
    path = folder.with_name(f"{folder.name}.lock")
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise CheckpointError(
                f"another run is writing to {folder} (it has {path} locked): end it, or choose another job.dump_folder"
            ) from None
        logger.warning("%s cannot be locked (%s): start no second run there", path, error)
    return file


def list_steps(folder: Path) -> tuple[list[int], list[str]]:
    """Steps of the complete checkpoints, newest first, and the names of incomplete ones."""
    complete, incomplete = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _STEP.fullmatch(path.name)) and path.is_dir():
            if (path / METADATA_FILE).exists() or (path / CHECKSUMS_FILE).exists():
                complete.append(
                    int(match[1])
                )  # one of the two missing is damage, not an unfinished save
            else:
                incomplete.append(path.name)
        elif _LEFTOVER.fullmatch(path.name):
            incomplete.append(path.name)
    return sorted(complete, reverse=True), sorted(incomplete)


def publish(folder: Path, step: int) -> Path:
    """Make the checkpoint written for `step` complete, in place of an older one of the same step."""
    final, written = step_folder(folder, step), writing_folder(folder, step)
    replaced = folder / f"step-{step}.replaced"
    fsync_folder(written)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    written.rename(final)
    fsync_folder(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def recover(folder: Path) -> list[str]:
    """Clear what a killed job left behind; return a line for each thing done. Only while nobody is saving."""
    done = []
    for path in sorted(folder.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if not match:
            continue
        final = path.with_suffix("")
        if match[1] == "replaced" and not final.exists():
            path.rename(final)
            done.append(
                f"restored {final.name}: a save of the same step was interrupted as it took its place"
            )
        else:
            shutil.rmtree(path)
            done.append(f"removed {path.name}: its save or deletion was interrupted")
    return done


def delete(folder: Path, step: int) -> None:
    """Delete a checkpoint so that no moment shows half of it. FileNotFoundError if it is not there."""
    doomed = folder / f"step-{step}.deleting"
    step_folder(folder, step).rename(doomed)
    shutil.rmtree(doomed)


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
