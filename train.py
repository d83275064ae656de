"""Train a model: load the config, run the Trainer, tear down. Read `matrixtitan/trainer.py` next."""

from __future__ import annotations

import sys

from matrixtitan.config import ConfigError, load_config


def main() -> int:
    try:
        # before torch is imported: a mistake is answered at once
        config = load_config(sys.argv[1:])
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2

    from matrixtitan.log import init_logger
    from matrixtitan.trainer import Trainer

    init_logger()
    try:
        with Trainer(config) as trainer:
            trainer.train()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
