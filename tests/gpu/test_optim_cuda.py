"""Optimizers on a GPU: bfloat16 iterations bitwise, both forms' errors, state and clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from matrixtitan.fsdp.grad_norm import clip_grad_norm_
from matrixtitan.optim import SOAP, Muon, Shampoo
from matrixtitan.optim.newton_schulz import make_newton_schulz, orthogonalize_one
from tests.lib.forced_form import forced_form
from tests.lib.references import assert_orthogonal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("shape", [(256, 256), (512, 128), (128, 1024)])
def test_equals_torch_muon_to_the_bit(shape: tuple[int, int]) -> None:
    start = torch.randn(shape, device="cuda")
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    first = Muon([ours], lr=0.02, weight_decay=0.1, batch=False)
    second = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    for _ in range(4):
        grad = torch.randn(shape, device="cuda")
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        with forced_form("standard"):
            first.step()
        second.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(512, 512), (512, 2048), (8, 128, 512)])
def test_auto_is_bfloat16_and_near_orthogonal(form: Any, shape: tuple[int, ...]) -> None:
    with forced_form(form):
        result = orthogonalize_one(torch.randn(shape, device="cuda"), make_newton_schulz())
    assert result.dtype == torch.bfloat16
    for matrix in result.reshape(-1, *shape[-2:]) if shape[-1] > shape[-2] else ():
        assert_orthogonal(matrix.float().cpu(), 0.6, 1.3)
    # a square one has singular values near 0, which five steps do not lift
    norms = torch.linalg.matrix_norm(result.float(), 2)
    assert norms.min() > 0.9
    assert norms.max() < 1.3


@pytest.mark.parametrize("optimizer_class", [SOAP, Shampoo])
def test_soap_and_shampoo_follow_their_cpu_trajectories(
    optimizer_class: type[SOAP | Shampoo],
) -> None:
    weights = {}
    for device in ("cpu", "cuda"):
        param = nn.Parameter(torch.zeros(24, 24, device=device))
        optimizer = optimizer_class([param], precondition_frequency=2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            param.grad = torch.randn(24, 24, generator=generator).to(device)
            optimizer.step()
        weights[device] = param.detach().cpu()
        assert optimizer.state[param]["step"].device.type == "cpu", (
            "reading it must not wait for the GPU"
        )
        assert optimizer.state[param]["exp_avg"].device.type == device
    torch.testing.assert_close(weights["cpu"], weights["cuda"], atol=1e-4, rtol=0)


def test_clipping_on_the_device() -> None:
    grads = [
        torch.full((1000,), 2.0, device="cuda", dtype=torch.bfloat16),
        torch.ones(3, device="cuda"),
    ]
    norm = clip_grad_norm_(grads, 1.0, None)
    assert norm.device.type == "cuda"
    torch.testing.assert_close(norm.cpu(), torch.tensor((4000.0 + 3.0) ** 0.5))
