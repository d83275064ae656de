"""Activation checkpointing: which results of a block's forward are kept for backward, and which are computed again.

Owns the policies none, selective (every Nth block, or by operator) and full. It replaces the instance attribute
`block.forward` and wraps no module, so parameter names, hooks and checkpoints of weights never see it. Applied before
`torch.compile`, which then traces through it. Next file: `parallelize.py`, the order of these steps.
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

_ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def apply_activation_checkpointing(model: nn.Module, config: ActivationCheckpointConfig) -> None:
    """Replace `block.forward` in `model.layers` (a ModuleDict or ModuleList) as `config.mode` says.

    "none": nothing. "full": a block keeps its input alone. "selective" with the option "op": a block
    keeps attention's results and every second matrix product's, the ones that cost most to repeat;
    with a number N: every Nth block as "full", the others not at all.
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
    for index, block in enumerate(_blocks(model), start=1):
        if "forward" in vars(block):
            raise RuntimeError(
                f"the forward of block {index} is already replaced: apply activation checkpointing "
                "once, and before torch.compile"
            )
        if index % every == 0:
            # A bound method of one shared function, not a closure per block: torch.compile then
            # makes one graph for all blocks.
            block.forward = MethodType(forward, block)


def _blocks(model: nn.Module) -> list[nn.Module]:
    layers = model.layers
    if isinstance(layers, nn.ModuleDict):
        return list(layers.values())
    if isinstance(layers, nn.ModuleList):
        return list(layers)
    raise ValueError(f"model.layers is a {type(layers).__name__}, not a ModuleDict or ModuleList")


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
    """The policy of one call: it counts matrix products, in forward and again in recomputation."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # by whether it is the recomputation

    def __call__(
        self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        save = op in _ATTENTION_OPS
        if op is torch.ops.aten.mm.default:
            self._products[context.is_recompute] += 1
            save = self._products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
