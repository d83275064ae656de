"""Telling what a user did wrong: one message for all ranks of a machine, without a traceback.

By the project's convention a ValueError that our own code raises is about what a user gave; one out
of a library is a bug. The ranks of a machine meet in the folder that torchrun gives them for their
error files: whoever makes the mark there first tells, and `tools/launch.py` looks there for what to
keep quiet about. Imports nothing of the package.
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


def is_mistake(error: BaseException) -> bool:
    """Whether a `raise` of our own made this ValueError, and not, say, an `int(text)` that we call."""
    trace = error.__traceback__
    if not isinstance(error, ValueError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    raised = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return raised and code.co_filename.startswith(PACKAGES)


def tell(message: str, final: bool) -> None:
    """Print `message`, unless another rank of this machine told one in this try.

    After a `final` one the other tries (MAX_RESTARTS) of the run end at once.
    """
    attempt = _attempt_folder()
    if attempt is not None:
        try:
            ((attempt.parent if final else attempt) / MARK).touch(exist_ok=False)
        except FileExistsError:
            return
    print(f"error: {message}", file=sys.stderr, flush=True)


def told_by_another(wait: float = 0.0) -> bool:
    """Whether a rank of this machine told a mistake in this try, or a final one in an earlier try.

    Waits up to `wait` seconds for it.
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
    """Of a run with torchrun's `--log-dir`: 2 if a final mistake ended it, 1 if another one did.

    None if the last try ended otherwise, or has not ended.
    """
    for run in log_folder.iterdir():
        if (run / MARK).exists():
            return 2
        attempts = [path.name.removeprefix("attempt_") for path in run.glob("attempt_*")]
        if attempts and (run / f"attempt_{max(map(int, attempts))}" / MARK).exists():
            return 1
    return None


def _attempt_folder() -> Path | None:
    """<log dir>/<run>/attempt_<number>, for all ranks of a machine in one try; None without
    torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    return None if error_file == os.devnull else Path(error_file).parents[1]
