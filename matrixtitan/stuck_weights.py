"""A warning for weights that an update does not move, because their dtype rounds it away.

A bfloat16 weight has 8 bits of precision, so an update below 1/512 of the weight is rounded away.
At small learning rates most of an update can vanish, and the loss curve's first steps do not show
it. Stochastic rounding would keep the mean of the update, and is not done for two reasons. Its
random bits would have to be a function of parameter, step and row, or a resume on another number of
ranks would differ. And torch's AdamW rounds inside its own kernel. Next: `trainer.py`, which calls
this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from matrixtitan.config import Config
from matrixtitan.log import get_logger
from matrixtitan.strategies.base import DataParallel

logger = get_logger()

EVERY = 1000
"""Steps between two looks. A look needs a copy of this rank's weights during one update."""
LIMIT = 0.5
"""Share of weights that did not move, of those with a gradient, above which a run is warned."""


class StuckWeights:
    """Looks at the first step at the peak learning rate, and every EVERY steps after it.

    Never looks in float32.
    """

    def __init__(self, config: Config, strategy: DataParallel, first_step: int) -> None:
        self._dtype = config.training.dtype
        self._strategy = strategy
        self._first = max(first_step, config.lr_scheduler.warmup_steps, 1)

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Collective: wrap the optimizers' step in it. Gradients must still be there afterwards."""
        late = step - self._first
        if self._dtype == "float32" or late < 0 or late % EVERY:
            yield
            return
        params = [
            p.tensor for p in self._strategy.stepped_parameters() if p.tensor.grad is not None
        ]
        before = [_local(param).detach().clone() for param in params]
        yield
        counts = torch.zeros(2, dtype=torch.int64, device=self._device(params))
        for param, old in zip(params, before, strict=True):
            assert param.grad is not None
            pushed = _local(param.grad) != 0
            counts[0] += (pushed & (_local(param) == old)).sum()
            counts[1] += pushed.sum()
        dist.all_reduce(counts)
        stuck, pushed_in_all = counts.tolist()
        if stuck > LIMIT * pushed_in_all and dist.get_rank() == 0:
            logger.warning(
                "step %d: %.0f%% of the weights that have a gradient did not move: %s rounds the "
                'update away. Set training.dtype = "float32", or raise the learning rates',
                step,
                100 * stuck / pushed_in_all,
                self._dtype,
            )

    def _device(self, params: list[Tensor]) -> torch.device:
        """The device of the collective, also on a rank that steps no parameter."""
        if params:
            return params[0].device
        cuda = "nccl" in dist.get_backend_config()
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
