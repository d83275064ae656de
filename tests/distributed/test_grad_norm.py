"""The global norm: one scalar all-reduce, and the same bits for any split of the gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

from matrixtitan.fsdp.grad_norm import clip_grad_norm_
from tests.lib.distributed import run_distributed


def whole_gradient() -> torch.Tensor:
    return torch.randn(24, 7, generator=torch.Generator().manual_seed(3))


def clip_my_rows(bounds: list[int]) -> tuple[float, torch.Tensor]:
    """Clip rows [bounds[rank], bounds[rank + 1]); (norm, clipped rows). Counts the collectives."""
    rank, calls = dist.get_rank(), []
    rows = whole_gradient()[bounds[rank] : bounds[rank + 1]].clone()
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, **options: object) -> object:
        calls.append(tensor.numel())
        return original(tensor, **options)  # type: ignore[arg-type]

    dist.all_reduce = counting
    try:
        norm = clip_grad_norm_([rows] if len(rows) else [], 2.0, dist.group.WORLD)
    finally:
        dist.all_reduce = original
    assert calls == [1], "one all-reduce of one scalar"
    return norm.item(), rows


def test_any_split_gives_the_same_norm_and_gradients() -> None:
    expected = whole_gradient()
    norm = clip_grad_norm_([expected], 2.0, None).item()
    for bounds in ([0, 24], [0, 5, 24], [0, 24, 24, 24], [0, 1, 9, 20, 24]):
        results = run_distributed(clip_my_rows, len(bounds) - 1, bounds)
        assert [result[0] for result in results] == [norm] * len(results), (
            "to the bit, on every rank"
        )
        assert torch.equal(torch.cat([result[1] for result in results]), expected)
