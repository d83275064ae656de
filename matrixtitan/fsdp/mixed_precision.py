"""Mixed precision: the dtypes of compute, of the sum of gradients and of outputs.

Owns the policy, and the cast of a module's inputs and outputs. It never casts weights or gradients:
`unit.py` does, when it gathers and reduces them. Next: `hooks.py`, which casts around modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from matrixtitan.fsdp.nested import map_tensors


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes besides the stored one, which parameters have when `fully_shard` is called."""

    param_dtype: torch.dtype | None = None
    """Dtype that weights are sent and used in; floating inputs of units are cast to it.

    None: the stored dtype, and no cast of inputs.
    """
    reduce_dtype: torch.dtype | None = None
    """Dtype that gradients are summed in. None: the dtype of compute."""
    output_dtype: torch.dtype | None = None
    """Dtype that the model's floating outputs are cast to. None: no cast."""


def cast_floating(tree: Any, dtype: torch.dtype | None) -> Any:
    """The same structure with its floating tensors in `dtype`; `tree` itself where that is None."""
    if dtype is None:
        return tree
    return map_tensors(
        tree, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )
