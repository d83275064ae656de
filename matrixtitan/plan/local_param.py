"""LocalParam: one parameter as this rank's optimizer and checkpoint see it, under every strategy.

Owns that description alone. `MatrixFSDP.local_parameters` and `strategies/` make it;
`optim/build.py` and `checkpoint/` read it. Next: `shard.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matrixtitan.plan.matrix_form import MatrixForm
from matrixtitan.plan.shard import Role

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LocalParam:
    """The rows of one parameter that this rank holds.

    `tensor` has shape (rows, *full_shape[1:]), and backward sets its `.grad`. Under fsdp2 it is a
    DTensor of the full shape. `start` is the index of its first row in the full parameter.
    Optimizers take scales from `full_shape` and `block_rows`, never from the local shape.
    """

    fqn: str
    tensor: Tensor
    full_shape: tuple[int, ...]
    role: Role
    block_rows: int
    start: int = 0
    trainable: bool = True
    form: MatrixForm = MatrixForm()
