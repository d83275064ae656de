"""Start the ranks with torchrun; `run_train.sh` calls this.

    usage: matrixtitan launch TORCHRUN_OPTIONS... train.py [--config NAME] [--section.key value ...]

First runs the checks of the config that need neither torch nor a rank. If only ranks can detect a
user's mistake, one rank reports it (`matrixtitan/mistakes.py`), and torchrun's report is omitted.
The report is also omitted if a signal ended the launcher or a rank: one line then names the signal,
and the exit status is 128 + its number for the launcher. torchrun reports any other failure.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matrixtitan.config import Config, load_config
from matrixtitan.config.errors import report
from matrixtitan.mistakes import exit_code, lost_peers
from matrixtitan.ranks import check_ranks

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

ROUTINE = ("Sending process %s closing signal", "Received %s death signal")
"""Lines of torchrun that say, for each rank, what the launcher's own line says once."""


def main(argv: Sequence[str]) -> int:
    """`argv` is torchrun's command line, with --nnodes and --nproc-per-node as numbers."""
    script = next((place for place, word in enumerate(argv) if word.endswith("train.py")), None)
    if script is None:
        print(__doc__)
        return 0 if "--help" in argv else 2
    try:
        config = load_config(argv[script + 1 :])
        check_ranks(config, _number(argv, "--nnodes") * _number(argv, "--nproc-per-node"))
    except ValueError as error:
        print(report(error), file=sys.stderr)
        return 2
    try:
        return _launch(config, argv)
    except KeyboardInterrupt:  # before torchrun handles signals
        return _ended_by(signal.SIGINT, config)


def _launch(config: Config, argv: Sequence[str]) -> int:
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    folder = Path(tempfile.mkdtemp(prefix="matrixtitan_"))
    handlers = logging.getLogger("torch.distributed").handlers

    def keep(record: logging.LogRecord) -> bool:
        return exit_code(folder) is None and not str(record.msg).startswith(ROUTINE)

    for handler in handlers:
        handler.addFilter(keep)
    code = 0
    try:
        torchrun(["--log-dir", str(folder), *argv])
    except ChildFailedError as error:
        told = exit_code(folder)
        if told is None:
            elsewhere = _number(argv, "--nnodes") > 1 and lost_peers(folder)
            death = _death(error.failures, elsewhere)
            if death is None:
                raise  # torchrun's report names files in the folder
            print(f"error: {death}", file=sys.stderr)
        code = 1 if told is None else told
    except SignalException as error:
        code = _ended_by(error.sigval, config)
    except DistNetworkError as error:
        print(
            "error: the machines did not meet: MASTER_ADDR must name machine 0, and MASTER_PORT a "
            f"port that is free there, the same on all machines ({str(error).splitlines()[0]})",
            file=sys.stderr,
        )
        code = 1
    finally:
        for handler in handlers:
            handler.removeFilter(keep)
    shutil.rmtree(folder)
    return code


def _ended_by(number: signal.Signals, config: Config) -> int:
    """Say what ended the launcher, after the ranks have ended. Returns the exit status."""
    from matrixtitan.checkpoint.folder import list_steps, step_folder

    place = Path(config.job.dump_folder) / config.checkpoint.folder
    if not config.checkpoint.enable:
        rest = "nothing was saved, since checkpoint.enable is false"
    elif steps := list_steps(place)[0]:
        rest = f"started again, the run resumes from {step_folder(place, steps[0])}"
    else:
        rest = f"there is no checkpoint in {place} yet"
    print(f"ended by {number.name}; {rest}", file=sys.stderr)
    return 128 + number


def _death(failures: Mapping[int, ProcessFailure], elsewhere: bool) -> str | None:
    """Which ranks a signal ended. None if a rank left an error, which torchrun's report quotes.

    `elsewhere`: ranks here lost others, which may be on other machines. torchrun ends the other
    ranks of a machine with SIGTERM, so any other signal came before that.
    """
    if any(Path(failure.error_file).is_file() for failure in failures.values()):
        return None
    died = {rank: failure for rank, failure in failures.items() if failure.exitcode < 0}
    first = {rank: f for rank, f in died.items() if f.exitcode != -signal.SIGTERM}
    if elsewhere and not first:
        return "the ranks of this machine lost ranks of other machines, whose logs say why"
    ends = [
        f"rank {rank} (pid {failure.pid}) was ended by {signal.Signals(-failure.exitcode).name}"
        for rank, failure in sorted((first or died).items())
    ]
    return "; ".join(ends) or None


def _number(argv: Sequence[str], option: str) -> int:
    return int(argv[argv.index(option) + 1])
