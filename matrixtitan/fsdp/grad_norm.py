"""Global gradient norm and clipping: the only communication between backward and the step.

One scalar is all-reduced, or none without a group. Holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements squared at once. On CPUs 2 MB in float64, which stay in a core's cache; on GPUs more,
for fewer kernels."""


@torch.no_grad()
def clip_grad_norm_(
    grads: Sequence[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Scale `grads` in place so that their global 2-norm is at most `max_norm`.

    `grads` are the tensors that this rank holds. Each gradient element is on one rank of `group`
    only. Where `grads` is empty, `device` says where the result lives; the default is the CPU. A
    `max_norm` of 0 or infinity only measures. Returns the norm before scaling, a float32 scalar
    that is equal on all ranks. A non-finite norm is returned and leaves the gradients untouched:
    the caller decides. ValueError for a `max_norm` that is negative or nan.

    Squares are summed in float64, because a float32 sum over 2e7 elements is off by 1e-3 on CPUs
    and squares of 1e20 or 1e-23 are out of float32's range. In float64 the printed norm does not
    depend on who holds which rows either. The sum goes by chunks to keep the float64 copies small.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; it must be 0 (only measure) or more")
    device = grads[0].device if grads else device or torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    size = CHUNK["cpu" if device.type == "cpu" else "cuda"]
    for grad in grads:
        for chunk in grad.flatten().split(size):
            total += torch.linalg.vector_norm(chunk, dtype=torch.float64) ** 2
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    result = norm.float()
    if max_norm > 0 and not isinf(max_norm):
        factor = (max_norm / norm).clamp(max=1.0)  # a norm of 0 gives 1
        factor = torch.where(result.isfinite(), factor, 1.0).float()
        for grad in grads:
            grad.mul_(factor)
    return result
