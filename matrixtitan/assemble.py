"""From a config to a model that can be trained: the strategy with this rank's weights, optimizers.

Owns the order of building; the trainer and the benchmark both call it. Loads nothing and trains
nothing. Next file: `parallelize.py`, where the strategy is chosen.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor

from matrixtitan.config import Config
from matrixtitan.mesh import World
from matrixtitan.optim.build import Optimizers
from matrixtitan.parallelize import dtype_of, meta_model, parallelize
from matrixtitan.strategies.base import DataParallel
from models.base import LanguageModel


class Assembled(NamedTuple):
    """Train through `strategy.model`: `model` is the module inside. Close `strategy` at the end."""

    model: LanguageModel
    strategy: DataParallel
    optimizers: Optimizers


def assemble(config: Config, vocab_size: int, world: World) -> Assembled:
    """Collective. Builds the model with the initial weights that follow from `debug.seed`."""
    # on the meta device, so that each rank then allocates no more than its own part
    model = meta_model(config, vocab_size).to(dtype_of(config.training.dtype))

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
