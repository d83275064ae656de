"""Muon cuts fused, transposed and four-dimensional parameters into their matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from matrixtitan.optim import Muon
from matrixtitan.plan.matrix_form import MatrixForm


def stepped(
    weight: Tensor, grad: Tensor, form: MatrixForm, block_rows: int | None = None
) -> Tensor:
    param = nn.Parameter(weight.clone())
    muon = Muon(
        [{"params": [param], "form": form, "block_rows": block_rows}], lr=0.1, weight_decay=0.1
    )
    for _ in range(2):
        param.grad = grad.clone()
        muon.step()
    return param.detach()


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def test_a_transposed_matrix_steps_as_its_transpose() -> None:
    weight, grad = pair(6, 20)
    got = stepped(weight, grad, MatrixForm(transposed=True))
    expected = stepped(weight.mT.contiguous(), grad.mT.contiguous(), MatrixForm()).mT
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 8), (3, 24, 8)])
def test_fused_rows_step_as_matrices_of_their_own(shape: tuple[int, ...]) -> None:
    weight, grad = pair(*shape)
    rows = (16, 4, 4)
    got = stepped(weight, grad, MatrixForm(rows=rows))
    parts = zip(weight.split(rows, -2), grad.split(rows, -2), strict=True)
    expected = torch.cat([stepped(w, g, MatrixForm()) for w, g in parts], -2)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_fused_and_transposed_rows_with_heads() -> None:
    weight, grad = pair(8, 24)
    rows = (16, 4, 4)
    got = stepped(weight, grad, MatrixForm(True, rows), block_rows=4)
    expected = stepped(weight.mT.contiguous(), grad.mT.contiguous(), MatrixForm(), 4).mT
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_convolution_is_one_matrix() -> None:
    weight, grad = pair(6, 4, 3, 2)
    got = stepped(weight, grad, MatrixForm())
    expected = stepped(weight.flatten(1), grad.flatten(1), MatrixForm()).reshape(weight.shape)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_rows_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive and add up to the 24 out features"):
        stepped(*pair(24, 8), MatrixForm(rows=(16, 4)))
