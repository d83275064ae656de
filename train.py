"""Train a model: load the config, run the Trainer, tear down. Next: `matrixtitan/trainer.py`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import NoReturn

from matrixtitan.config import Config, ConfigError, load_config
from matrixtitan.config.errors import report
from matrixtitan.mistakes import (
    is_lost_peer,
    is_mistake,
    tell,
    tell_interrupted,
    tell_lost_peer,
    told_by_another,
)

PEER_SECONDS = 5.0
"""How long a rank may take from a mistake to its message. An error of another rank in that time,
such as a broken connection, is a consequence."""


def main() -> int:
    try:
        return run()
    except KeyboardInterrupt:
        # Ctrl-C in a terminal comes twice: from the terminal, and from the launcher
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell_interrupted()
        return 130


def run() -> int:
    try:
        # before torch is imported: a mistake is answered at once
        config = load_config(sys.argv[1:])
    except ConfigError as error:
        print(report(error), file=sys.stderr)
        return 2
    if told_by_another():
        return 2  # a restart does not help against a mistake

    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from matrixtitan.log import init_logger

    init_logger()
    # lets torchrun report the error of the rank that failed first
    handler = get_error_handler()
    handler.initialize()
    try:
        train(config)
    except Exception as error:
        final = is_mistake(error)
        silent = not config.debug.traceback
        if not (silent and (final or is_foreseen(error))):
            if silent and isinstance(error, RuntimeError) and told_by_another(PEER_SECONDS):
                return 1
            if silent and is_lost_peer(error):
                # without a file for torchrun's report, which is about the cause
                tell_lost_peer(error)
                return 1
            handler.record_exception(error)
            raise
        tell(str(error), final)
        error.__traceback__ = error.__cause__ = None
        error.__suppress_context__ = True
        handler.record_exception(error)  # the message alone
        return 2 if final else 1
    return 0


def train(config: Config) -> None:
    from matrixtitan.trainer import Trainer

    with Trainer(config) as trainer:
        trainer.train()


def is_foreseen(error: Exception) -> bool:
    """Whether the message is enough, although another try may succeed: a failed save or load, or a
    run that diverged."""
    from matrixtitan.checkpoint.errors import CheckpointError
    from matrixtitan.trainer import NonFiniteError

    return isinstance(error, (CheckpointError, NonFiniteError))


def leave(status: int) -> NoReturn:
    """End at once, without the interpreter's orderly exit.

    After a mistake or Ctrl-C a thread of the process group may still wait for a peer. C++ aborts a
    process that exits in order while such a thread runs, and prints its stack after our message.
    """
    for loader in multiprocessing.active_children():
        loader.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    status = main()
    if status != 0:
        leave(status)
