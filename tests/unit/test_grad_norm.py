"""Gradient norm and clipping without a process group."""

from __future__ import annotations

import pytest
import torch

from matrixtitan.fsdp.grad_norm import clip_grad_norm_


def test_equals_torch_within_rounding() -> None:
    grads = [torch.randn(7, 5), torch.randn(11), torch.randn(2, 3, 4)]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(params, 1.5)
    torch.testing.assert_close(clip_grad_norm_(grads, 1.5, None), expected)
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(grad, param.grad)


@pytest.mark.parametrize("max_norm", [0.0, float("inf"), 100.0])
def test_nothing_is_changed_where_nothing_is_clipped(max_norm: float) -> None:
    grad = torch.tensor([3.0, 4.0])
    norm = clip_grad_norm_([grad], max_norm, None)
    assert norm.item() == 5.0
    assert norm.dtype == torch.float32
    assert grad.tolist() == [3.0, 4.0]


def test_no_gradients() -> None:
    assert clip_grad_norm_([], 1.0, None).item() == 0.0
    assert clip_grad_norm_([torch.zeros(0, 4)], 1.0, None).item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_norm_is_returned_and_the_gradients_stay(bad: float) -> None:
    grads = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
    assert not clip_grad_norm_(grads, 1.0, None).isfinite()
    assert grads[1].item() == 2.0
    assert grads[0][0].item() == 1.0


def test_many_elements_are_summed_exactly() -> None:
    """A float32 sum over so many is off by 1e-3 on the CPU."""
    grad = torch.full((1 << 24,), 0.1)
    expected = 0.1 * 4096
    assert abs(clip_grad_norm_([grad], 0, None).item() / expected - 1) < 1e-6


def test_bfloat16_gradients() -> None:
    grad = torch.full((1000,), 2.0, dtype=torch.bfloat16)
    norm = clip_grad_norm_([grad], 1.0, None)
    torch.testing.assert_close(norm, torch.tensor(2.0 * 1000**0.5))
    assert grad.dtype == torch.bfloat16
    assert abs(grad.float().norm().item() - 1) < 1e-2


def test_a_negative_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^max_norm is -1"):
        clip_grad_norm_([torch.ones(1)], -1.0, None)
