"""What a checkpoint holds: tensors, by parameter name and full shape, never by rank.

`model.{fqn}` and `optimizer.{fqn}.{state}` come from the ranks that hold them, and
`train_state.{counter}` from rank 0. `random.{rank}.{generator}` is the exception: it belongs to a
rank, and is restored if the world size is the same. There are only tensors, so that nothing is
pickled. Next: `checkpointer.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from matrixtitan.checkpoint.errors import CheckpointError
from matrixtitan.fsdp.row_segment import RowSegment, local_rows
from matrixtitan.optim.build import StateTensor
from matrixtitan.plan.local_param import LocalParam

Tensors = dict[str, Tensor]
"""By key: a whole tensor, or a RowSegment."""


@dataclass
class TrainState:
    """What a resumed run continues from. `window` is the index of the next window to read."""

    step: int = 0
    window: int = 0
    tokens_seen: int = 0
    skipped_steps: int = 0


def model_tensors(params: Iterable[LocalParam]) -> Tensors:
    """The rows of the weights that are on this rank, sharing their memory."""
    found = {}
    for param in params:
        rows = local_rows(param.tensor, param.full_shape, param.start)
        if rows is not None:
            found[f"model.{param.fqn}"] = rows
    return found


def optimizer_tensors(states: Iterable[StateTensor], params: Iterable[LocalParam]) -> Tensors:
    """The optimizer state that is on this rank, sharing its memory.

    `params` are the parameters that the optimizers step.
    """
    by_fqn = {param.fqn: param for param in params}
    found = {}
    for state in states:
        param = by_fqn[state.fqn]
        full_shape = tuple(state.tensor.shape)
        if state.per_row:
            full_shape = (param.full_shape[0], *full_shape[1:])
        rows = local_rows(state.tensor, full_shape, param.start if state.per_row else 0)
        if rows is not None:
            found[f"optimizer.{state.fqn}.{state.name}"] = rows
    return found


def train_state_tensors(state: TrainState) -> Tensors:
    return {f"train_state.{name}": torch.tensor(value) for name, value in asdict(state).items()}


def train_state_from(tensors: Tensors) -> TrainState:
    return TrainState(
        **{field.name: int(tensors[f"train_state.{field.name}"]) for field in fields(TrainState)}
    )


def random_tensors(rank: int) -> Tensors:
    """The state of this rank's generators: torch's on the CPU and on its GPU, and Python's."""
    version, words, gauss = random.getstate()
    found = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found["torch_cuda"] = torch.cuda.get_rng_state()
    return {f"random.{rank}.{name}": value for name, value in found.items()}


def restore_random(tensors: Tensors, rank: int) -> None:
    """Set this rank's generators to what `random_tensors` recorded."""
    torch.set_rng_state(tensors[f"random.{rank}.torch_cpu"])
    version, *words = tensors[f"random.{rank}.python"].tolist()
    gauss = tensors[f"random.{rank}.python_gauss"].item()
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    cuda = tensors.get(f"random.{rank}.torch_cuda")
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def cast_for_export(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Copies in `dtype`, for an export. Tensors of whole numbers stay as they are."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        if isinstance(tensor, RowSegment):
            return RowSegment(tensor.rows.to(dtype), tensor.shape, tensor.start)
        return tensor.to(dtype)

    return {key: cast(tensor) for key, tensor in tensors.items()}


def require_finite(tensors: Tensors) -> None:
    """CheckpointError, naming the first weight or optimizer state that holds an inf or nan.

    The tensors of random generators are exempt: in them, nan stands for "none".
    """
    for key, tensor in tensors.items():
        rows = tensor.rows if isinstance(tensor, RowSegment) else tensor
        if key.startswith("random.") or not rows.is_floating_point() or not rows.numel():
            continue
        # nan if any element is nan; makes no copy
        largest = torch.linalg.vector_norm(rows, math.inf)
        if not largest.isfinite():
            raise CheckpointError(
                f"{key} holds {largest.item()} in {rows.dtype}: lower the learning rate, or "
                "choose a wider checkpoint.export_dtype for an export"
            )


def nested(tensors: Tensors) -> dict[str, Tensors]:
    """{"model": {fqn: tensor}, ...}, which DCP flattens to the same keys again.

    DCP's own converters then return nested tables.
    """
    sections: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        section, name = key.split(".", 1)
        sections.setdefault(section, {})[name] = tensor
    return sections
