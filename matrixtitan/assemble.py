"""From a config to what is trained: the model, its strategy with this rank's weights, its optimizers.

Owns the order of building. Trainer and benchmark both build here. Loads nothing and trains nothing. Next file:
`parallelize.py`, where the strategy is chosen.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from matrixtitan.config import Config
from matrixtitan.mesh import World
from matrixtitan.optim.build import Optimizers
from matrixtitan.parallelize import dtype_of, parallelize
from matrixtitan.strategies.base import DataParallel
from models import build_model
from models.llama import Llama


class Assembled(NamedTuple):
    """`model` is the bare module; train through `strategy.model`, and close `strategy` at the end."""

    model: Llama
    strategy: DataParallel
    optimizers: Optimizers


def assemble(config: Config, vocab_size: int, world: World) -> Assembled:
    """Build on all ranks together. Weights have their initial values, those of `debug.seed`."""
    with torch.device("meta"):  # shapes only: each rank allocates no more than its own part
        model = build_model(
            config.model.name,
            config.model.flavor,
            vocab_size=vocab_size,
            max_seq_len=config.training.seq_len,
            tie_embeddings=config.model.tie_embeddings,
        ).to(dtype_of(config.training.dtype))

    def init_rows(fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor) -> None:
        model.init_rows(fqn, full_shape, start, out, config.debug.seed)

    strategy = parallelize(model, config, world.mesh, world.device)
    with ExitStack() as on_error:
        on_error.callback(strategy.close)
        strategy.materialize(init_rows)
        model.init_buffers(world.device)
        optimizers = strategy.build_optimizers(config.optimizer)
        on_error.pop_all()
    return Assembled(model, strategy, optimizers)
