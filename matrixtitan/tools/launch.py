"""Start the ranks with torchrun; `run_train.sh` calls this.

    usage: matrixtitan launch TORCHRUN_OPTIONS... train.py [--config NAME] [--section.key value ...]

First checks the config as far as that needs neither torch nor a rank. If only ranks can see a
user's mistake, one of them tells it (`matrixtitan/mistakes.py`), and torchrun's report is left out.
Any other failure is reported as torchrun does.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from matrixtitan.config import load_config
from matrixtitan.config.errors import report
from matrixtitan.mistakes import exit_code
from matrixtitan.ranks import check_ranks


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

    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    folder = Path(tempfile.mkdtemp(prefix="matrixtitan_"))
    handlers = logging.getLogger("torch.distributed").handlers

    def keep(record: logging.LogRecord) -> bool:
        return exit_code(folder) is None

    for handler in handlers:
        handler.addFilter(keep)
    code = 0
    try:
        torchrun(["--log-dir", str(folder), *argv])
    except ChildFailedError:
        told = exit_code(folder)
        if told is None:
            raise  # torchrun's report names files in the folder
        code = told
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


def _number(argv: Sequence[str], option: str) -> int:
    return int(argv[argv.index(option) + 1])
