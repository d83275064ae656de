"""SOAP and Shampoo: float64 references, long sides, stacks, refresh, failed decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from matrixtitan.optim import SOAP, Muon, Shampoo, shampoo, soap
from matrixtitan.optim.matrix_roots import (
    DecompositionError,
    eigenbasis,
    inverse_root,
    symmetric_eigen,
)
from tests.lib import references

OPTIMIZERS = pytest.mark.parametrize("optimizer_class", [SOAP, Shampoo])


def gradients(shape: tuple[int, ...], steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def trajectory(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[Tensor]
) -> list[Tensor]:
    weights = []
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        weights.append(param.detach().clone())
    return weights


def largest_difference(got: list[Tensor], expected: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("frequency", [1, 3])
def test_soap_follows_the_float64_reference(frequency: int) -> None:
    grads, start = gradients((14, 14), 12), torch.randn(14, 14)
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    param = nn.Parameter(start.clone())
    got = trajectory(SOAP([param], precondition_frequency=frequency, **options), param, grads)
    assert (
        largest_difference(got, references.soap(start, grads, frequency=frequency, **options))
        <= 1e-5
    )
    assert torch.equal(got[0], start), "the first step builds the bases only"


@pytest.mark.parametrize("shape", [(14, 14), (8, 20), (20, 8)])
def test_shampoo_follows_the_float64_reference(shape: tuple[int, int]) -> None:
    grads, start = gradients(shape, 12), torch.randn(shape)
    options: dict[str, Any] = {
        "lr": 0.01,
        "betas": (0.9, 0.99),
        "eps": 1e-3,
        "weight_decay": 0.1,
    }
    param = nn.Parameter(start.clone())
    optimizer = Shampoo(
        [param],
        precondition_frequency=1,
        start_preconditioning_step=1,
        graft=("adam", 0.99, 1e-8),
        **options,
    )
    got = trajectory(optimizer, param, grads)
    assert (
        largest_difference(got, references.shampoo(start, grads, graft=(0.99, 1e-8), **options))
        <= 1e-5
    )


@pytest.mark.parametrize(
    "kind", [("adam", 0.99, 1e-8), ("rmsprop", 0.99, 1e-8), ("adagrad", 1e-8), ("sgd",)]
)
def test_blocks_of_a_long_side_are_matrices_of_their_own(kind: tuple[Any, ...]) -> None:
    grads = gradients((10, 14), 5)
    whole = nn.Parameter(torch.zeros(10, 14))
    blocks = [nn.Parameter(torch.zeros(r, c)) for r in (8, 2) for c in (8, 6)]
    options: dict[str, Any] = {
        "max_precond_dim": 8,
        "graft": kind,
        "precondition_frequency": 2,
    }
    together, apart = Shampoo([whole], **options), Shampoo(blocks, **options)
    for grad in grads:
        whole.grad = grad
        for block, part in zip(
            blocks, [p for rows in grad.split(8) for p in rows.split(8, dim=1)], strict=True
        ):
            block.grad = part.clone()
        together.step()
        apart.step()
    rebuilt = torch.cat(
        [torch.cat([p.detach() for p in row], dim=1) for row in (blocks[:2], blocks[2:])]
    )
    torch.testing.assert_close(whole.detach(), rebuilt, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "graft", [("adam", 0.9, 1e-8), ("rmsprop", 0.9, 1e-8), ("adagrad", 1e-8), ("sgd",)]
)
def test_grafting_gives_the_norm_of_the_grafted_method(graft: tuple[Any, ...]) -> None:
    norms = []
    for start in (1, 100):  # preconditioned at once, or the grafted method alone
        param = nn.Parameter(torch.zeros(6, 9))
        optimizer = Shampoo(
            [param], graft=graft, start_preconditioning_step=start, precondition_frequency=1
        )
        norms.append([w.norm() for w in trajectory(optimizer, param, gradients((6, 9), 1))])
    torch.testing.assert_close(norms[0], norms[1])


@OPTIMIZERS
def test_slices_of_a_stack_are_stepped_apart(optimizer_class: type[SOAP | Shampoo]) -> None:
    grads = gradients((3, 8, 8), 6)
    stack, slices = (
        nn.Parameter(torch.zeros(3, 8, 8)),
        [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)],
    )
    together, apart = (optimizer_class(p, precondition_frequency=2) for p in ([stack], slices))
    for grad in grads:
        stack.grad = grad
        for param, part in zip(slices, grad, strict=True):
            param.grad = part.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(
        stack.detach(), torch.stack([p.detach() for p in slices]), atol=1e-5, rtol=0
    )


def test_soap_leaves_a_long_side_alone() -> None:
    param = nn.Parameter(torch.zeros(6, 40))
    optimizer = SOAP([param], max_precond_dim=12)
    trajectory(optimizer, param, gradients((6, 40), 2))
    assert {name for name in optimizer.state[param] if "basis" in name} == {"left_basis"}


def counted(monkeypatch: pytest.MonkeyPatch, optimizer_class: type[SOAP | Shampoo]) -> list[int]:
    """Counts decompositions from now on: one entry per refresh of a side."""
    calls: list[int] = []
    module, name = (
        (soap, "refine_eigenbasis") if optimizer_class is SOAP else (shampoo, "inverse_root")
    )
    original: Callable[..., Any] = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(1) or original(*args))
    return calls


@OPTIMIZERS
def test_staggered_refreshes_spread_over_the_steps(
    monkeypatch: pytest.MonkeyPatch, optimizer_class: type[SOAP | Shampoo]
) -> None:
    calls = counted(monkeypatch, optimizer_class)
    per_step: dict[bool, list[int]] = {}
    for stagger in (False, True):
        params = [(f"layers.{i}.w", nn.Parameter(torch.zeros(4, 4))) for i in range(32)]
        optimizer = optimizer_class(params, precondition_frequency=4, stagger=stagger)
        per_step[stagger] = []
        for grad in gradients((4, 4), 21):
            before = len(calls)
            for _, param in params:
                param.grad = grad.clone()
            optimizer.step()
            per_step[stagger].append(len(calls) - before)
    steady = {stagger: counts[9:17] for stagger, counts in per_step.items()}
    assert sum(steady[False]) == sum(steady[True]) == 2 * 2 * 32, (
        "each side of each parameter, twice in 8 steps"
    )
    assert max(steady[False]) == 64
    assert max(steady[True]) <= 32


@OPTIMIZERS
def test_the_stagger_of_a_parameter_depends_on_its_name_alone(
    optimizer_class: type[SOAP | Shampoo],
) -> None:
    grads = gradients((8, 8), 8)
    results = []
    for neighbours in (0, 3):
        params = [(f"other.{i}", nn.Parameter(torch.zeros(8, 8))) for i in range(neighbours)]
        param = nn.Parameter(torch.zeros(8, 8))
        params.append(("mine", param))
        optimizer = optimizer_class(params, precondition_frequency=3, stagger=True)
        results.append(trajectory(optimizer, param, grads)[-1])
    assert torch.equal(*results)


@OPTIMIZERS
def test_a_failed_decomposition_keeps_the_old_basis_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    optimizer_class: type[SOAP | Shampoo],
) -> None:
    param = nn.Parameter(torch.zeros(6, 6))
    optimizer = optimizer_class([("w", param)], precondition_frequency=1, max_failures=3)
    grads = gradients((6, 6), 8)
    trajectory(optimizer, param, grads[:3])
    kept = {
        name: t.clone()
        for name, t in optimizer.state[param].items()
        if "basis" in name or "root" in name
    }
    assert kept

    def fail(*_: Any) -> None:
        raise DecompositionError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(
            *(
                (soap, "refine_eigenbasis")
                if optimizer_class is SOAP
                else (shampoo, "inverse_root")
            ),
            fail,
        )
        trajectory(optimizer, param, grads[3:5])
        assert optimizer.failures.total == 4, "two sides in two steps"
        assert all(torch.equal(optimizer.state[param][name], old) for name, old in kept.items())
        assert "w (left)" in caplog.text
        assert "2 in a row" in caplog.text
    trajectory(optimizer, param, grads[5:6])  # works again: the row ends
    with monkeypatch.context() as patch:
        patch.setattr(
            *(
                (soap, "refine_eigenbasis")
                if optimizer_class is SOAP
                else (shampoo, "inverse_root")
            ),
            fail,
        )
        trajectory(optimizer, param, grads[6:8])
        with pytest.raises(RuntimeError, match=r"w \(left\): 3 decompositions failed in a row"):
            trajectory(optimizer, param, grads[:1])


def test_eigen_work_is_tried_again_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = torch.linalg.eigh, []

    def picky(matrix: Tensor) -> Any:
        seen.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return original(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", picky)
    values, vectors = symmetric_eigen(torch.diag(torch.tensor([3.0, 1.0])))
    assert seen == [torch.float32, torch.float64]
    assert values.dtype == vectors.dtype == torch.float32
    assert values.tolist() == [1.0, 3.0]


def test_a_factor_that_is_not_finite_cannot_be_decomposed() -> None:
    with pytest.raises(DecompositionError, match="non-finite"):
        symmetric_eigen(torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]]))


def test_inverse_root_shifts_negative_eigenvalues_to_zero() -> None:
    matrix = torch.diag(torch.tensor([-1.0, 0.0, 15.0]))
    result = inverse_root(matrix, 4, 1e-4)
    expected = torch.tensor([1e-4, 1 + 1e-4, 16 + 1e-4]) ** -0.25
    torch.testing.assert_close(result.diagonal(), expected, rtol=1e-3, atol=0)


def test_eigenbasis_is_orthonormal_and_descending() -> None:
    factor = torch.randn(9, 30)
    factor = factor @ factor.mT
    basis = eigenbasis(factor)
    references.assert_orthogonal(basis, 1 - 1e-5, 1 + 1e-5)
    diagonal = (basis.mT @ factor @ basis).diagonal()
    assert torch.equal(diagonal, diagonal.sort(descending=True).values)


@OPTIMIZERS
def test_allocated_state_steps_like_no_state(optimizer_class: type[SOAP | Shampoo]) -> None:
    grads = gradients((8, 8), 5)
    results = []
    for allocate in (False, True):
        param = nn.Parameter(torch.zeros(8, 8))
        optimizer = optimizer_class([param], precondition_frequency=2)
        if allocate:
            optimizer.allocate_state()
            before = {name: t.data_ptr() for name, t in optimizer.state[param].items()}
        results.append(trajectory(optimizer, param, grads)[-1])
        if allocate:
            optimizer.allocate_state()
            assert before == {name: t.data_ptr() for name, t in optimizer.state[param].items()}, (
                "state is replaced"
            )
    assert torch.equal(*results)


@OPTIMIZERS
def test_state_dict_round_trip_continues_the_trajectory(
    optimizer_class: type[SOAP | Shampoo],
) -> None:
    grads = gradients((10, 10), 8)
    whole, half = nn.Parameter(torch.zeros(10, 10)), nn.Parameter(torch.zeros(10, 10))
    expected = trajectory(optimizer_class([whole], precondition_frequency=3), whole, grads)[-1]
    first = optimizer_class([half], precondition_frequency=3)
    trajectory(first, half, grads[:4])
    resumed = optimizer_class([half], precondition_frequency=3)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(trajectory(resumed, half, grads[4:])[-1], expected)


@OPTIMIZERS
def test_state_stays_float32_beside_bfloat16_parameters(
    optimizer_class: type[SOAP | Shampoo],
) -> None:
    param = nn.Parameter(torch.zeros(8, 12, dtype=torch.bfloat16))
    first, grads = optimizer_class([param]), [grad.bfloat16() for grad in gradients((8, 12), 4)]
    trajectory(first, param, grads[:2])
    resumed = optimizer_class([param])
    resumed.load_state_dict(first.state_dict())
    for name, value in first.state[param].items():
        assert torch.equal(resumed.state[param][name], value), name
        assert resumed.state[param][name].dtype == value.dtype, name
    trajectory(resumed, param, grads[2:])


@pytest.mark.parametrize(
    ("optimizer_class", "options", "message"),
    [
        (SOAP, {"betas": (0.9, 1.0)}, "betas"),
        (SOAP, {"betas": (0.9,)}, "betas is .* two"),
        (Shampoo, {"betas": (0.9,)}, "betas is .* two"),
        (SOAP, {"precondition_frequency": 0}, "precondition_frequency"),
        (SOAP, {"shampoo_beta": 1.0}, "shampoo_beta"),
        (Shampoo, {"graft": ("lion", 0.9)}, "graft is"),
        (Shampoo, {"graft": ("adam", 1.5, 1e-8)}, r"graft_beta is 1\.5"),
        (Shampoo, {"graft": ("rmsprop", 0.9, -1e-8)}, r"graft_eps is -1e-08"),
        (Shampoo, {"start_preconditioning_step": 2.5}, r"start_preconditioning_step is 2\.5"),
        (Shampoo, {"betas": (1.0, 0.9)}, r"betas holds 1\.0 first"),
        (Shampoo, {"max_precond_dim": 0}, "max_precond_dim"),
        (Shampoo, {"eps": -1.0}, "eps"),
        (Shampoo, {"precondition_frequency": 2.5}, r"precondition_frequency is 2\.5"),
        (Shampoo, {"max_failures": 0}, "max_failures is 0"),
        (SOAP, {"max_precond_dim": float("inf")}, "max_precond_dim is inf"),
    ],
)
def test_wrong_options_are_named(
    optimizer_class: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_class([nn.Parameter(torch.zeros(4, 4))], **options)


def test_another_optimizers_state_is_refused() -> None:
    soap, muon = (kind([nn.Parameter(torch.zeros(4, 4))]) for kind in (SOAP, Muon))
    with pytest.raises(ValueError, match=r"not Muon's: its parameter groups lack .*momentum"):
        muon.load_state_dict(soap.state_dict())


@pytest.mark.parametrize("optimizer_class", [SOAP, Shampoo, Muon])
def test_state_of_other_shapes_is_refused_and_changes_nothing(optimizer_class: Any) -> None:
    small, large = (nn.Parameter(torch.ones(rows, 4)) for rows in (4, 6))
    first, second = (optimizer_class([("layers.0.w", param)]) for param in (small, large))
    for optimizer, param in ((first, small), (second, large)):
        param.grad = torch.ones_like(param)
        optimizer.step()
    before = {name: value.clone() for name, value in second.state[large].items()}
    with pytest.raises(ValueError, match=r"layers\.0\.w holds .* shape \(6, 4\) needs .*, 6, "):
        second.load_state_dict(first.state_dict())
    for name, value in second.state[large].items():
        assert torch.equal(value, before[name]), name


def test_state_made_under_another_longest_side_is_loaded_with_it() -> None:
    """The options come with the state, so it fits them."""
    params = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
    first, second = (
        SOAP([param], max_precond_dim=longest)
        for param, longest in zip(params, (5, 9), strict=True)
    )
    params[0].grad = torch.ones(6, 4)
    first.step()
    second.load_state_dict(first.state_dict())
    assert second.state[params[1]].keys() == first.state[params[0]].keys()
