"""Tells why a run ended: one message for all ranks of a machine, without a traceback.

A ValueError that our own code raises is by convention about what a user gave. A ValueError from a
library is a bug. The ranks of a machine share the folder that torchrun gives them for their error
files. The first rank that makes a mark there prints its message, and `tools/launch.py` looks for
marks to know which of torchrun's reports to hide. Imports nothing of the package.
"""

from __future__ import annotations

import dis
import os
import sys
import time
from pathlib import Path

PACKAGES = tuple(
    f"{Path(__file__).resolve().parents[1] / name}{os.sep}" for name in ("matrixtitan", "models")
)
MARK = "told"
LOST_MARK = "lost"
INTERRUPTED_MARK = "interrupted"
LOST = (
    # gloo, the store, NCCL
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("failed to recv, got 0 bytes", "Connection was likely closed"),
    *("remote process exited or there was a network error",),
)
"""What errors say if the other end of a connection is gone. A time-out says none of these."""


def is_mistake(error: BaseException) -> bool:
    """Whether a `raise` of our own raised this ValueError, and not a call such as `int(text)`."""
    trace = error.__traceback__
    if not isinstance(error, ValueError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    raised = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return raised and code.co_filename.startswith(PACKAGES)


def is_lost_peer(error: BaseException) -> bool:
    """Whether this error is a consequence: another rank ended, and its connections with it."""
    return _lost_reason(error) is not None


def _lost_reason(error: BaseException) -> str | None:
    """The error's text up to the words that it is recognised by, from `LOST`."""
    link: BaseException | None = error
    while isinstance(link, RuntimeError):
        for words in LOST:
            before, found, _ = str(link).partition(words)
            if found:
                return " ".join((before + found).split())
        link = link.__cause__ or link.__context__
    return None


def tell_lost_peer(error: BaseException) -> None:
    """Print one line for this rank."""
    _mark(LOST_MARK)
    print(
        f"rank {os.environ.get('RANK', '0')} ended because it lost another rank: "
        f"{_lost_reason(error)} (--debug.traceback true shows where)",
        file=sys.stderr,
        flush=True,
    )


def tell_interrupted() -> None:
    """Print "interrupted", unless another rank of this machine has printed it."""
    if _mark(INTERRUPTED_MARK):
        print("interrupted", file=sys.stderr, flush=True)


def tell(message: str, final: bool) -> None:
    """Print `message`, unless another rank of this machine printed one in this attempt.

    After a `final` message, the further attempts of the run (MAX_RESTARTS) end at once.
    """
    if _mark(MARK, final):
        print(f"error: {message}", file=sys.stderr, flush=True)


def told_by_another(wait: float = 0.0) -> bool:
    """Whether a rank here has reported a mistake in this attempt, or a final one earlier.

    Waits up to `wait` seconds for the mark.
    """
    attempt = _attempt_folder()
    deadline = time.monotonic() + wait
    while attempt is not None:
        if (attempt.parent / MARK).exists() or (attempt / MARK).exists():
            return True
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return False


def exit_code(log_folder: Path) -> int | None:
    """The exit status of a run with torchrun's `--log-dir`: 2 after a final mistake, 1 after
    another.

    None if the last attempt ended without a mistake, or has not ended.
    """
    if any((run / MARK).exists() for run in log_folder.iterdir()):
        return 2
    return 1 if _last_attempt_has(MARK, log_folder) else None


def lost_peers(log_folder: Path) -> bool:
    """Whether a rank of the last attempt told that it lost another rank."""
    return _last_attempt_has(LOST_MARK, log_folder)


def _last_attempt_has(mark: str, log_folder: Path) -> bool:
    for run in log_folder.iterdir():
        attempts = [path.name.removeprefix("attempt_") for path in run.glob("attempt_*")]
        if attempts and (run / f"attempt_{max(map(int, attempts))}" / mark).exists():
            return True
    return False


def _mark(mark: str, final: bool = False) -> bool:
    """Make a mark of this attempt, or of the run if `final`. Returns whether it is new."""
    attempt = _attempt_folder()
    if attempt is not None:
        try:
            ((attempt.parent if final else attempt) / mark).touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _attempt_folder() -> Path | None:
    """<log dir>/<run>/attempt_<number>, shared by the ranks of a machine; None without torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    return None if error_file == os.devnull else Path(error_file).parents[1]
