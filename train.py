"""Train a model: load the config, run the Trainer, tear down. Read `matrixtitan/trainer.py` next."""

from __future__ import annotations

import sys

from matrixtitan.config import Config, ConfigError, load_config


def main() -> int:
    try:
        # before torch is imported: a mistake is answered at once
        config = load_config(sys.argv[1:])
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2

    from torch.distributed.elastic.multiprocessing.errors import record

    from matrixtitan.log import init_logger

    init_logger()
    try:
        record(train)(
            config
        )  # torchrun ends with the error of the rank that failed first, not of any
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def train(config: Config) -> None:
    from matrixtitan.trainer import Trainer

    with Trainer(config) as trainer:
        trainer.train()


if __name__ == "__main__":
    sys.exit(main())
