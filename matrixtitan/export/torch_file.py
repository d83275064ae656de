"""A model in one torch.save file: {"model": {fqn: tensor}, "config": ...}.

The layout is that of DCP's `dcp_to_torch` for our checkpoints, without the optimizer's state and
with the config, since tensors alone do not tell a model's number of heads. DCP's converters are not
used: they hold the optimizer's state too, and `torch_to_dcp` runs any code that a file brings.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matrixtitan.export.weights import Weights, checked, model_of
from matrixtitan.in_place import in_place


def open_torch(path: Path) -> Weights:
    try:
        # mapped: a tensor's bytes are read when they are used
        content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{path} cannot be read as a torch.save file of plain tensors; a file that needs any "
            "other class is not read, since that could run code"
        ) from error
    if not _is_model_file(content):
        raise ValueError(
            f'{path} must hold {{"model": {{name: tensor}}, "config": ...}}, as '
            "`matrixtitan convert_checkpoint --to torch` writes it: tensors alone do not tell a "
            "model's number of heads"
        )
    tensors = content["model"]
    shapes = {fqn: tensor.shape for fqn, tensor in tensors.items()}
    dtypes = {fqn: tensor.dtype for fqn, tensor in tensors.items()}
    model = model_of(content["config"], shapes, path)
    return checked(Weights(model, dtypes, tensors.__getitem__), shapes, path)


def _is_model_file(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and {"model", "config"} <= content.keys()
        and isinstance(content["model"], dict)
        and all(isinstance(value, Tensor) for value in content["model"].values())
    )


def write_torch(weights: Weights, output: Path) -> None:
    """Write the file, for torch.load with weights_only. Holds the whole model in memory."""
    content = {
        "model": {fqn: weights.read(fqn) for fqn in weights.shapes},
        "config": weights.model.to_config(),
    }
    with in_place(output) as written:
        try:
            torch.save(content, written)
        except RuntimeError as error:  # raised on a full disk, for example
            raise OSError(f"{output} could not be written: {error}") from error
