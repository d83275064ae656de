"""An optimizer that normalises its update steps alike for any positive factor of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from matrixtitan.fsdp.grad_norm import clip_grad_norm_
from matrixtitan.optim import SOAP, Muon, Shampoo, newton_schulz
from matrixtitan.optim.cpu.onednn import OneDnn
from matrixtitan.optim.cpu.strips import Strips
from matrixtitan.optim.newton_schulz import iterate, make_newton_schulz, normalize
from matrixtitan.optim.products import WHOLE, Choice, Products
from tests.lib.forced_form import forced_form

EXPONENTS = st.integers(min_value=-99, max_value=99)  # 2^99 is 6e29
FACTORS = (1e-30, 1e-20, 1e-7, 3.0, 1e10, 1e19, 1e30)
LAYOUTS = ("matrix", "tall", "stack", "batch", "heads")
FORMS = ("auto", "standard", "gram")


@pytest.fixture(params=[False, True], ids=["plain division where it works", "always scaled"])
def _both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs always scale; CPUs only where the norm needs it."""
    if request.param:
        monkeypatch.setattr(newton_schulz, "SAFE_NORMS", (0.0, 0.0))


def gradients(layout: str, rows: int, cols: int, seed: int) -> list[Tensor]:
    """Multiples of 1/64, so that no element is so small that 2^-99 of it is rounded."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "matrix": [(rows, cols)],
        "tall": [(cols + rows, rows)],
        "stack": [(3, rows, cols)],
        "batch": [(rows, cols)] * 3,
        "heads": [(3 * rows, cols)],
    }
    return [(torch.randn(shape, generator=generator) * 64).round() / 64 for shape in shapes[layout]]


def first_updates(
    layout: str, rows: int, grads: Sequence[Tensor], form: str = "auto", **options: Any
) -> list[Tensor]:
    """The parameters after one step of rate 1 from zeros."""
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    block_rows = rows if layout == "heads" else None
    with forced_form(form):
        Muon(params, lr=1.0, block_rows=block_rows, **options).step()
    return [param.detach() for param in params]


@pytest.mark.usefixtures("_both_paths")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_muon_is_bitwise_identical_for_powers_of_two(layout: str, form: str) -> None:
    @settings(deadline=None, max_examples=15)
    @given(
        st.integers(1, 24),
        st.integers(1, 24),
        EXPONENTS,
        st.integers(0, 2**31),
        st.sampled_from(["float32", "bfloat16"]),
        st.booleans(),
    )
    def check(
        rows: int, cols: int, exponent: int, seed: int, ns_dtype: str, bfloat16: bool
    ) -> None:
        grads = gradients(layout, rows, cols, seed)
        if bfloat16:
            grads = [grad.bfloat16() for grad in grads]
        options = {"form": form, "ns_dtype": ns_dtype}
        expected = first_updates(layout, rows, grads, **options)
        scaled = [grad * 2.0**exponent for grad in grads]
        for got, want in zip(first_updates(layout, rows, scaled, **options), expected, strict=True):
            assert torch.equal(got, want)

    check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("factor", FACTORS)
def test_muon_is_equal_within_rounding_for_any_factor(
    layout: str, form: str, factor: float
) -> None:
    """Rounding of the scaled gradient, 6e-8 of it, is multiplied by at most 3.4445^5, 485."""
    grads = gradients(layout, 12, 20, 0)
    options = {"form": form, "ns_dtype": "float32"}
    expected = first_updates(layout, 12, grads, **options)
    scaled = [grad * factor for grad in grads]
    for got, want in zip(first_updates(layout, 12, scaled, **options), expected, strict=True):
        torch.testing.assert_close(got, want, atol=3e-5, rtol=0)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("factor", [2.0**-99, 2.0**99])
@pytest.mark.parametrize("products", [WHOLE, Strips(2, 1), Strips(3, 3), OneDnn()])
def test_every_product_sees_the_same_matrix(form: Any, factor: float, products: Products) -> None:
    if isinstance(products, OneDnn) and not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    matrix, how = gradients("matrix", 61, 130, 0)[0], make_newton_schulz()
    choice = Choice(form, products)
    assert torch.equal(iterate(matrix * factor, how, choice), iterate(matrix, how, choice))


@pytest.mark.usefixtures("_both_paths")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalize_takes_every_finite_size(dtype: torch.dtype) -> None:
    """From float32's smallest subnormal number to its largest number."""
    matrix = torch.ones(4, 9, dtype=dtype)
    for size in (torch.finfo(dtype).smallest_normal * 2.0**-7, torch.finfo(dtype).max):
        torch.testing.assert_close(normalize(matrix * size), matrix / 6)
    torch.testing.assert_close(normalize(matrix, 2.0), matrix / 12)
    for bad in (float("inf"), float("nan")):
        matrix[1, 1] = bad
        assert normalize(matrix)[1, 1].isnan(), "the caller must see it"


@pytest.mark.usefixtures("_both_paths")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_zero_gradients_give_zero_updates(layout: str, form: str, factor: float) -> None:
    """Also where a slice of a stack, a head or a matrix of a batch is zero and others are not."""
    options = {"form": form, "ns_dtype": "float32"}
    grads = [grad * factor for grad in gradients(layout, 12, 20, 0)]
    blocks = [grad.view(-1, 12, 20) if layout != "tall" else grad[None] for grad in grads]
    before = first_updates(layout, 12, grads, **options)
    if layout == "batch":
        grads[1].zero_()
    elif layout in ("stack", "heads"):
        blocks[0][1].zero_()
    else:
        grads[0].zero_()
    after = first_updates(layout, 12, grads, **options)
    zeros = 0
    for grad, old, new in zip(grads, before, after, strict=True):
        shape = (1, *grad.shape) if layout == "tall" else (-1, 12, 20)
        for g, o, n in zip(grad.view(shape), old.view(shape), new.view(shape), strict=True):
            zeros += not g.any()
            assert torch.equal(n, torch.zeros_like(n) if not g.any() else o)
    assert zeros == 1


def test_a_clipped_gradient_takes_the_same_step() -> None:
    """A norm of 5e7 clipped to 1, or clipped to 1e-6: far below published code's floor of norms."""
    steps = []
    for size, max_norm in ((1.0, 0.0), (5e7, 1.0), (1.0, 1e-6), (1e-28, 1e-29), (1e28, 1e-6)):
        grads = [grad * size / 50 for grad in gradients("batch", 12, 20, 0)]
        clip_grad_norm_(grads, max_norm, None)
        steps.append(torch.stack(first_updates("batch", 12, grads, ns_dtype="float32")))
    for step in steps[1:]:
        torch.testing.assert_close(step, steps[0], atol=3e-5, rtol=0)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_to_a_tenth_at_any_size(size: float, dtype: torch.dtype) -> None:
    grads = [torch.full((16,), size, dtype=dtype), torch.full((3, 3), size, dtype=dtype)]
    norm = clip_grad_norm_(grads, size / 2, None)
    torch.testing.assert_close(norm, torch.tensor(5 * size), rtol=4e-3, atol=0)
    after = clip_grad_norm_(grads, 0.0, None)
    torch.testing.assert_close(after, norm / 10, rtol=4e-3, atol=0)


def test_shampoo_keeps_the_grafted_norm() -> None:
    """Gradients of 1e-23 are far under epsilon, but not under a floor in the ratio of the norms."""
    grad = gradients("matrix", 12, 20, 0)[0]
    param = nn.Parameter(torch.zeros(12, 20))
    param.grad = grad * 1e-23
    options: dict[str, Any] = {"betas": (0.0, 0.99), "start_preconditioning_step": 1}
    Shampoo([param], lr=1.0, graft=("adam", 0.99, 1e-8), **options).step()
    torch.testing.assert_close(param.norm() * 1e15, grad.norm(), rtol=1e-4, atol=0)


def test_soap_normalizes_updates_of_any_size() -> None:
    grad = gradients("matrix", 12, 20, 0)[0]
    param = nn.Parameter(torch.zeros(12, 20))
    optimizer = SOAP([param], lr=1.0, normalize_grads=True, correct_bias=False, weight_decay=0.0)
    for _ in range(2):  # the first builds the bases
        param.grad = grad * 1e-30
        optimizer.step()
    torch.testing.assert_close(param.square().mean().sqrt(), torch.tensor(1.0))
