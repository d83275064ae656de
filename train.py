"""Train a model: load the config, run the Trainer, tear down. Next: `matrixtitan/trainer.py`."""

from __future__ import annotations

import sys

from matrixtitan.config import Config, ConfigError, load_config
from matrixtitan.config.errors import report
from matrixtitan.mistakes import is_mistake, tell, told_by_another

PEER_SECONDS = 5.0
"""How long a rank may take from a mistake to its message. An error of another rank in that time,
such as a broken connection, is a consequence."""


def main() -> int:
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
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        final = is_mistake(error)
        silent = not config.debug.traceback
        if not (silent and (final or is_foreseen(error))):
            if silent and isinstance(error, RuntimeError) and told_by_another(PEER_SECONDS):
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


if __name__ == "__main__":
    sys.exit(main())
