"""Global gradient norm and clipping: the only communication between backward and the optimizer step.

It holds no state. One scalar is all-reduced, or none without a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def clip_grad_norm_(
    grads: Sequence[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Scale `grads` in place so that their global 2-norm is at most `max_norm`; return the norm before that.

    `grads` are the tensors that this rank holds, each gradient element on one rank of `group` only (may be empty,
    then `device` says where the result lives; the default is the CPU). `max_norm` of 0 or infinity only measures.
    Returns a float32 scalar, equal on all ranks. A non-finite norm is returned as it is and leaves the gradients
    untouched: the caller decides. ValueError for a negative `max_norm`.

    Squares are summed in float64 on the CPU: a float32 sum over 2e7 elements is off by 1e-3 there, and in float64 the
    printed norm does not depend on who holds which rows. A GPU, which sums in a tree, would make a float64 copy of
    each gradient for that: there a gradient's own norm is float32, and their sum float64.
    """
    if not max_norm >= 0:
        raise ValueError(f"training.max_norm is {max_norm}; it must be 0 (only measure) or more")
    device = grads[0].device if grads else device or torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    for grad in grads:
        total += torch.linalg.vector_norm(grad, dtype=dtype).double() ** 2
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if max_norm > 0 and not isinf(max_norm):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(norm.isfinite(), factor, 1.0).float()
        for grad in grads:
            grad.mul_(factor)
    return norm.float()
