"""The output unit: final norm, output matrix and cross-entropy, without the full logits in memory.

At a 128k vocabulary the logits of one batch need more memory than the model's own activations.
Tokens therefore go through in chunks. A chunk's logits give its losses and, where gradients are
wanted, its share of the two gradients at once; then the logits are freed. Backward only multiplies
by the incoming scalar, so the weight may be freed after forward and no product is computed twice.
Knows nothing of the model's body; any family can use it. Read `llama.py` next.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100

# Rows of the output matrix whose gradient is computed at a time, where that gradient is computed in
# a narrower dtype than it is summed in.
_VOCAB_SLICE = 16384


class OutputHead(nn.Module):
    """Hidden states to summed cross-entropy, or to logits.

    With `tied_to` there is no output matrix here. The embedding's weight stays registered in the
    embedding alone, and forward looks it up there. The lookup is in forward, not in the
    constructor, because a sharding runtime replaces the attribute before each forward.
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        norm_eps: float,
        tied_to: nn.Embedding | None = None,
        chunk_tokens: int = 1024,
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        if tied_to is None:
            self.output = nn.Linear(dim, vocab_size, bias=False)
        # In a tuple, so that nn.Module does not register the embedding a second time.
        self._tied_to = (tied_to,)
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """hidden (B, T, C), labels (B, T) int64 -> float32 scalar, the sum of the token losses.

        Labels equal to -100 count as nothing. Without labels: logits (B, T, V).
        """
        embedding = self._tied_to[0]
        weight = self.output.weight if embedding is None else embedding.weight
        normed = self.norm(hidden)
        if labels is None:
            return F.linear(normed, weight)
        return linear_cross_entropy(
            normed.flatten(0, -2), weight, labels.flatten(), self.chunk_tokens
        )


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int = 1024
) -> Tensor:
    """Sum of the cross-entropies of `hidden @ weight.T` against `labels`, chunk by chunk.

    hidden (N, C) and weight (V, C) of one dtype, labels (N,) int64; returns a float32 scalar. The
    largest tensor that this function allocates is (chunk_tokens, V) float32, or the weight's
    gradient. Softmax, loss and the sum of the weight's gradient over chunks are float32 whatever
    the inputs' dtype.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    device_type = hidden.device.type
    # Autocast would cast only some of the products below, so all inputs are cast here.
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    recording = torch.is_grad_enabled()
    hidden_grad, weight_grad = hidden.requires_grad, weight.requires_grad
    loss, _, _ = _linear_cross_entropy(
        hidden, weight, labels, chunk_tokens, recording and hidden_grad, recording and weight_grad
    )
    return loss


# A custom operator is one opaque node to torch.compile. If torch.compile traced through it, its
# partitioner could keep every chunk's logits for backward, and the memory saved here would be lost.
@torch.library.custom_op("matrixtitan::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the gradients for an incoming gradient of 1.

    The gradients are (N, C) in hidden's dtype and (V, C) float32; a gradient that is not asked for
    is (0,).
    """
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    grad_weight = torch.zeros(
        weight.shape if weight_grad else 0, dtype=torch.float32, device=weight.device
    )
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        logits = (hidden[rows] @ weight.T).float()  # (n, V)
        loss += _softmax_minus_target_(logits, labels[rows])
        if not (hidden_grad or weight_grad):
            continue
        grad_logits = logits.to(hidden.dtype)
        del logits  # before the products, so that only one copy of the chunk is in memory
        if hidden_grad:
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
        if weight_grad:
            _add_product_(grad_weight, grad_logits.T, hidden[rows])
    return loss, grad_hidden, grad_weight


def _softmax_minus_target_(logits: Tensor, labels: Tensor) -> Tensor:
    """The chunk's summed loss. Overwrites logits (n, V) with their gradient, zero where ignored."""
    counted = labels != IGNORE_INDEX
    target = labels.where(counted, 0).unsqueeze(1)  # (n, 1)
    highest = logits.amax(dim=1, keepdim=True)  # (n, 1), subtracted so that exp cannot overflow
    target_logit = logits.gather(1, target) - highest
    total = logits.sub_(highest).exp_().sum(dim=1, keepdim=True)
    losses = (total.log() - target_logit).squeeze(1)
    logits.div_(total)
    logits.scatter_add_(1, target, torch.full_like(total, -1.0))
    logits.mul_(counted.unsqueeze(1))
    return losses.where(counted, 0.0).sum()


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (V, C) float32 += left (V, n) @ right (n, C), without a temporary of total's size."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
        return
    for start in range(0, total.shape[0], _VOCAB_SLICE):
        rows = slice(start, start + _VOCAB_SLICE)
        total[rows] += left[rows] @ right


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = torch.empty((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    grad_weight = torch.empty(
        weight.shape if weight_grad else 0, dtype=torch.float32, device=weight.device
    )
    return loss, grad_hidden, grad_weight


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, grad_hidden, grad_weight = output
    ctx.mark_non_differentiable(grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.weight_dtype = inputs[1].dtype


def _scale_gradients(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_loss is None:
        return (None,) * 6
    grad_hidden, grad_weight = ctx.saved_tensors
    hidden_needed, weight_needed = ctx.needs_input_grad[:2]
    scaled_hidden = (grad_hidden * grad_loss).to(grad_hidden.dtype) if hidden_needed else None
    scaled_weight = None
    if weight_needed:  # written in the weight's dtype at once: no second float32 copy
        scaled_weight = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
        torch.mul(grad_weight, grad_loss, out=scaled_weight)
    return scaled_hidden, scaled_weight, None, None, None, None


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)
