"""Activation checkpointing: which activations are kept for backward, and which recomputed.

Owns the policies none, selective (every Nth block, or by operator) and full. They replace the
instance attribute `block.forward` and wrap no module, so parameter names, hooks and checkpoints of
weights do not change. Apply them before `torch.compile`, which then traces through them. Next file:
`parallelize.py`, the order of these steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from matrixtitan.config import ActivationCheckpointConfig
from models.base import LanguageModel

_ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def apply_activation_checkpointing(
    model: LanguageModel, config: ActivationCheckpointConfig
) -> None:
    """Replace `block.forward` of each block in `model.layers` as `config.mode` says.

    "none": no block is changed. "full": a block keeps only its input. "selective" with the option
    "op": a block keeps the results of attention and of every second matrix product, because these
    cost most to recompute. "selective" with a number N: every Nth block is treated as in "full",
    the others as in "none".
    """
    config.require("activation_checkpoint.")
    if config.mode == "none":
        return
    forward: Callable[..., Tensor] = _checkpointed_forward
    every = 1
    if config.mode == "selective":
        if config.selective_ac_option == "op":
            forward = _selectively_checkpointed_forward
        else:
            every = int(config.selective_ac_option)
    for index, block in enumerate(model.layers.values(), start=1):
        if "forward" in vars(block):
            raise RuntimeError(
                f"the forward of block {index} is already replaced: apply activation checkpointing "
                "once, and before torch.compile"
            )
        if index % every == 0:
            # Bound methods of one function, and not a closure per block, so that torch.compile
            # makes one graph for all blocks.
            block.forward = MethodType(forward, block)


def _checkpointed_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return checkpoint(partial(type(block).forward, block), *args, use_reentrant=False, **kwargs)


def _selectively_checkpointed_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return checkpoint(
        partial(type(block).forward, block),
        *args,
        use_reentrant=False,
        context_fn=_selective_contexts,
        **kwargs,
    )


def _selective_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_SaveCostlyOps())


class _SaveCostlyOps:
    """The policy of one forward: counts matrix products, separately in the recomputation."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # by whether this is the recomputation

    def __call__(
        self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        save = op in _ATTENTION_OPS
        if op is torch.ops.aten.mm.default:
            self._products[context.is_recompute] += 1
            save = self._products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
