"""Tells a user's mistake: one message for all ranks of a machine, without a traceback.

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


def tell(message: str, final: bool) -> None:
    """Print `message`, unless another rank of this machine printed one in this attempt.

    After a `final` message, the further attempts of the run (MAX_RESTARTS) end at once.
    """
    attempt = _attempt_folder()
    if attempt is not None:
        try:
            ((attempt.parent if final else attempt) / MARK).touch(exist_ok=False)
        except FileExistsError:
            return
    print(f"error: {message}", file=sys.stderr, flush=True)


def told_by_another(wait: float = 0.0) -> bool:
    """Whether a rank of this machine told a mistake in this attempt, or a final one before.

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
    for run in log_folder.iterdir():
        if (run / MARK).exists():
            return 2
        attempts = [path.name.removeprefix("attempt_") for path in run.glob("attempt_*")]
        if attempts and (run / f"attempt_{max(map(int, attempts))}" / MARK).exists():
            return 1
    return None


def _attempt_folder() -> Path | None:
    """<log dir>/<run>/attempt_<number>, shared by the ranks of a machine; None without torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    return None if error_file == os.devnull else Path(error_file).parents[1]
