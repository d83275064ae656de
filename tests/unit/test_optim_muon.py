"""Muon: equal to torch.optim.Muon bitwise and to a float64 reference; scales, blocks, stacks."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from matrixtitan.optim import Muon
from matrixtitan.optim.muon import learning_rate_scale, momentum_update
from tests.lib import references
from tests.lib.forced_form import forced_form

SHAPES = [(8, 16), (16, 8), (12, 12), (96, 32), (33, 130), (64, 64)]


def gradients(shape: tuple[int, ...], steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def trajectory(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[Tensor]
) -> list[Tensor]:
    """The weights after each step."""
    weights = []
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        weights.append(param.detach().clone())
    return weights


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_muon_to_the_bit(scale: Any, nesterov: bool, weight_decay: float) -> None:
    for shape in SHAPES:
        grads = gradients(shape, 6)
        start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        common: dict[str, Any] = {"lr": 0.02, "weight_decay": weight_decay, "nesterov": nesterov}
        muon = Muon([ours], scale=scale, ns_dtype="bfloat16", batch=False, **common)
        with forced_form("standard"):
            got = trajectory(muon, ours, grads)
        expected = trajectory(
            torch.optim.Muon([theirs], adjust_lr_fn=scale, **common), theirs, grads
        )
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), shape


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_float32_iterations_follow_the_float64_reference(form: Any, nesterov: bool) -> None:
    for shape in SHAPES:
        grads = gradients(shape, 12)
        start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        param = nn.Parameter(start.clone())
        options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov}
        with forced_form(form):
            got = trajectory(Muon([param], ns_dtype="float32", **options), param, grads)
        scale = sqrt(max(1, shape[0] / shape[1]))
        expected = references.muon(start, grads, scale=scale, **options)
        assert (
            max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)) <= 1e-5
        ), shape


def test_every_slice_of_a_stack_is_a_matrix_of_its_own() -> None:
    stack, matrices = (
        nn.Parameter(torch.zeros(3, 16, 8)),
        [nn.Parameter(torch.zeros(16, 8)) for _ in range(3)],
    )
    grad = torch.randn(3, 16, 8)
    stack.grad = grad.clone()
    for matrix, slice_ in zip(matrices, grad, strict=True):
        matrix.grad = slice_.clone()
    Muon([stack], lr=0.1, scale="spectral").step()
    Muon(matrices, lr=0.1, scale="spectral", batch=False).step()
    torch.testing.assert_close(
        stack.detach(), torch.stack([m.detach() for m in matrices]), atol=1e-6, rtol=0
    )


def test_block_rows_orthogonalise_heads_apart_with_the_scale_of_the_block() -> None:
    whole, heads = nn.Parameter(torch.zeros(24, 16)), nn.Parameter(torch.zeros(4, 6, 16))
    grad = torch.randn(24, 16)
    whole.grad, heads.grad = grad.clone(), grad.view(4, 6, 16).clone()
    Muon([whole], lr=0.1, scale="match_rms_adamw", block_rows=6).step()
    Muon([heads], lr=0.1, scale="match_rms_adamw").step()
    assert torch.equal(whole.detach().view(4, 6, 16), heads.detach())
    references.assert_orthogonal(whole.detach()[:6] / (0.1 * 0.2 * 4), 0.6, 1.3)


def test_scales() -> None:
    assert learning_rate_scale("original", 8, 2) == 2.0
    assert learning_rate_scale("original", 2, 8) == 1.0
    assert learning_rate_scale("match_rms_adamw", 100, 25) == 2.0
    assert learning_rate_scale("spectral", 2, 8) == 0.5


def test_momentum_of_row_shards_is_that_of_the_whole() -> None:
    """The fsdp2 strategies update the momentum of their shards before they gather."""
    grad, buffer = torch.randn(9, 7), torch.randn(9, 7)
    parts = [
        momentum_update(g, b, 0.9, True)
        for g, b in zip(grad.split(4), buffer.clone().split(4), strict=True)
    ]
    assert torch.equal(torch.cat(parts), momentum_update(grad, buffer, 0.9, True))


def test_batching_changes_rounding_only() -> None:
    grads = gradients((16, 48), 4)
    results = []
    for batch in (True, False):
        params = [nn.Parameter(torch.zeros(16, 48)) for _ in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        Muon(params, lr=0.1, batch=batch).step()
        results.append(torch.stack([param.detach() for param in params]))
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)


def test_without_batching_a_matrix_does_not_depend_on_its_neighbours() -> None:
    alone, crowd = (
        nn.Parameter(torch.zeros(16, 48)),
        [nn.Parameter(torch.zeros(16, 48)) for _ in range(3)],
    )
    grads = gradients((16, 48), 3)
    alone.grad = grads[1].clone()
    for param, grad in zip(crowd, grads, strict=True):
        param.grad = grad.clone()
    Muon([alone], lr=0.1, batch=False).step()
    Muon(crowd, lr=0.1, batch=False).step()
    assert torch.equal(alone, crowd[1])


def test_parameters_without_a_gradient_or_without_rows_are_passed_over() -> None:
    idle, elsewhere, active = (nn.Parameter(torch.ones(n, 4)) for n in (4, 0, 4))
    elsewhere.grad, active.grad = torch.ones(0, 4), torch.randn(4, 4)
    group_without_any = {"params": [nn.Parameter(torch.ones(4, 4))]}
    optimizer = Muon([{"params": [idle, elsewhere, active]}, group_without_any], lr=0.1)
    optimizer.step()
    assert torch.equal(idle, torch.ones(4, 4))
    assert not torch.equal(active, torch.ones(4, 4))
    assert elsewhere not in optimizer.state
    assert idle not in optimizer.state


def test_step_returns_what_the_closure_returns() -> None:
    param = nn.Parameter(torch.ones(4, 4))

    def closure() -> float:
        param.grad = torch.ones(4, 4)
        return 3.5

    assert Muon([param]).step(closure) == 3.5


def test_state_dict_round_trip_continues_the_trajectory() -> None:
    grads = gradients((12, 20), 6)
    whole, half = nn.Parameter(torch.zeros(12, 20)), nn.Parameter(torch.zeros(12, 20))
    expected = trajectory(Muon([whole]), whole, grads)[-1]
    first = Muon([half])
    trajectory(first, half, grads[:3])
    resumed = Muon([half])
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(trajectory(resumed, half, grads[3:])[-1], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"momentum": 1.0}, "momentum"),
        ({"scale": "none"}, "'original', 'match_rms_adamw', 'spectral'"),
        ({"ns_steps": 0}, "ns_steps is 0"),
        ({"ns_coefficients": "cubic"}, "quintic"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ({"ns_dtype": "float16"}, "ns_dtype"),
        ({"block_rows": 3}, "block_rows 3 does not divide its 4 rows"),
        ({"block_rows": 0}, "block_rows is 0"),
        ({"block_rows": 2.0}, "block_rows is 2.0"),
        ({"block_rows": -2}, "block_rows is -2"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"ns_steps": 2.5}, "ns_steps is 2.5"),
        ({"ns_coefficients": None}, "ns_coefficients must hold triples .* it is None"),
        ({"ns_coefficients": []}, "ns_coefficients must hold triples"),
        ({"ns_coefficients": [(1, 2, 3)] * 3, "ns_steps": 2}, "holds 3 triples for ns_steps 2"),
        ({"ns_coefficients": [(1.0, 2.0, "x")]}, "ns_coefficients"),
        ({"ns_coefficients": [(float("nan"), 0, 0)]}, "ns_coefficients"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.zeros(4, 4))], **options)


def test_a_vector_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(4,\).*AdamW"):
        Muon([("norm.weight", nn.Parameter(torch.zeros(4)))])


def test_a_sparse_gradient_is_refused() -> None:
    param = nn.Parameter(torch.zeros(4, 4))
    param.grad = torch.eye(4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        Muon([param]).step()
