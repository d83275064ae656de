"""Train a model: load the config, run the Trainer, tear down. Next: `matrixtitan/trainer.py`."""

from __future__ import annotations

import atexit
import gc
import signal
import sys

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
        # As after a run without an error (`World.__exit__`): no communication was under way, so no
        # thread of the process group waits for a peer.
        atexit.register(gc.collect)
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


if __name__ == "__main__":
    sys.exit(main())
