"""Properties of the orthogonalisation, for any shape and spectrum, both forms, batched or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from matrixtitan.optim import batching, cpu
from matrixtitan.optim.batching import batch_indices, batch_size, orthogonalize
from matrixtitan.optim.cpu.onednn import OneDnn
from matrixtitan.optim.cpu.strips import Strips, symmetric_product
from matrixtitan.optim.newton_schulz import choose, iterate, make_newton_schulz, orthogonalize_one
from matrixtitan.optim.products import WHOLE, Choice
from tests.lib.forced_form import forced_form
from tests.lib.references import assert_orthogonal
from tests.lib.references import orthogonalize as reference

sides = st.integers(min_value=1, max_value=40)
forms = st.sampled_from(["standard", "gram", "auto"])
seeds = st.integers(min_value=0, max_value=2**31)


def random_matrix(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(values: Tensor, cols: int, seed: int = 0) -> Tensor:
    """A (len(values), cols) matrix with these singular values."""
    rows = len(values)
    u = torch.linalg.qr(random_matrix(seed, rows, rows).double()).Q
    v = torch.linalg.qr(random_matrix(seed + 1, cols, cols).double()).Q[:, :rows]
    return (u @ torch.diag(values.double()) @ v.T).float()


@settings(deadline=None, max_examples=60)
@given(sides, sides, forms, seeds)
def test_matches_the_polynomials_of_the_singular_values(
    rows: int, cols: int, form: Any, seed: int
) -> None:
    matrix = random_matrix(seed, rows, cols)
    with forced_form(form):
        result = orthogonalize([matrix], make_newton_schulz(dtype="float32"))[0]
    assert result.shape == matrix.shape
    torch.testing.assert_close(result.double(), reference(matrix), atol=2e-5, rtol=0)


@settings(deadline=None, max_examples=40)
@given(sides, sides, forms, seeds)
def test_transpose_sign_and_size_pass_through(rows: int, cols: int, form: Any, seed: int) -> None:
    matrix, how = random_matrix(seed, rows, cols), make_newton_schulz(dtype="float32")
    with forced_form(form):
        result = orthogonalize_one(matrix, how)
        transposed = orthogonalize_one(matrix.mT.contiguous(), how).mT
        negated = orthogonalize_one(-3.0 * matrix, how)
    torch.testing.assert_close(transposed, result, atol=2e-5, rtol=0)
    torch.testing.assert_close(negated, -result, atol=2e-5, rtol=0)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=6), forms, seeds)
def test_a_list_gives_the_same_in_the_same_order(
    shapes: list[tuple[int, int]], form: Any, seed: int
) -> None:
    """Shapes repeat by construction, so some are batched; each result is still its own matrix's."""
    matrices = [random_matrix(seed + i, *shape) for i, shape in enumerate(shapes + shapes)]
    before = [matrix.clone() for matrix in matrices]
    how = make_newton_schulz(dtype="float32")
    with forced_form(form):
        for matrix, result in zip(matrices, orthogonalize(matrices, how), strict=True):
            torch.testing.assert_close(result, orthogonalize_one(matrix, how), atol=2e-5, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(matrices, before, strict=True)), (
        "an input was changed"
    )


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ([(24, 40)] * 5, [2, 2, 1]),
        ([(24, 40), (40, 24), (24, 40)], [2, 1]),
        ([(2, 24, 40)], [2]),
        ([(3, 24, 40)] * 2, [2, 2, 2]),
        ([(3, 24, 41)], [1, 1, 1]),
        ([(0, 24, 40)], [0]),
    ],
)
def test_batches_hold_no_more_than_the_limit(
    shapes: list[tuple[int, ...]], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "BATCH_ELEMENTS", 2 * 24 * 40 + 1)
    seen = []

    def noting(matrix: torch.Tensor, how: Any) -> torch.Tensor:
        seen.append(1 if matrix.ndim == 2 else matrix.size(0))
        return orthogonalize_one(matrix, how)

    monkeypatch.setattr(batching, "orthogonalize_one", noting)
    matrices = [torch.randn(shape) for shape in shapes]
    how = make_newton_schulz(dtype="float32")
    for matrix, result in zip(matrices, orthogonalize(matrices, how), strict=True):
        torch.testing.assert_close(result, orthogonalize_one(matrix, how), atol=2e-5, rtol=0)
    assert seen == sizes


def test_batch_indices_cut_where_batches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matrixtitan.optim.cpu.onednn.pays", lambda: False)
    monkeypatch.setattr(cpu, "BATCH_ELEMENTS", 4 * 64 * 64)
    device = torch.device("cpu")
    assert batch_indices([(64, 64)] * 5 + [(64, 65)], device) == [[0, 1, 2, 3], [4], [5]]
    assert batch_indices([(2, 64, 64)] * 3, device) == [[0, 1], [2]]
    assert batch_indices([(5, 64, 64)] * 2, device) == [[0], [1]]
    assert batch_indices([(0, 64, 64)], device) == [[0]]
    assert batch_size((128, 32), device) == 4
    monkeypatch.setattr("matrixtitan.optim.cpu.onednn.pays", lambda: True)
    monkeypatch.setattr(cpu, "BATCH_ELEMENTS", 1 << 30)
    assert batch_size((4096, 127), device) > 1
    assert batch_size((128, 4096), device) == 1, "oneDNN's product takes no batches"


@pytest.mark.parametrize(
    "coefficients", ["quintic", "polar_express", [(3.4445, -4.775, 2.0315)] * 3]
)
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(24, 24), (24, 96), (96, 24)])
def test_singular_values_land_near_one(
    coefficients: Any, form: Any, shape: tuple[int, int]
) -> None:
    rows = min(shape)
    matrix = with_spectrum(torch.logspace(0, -1, rows), max(shape))
    matrix = matrix if shape[0] == rows else matrix.mT
    steps = 5 if isinstance(coefficients, str) else 6
    with forced_form(form):
        result = orthogonalize_one(matrix, make_newton_schulz(coefficients, steps, dtype="float32"))
    assert_orthogonal(result, 0.65, 1.25)


def test_polar_express_is_closer_than_the_quintic_with_more_steps() -> None:
    matrix = with_spectrum(torch.logspace(0, -3, 32), 64)
    errors = []
    for name in ("quintic", "polar_express"):
        result = orthogonalize_one(matrix, make_newton_schulz(name, 8, dtype="float32"))
        errors.append((torch.linalg.svdvals(result) - 1).abs().max().item())
    assert errors[1] < 1e-3 < errors[0]


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("decay", [0.0, 2.0, 6.0])
@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
def test_the_restart_keeps_the_gram_form_stable_in_bfloat16(
    rank: int, decay: float, coefficients: str
) -> None:
    """Low-rank and decaying spectra. The Gram form without a restart is wrong by 1e2 and more."""
    values = torch.zeros(32)
    values[:rank] = torch.logspace(0, -decay, rank)
    matrix = with_spectrum(values, 128)
    how = make_newton_schulz(coefficients, dtype="bfloat16")
    with forced_form("gram"):
        gram = orthogonalize_one(matrix, how).float()
    with forced_form("standard"):
        standard = orthogonalize_one(matrix, how).float()
        exact = orthogonalize_one(matrix, make_newton_schulz(coefficients, dtype="float32"))
    assert torch.linalg.matrix_norm(gram, 2) < 1.5
    assert (gram - exact).norm() <= 2.0 * (standard - exact).norm() + 0.1


def test_without_its_restart_the_gram_form_fails_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: this is what it is for."""
    monkeypatch.setattr("matrixtitan.optim.newton_schulz.FIRST_RESTART", 5)
    values = torch.zeros(32)
    values[:4] = 1.0
    with forced_form("gram"):
        result = orthogonalize_one(with_spectrum(values, 128), make_newton_schulz(dtype="bfloat16"))
    assert not torch.linalg.matrix_norm(result.float(), 2) < 1.5


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 4), st.integers(1, 60), st.integers(1, 60), st.booleans(), seeds)
def test_symmetric_products_in_strips(
    depth: int, rows: int, inner: int, added: bool, seed: int
) -> None:
    x = random_matrix(seed, rows, inner)
    gram = x @ x.mT
    if added:
        product = symmetric_product(gram, gram, gram, depth=depth, beta=-2.0, alpha=0.5)
        expected = -2.0 * gram.double() + 0.5 * gram.double() @ gram.double()
    else:
        product = symmetric_product(None, x, x.mT, depth=depth)
        expected = gram.double()
    torch.testing.assert_close(
        product.double(), expected, atol=1e-5 * float(expected.abs().max()) + 1e-6, rtol=0
    )


def test_the_form_is_a_function_of_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matrixtitan.optim.cpu.onednn.pays", lambda: False)
    assert choose(torch.empty(512, 512)).form == "standard"
    assert choose(torch.empty(512, 2048)).form == "gram"
    strips = choose(torch.empty(512, 2048)).products
    assert isinstance(strips, Strips)
    assert strips.depth > 0
    whole = Choice("gram", WHOLE)
    assert choose(torch.empty(8, 512, 999)).products == WHOLE, "batches are not cut"
    meta = torch.empty(64, 640, device="meta", dtype=torch.bfloat16)
    assert choose(meta) == whole
    assert choose(torch.empty(4096, 4096, device="meta")).form == "standard"


def test_onednn_is_taken_for_large_float32_matrices_where_it_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("matrixtitan.optim.cpu.onednn.pays", lambda: True)
    assert choose(torch.empty(512, 2048)) == Choice("gram", OneDnn())
    for other in (
        torch.empty(16, 64),
        torch.empty(2, 512, 2048),
        torch.empty(512, 2048).bfloat16(),
    ):
        assert choose(other).products != OneDnn()


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN"
)
@pytest.mark.parametrize("shape", [(130, 130), (130, 391), (391, 130)])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_onednn_and_mkl_agree(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], form: Any
) -> None:
    """Both ways on any machine, whichever it takes by itself."""
    matrix = random_matrix(0, *shape)
    for pays in (True, False):
        monkeypatch.setattr("matrixtitan.optim.cpu.onednn.pays", lambda pays=pays: pays)
        with forced_form(form):
            result = orthogonalize_one(matrix, make_newton_schulz(dtype="float32"))
        torch.testing.assert_close(result.double(), reference(matrix), atol=4e-6, rtol=0)


@pytest.mark.parametrize("depths", [(2, 0), (0, 2), (1, 3), (3, 3)])
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("tall", [False, True])
def test_strips_in_the_whole_iteration(depths: tuple[int, int], form: Any, tall: bool) -> None:
    """Padded operands feed further strips; at 61 rows the strips are not equal."""
    matrix = random_matrix(1, 130, 61) if tall else random_matrix(1, 61, 130)
    choice = Choice(form, Strips(*depths))
    result = iterate(matrix.mT if tall else matrix, make_newton_schulz(), choice)
    result = result.mT if tall else result
    torch.testing.assert_close(result.double(), reference(matrix), atol=4e-6, rtol=0)


@pytest.mark.parametrize("shape", [(384, 128), (3, 96, 24)])
def test_the_gram_form_gives_results_in_the_layout_of_the_matrix(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """A transposed one is several times slower to add to a parameter."""
    monkeypatch.setattr("matrixtitan.optim.cpu.onednn.pays", lambda: False)
    with forced_form("gram"):
        result = orthogonalize_one(torch.randn(shape), make_newton_schulz())
    assert result.is_contiguous()


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(6, 9)
    for form in ("standard", "gram"):
        with forced_form(form):
            assert torch.equal(orthogonalize_one(zeros, make_newton_schulz()), zeros)


def test_a_short_list_of_coefficients_repeats_its_last() -> None:
    how = make_newton_schulz([(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)], 4)
    assert how.coefficients == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (4.0, 5.0, 6.0), (4.0, 5.0, 6.0))
