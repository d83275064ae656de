"""From parameters and a config to groups, optimizers and state, also on ranks without any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from matrixtitan.config import OptimizerConfig, OptimizerGroup
from matrixtitan.optim import SOAP, Muon, Shampoo
from matrixtitan.optim.build import Optimizers, build_optimizers, check_patterns
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.rules import RULES

CONFIG = OptimizerConfig(lr=0.02, weight_decay=0.1, tail_lr=0.003, tail_weight_decay=0.05)


def refreshing(name: str, **options: Any) -> OptimizerConfig:
    """CONFIG with the rule `name`, and with `options` where it has them."""
    rule = RULES[name]()
    own = {key: value for key, value in options.items() if hasattr(rule, key)}
    return replace(CONFIG, name=name, rule=replace(rule, **own))


NAMES = pytest.mark.parametrize("name", ["muon", "shampoo", "soap", "adamw"])


def local(
    fqn: str, *shape: int, rows: int | None = None, role: Any = None, **more: Any
) -> LocalParam:
    """A parameter of the full `shape` of which `rows` are here; vectors and embeddings are tail."""
    role = role or ("tail" if len(shape) < 2 or "embed" in fqn else "matrix")
    held = (shape[0] if rows is None else rows, *shape[1:])
    more.setdefault("block_rows", shape[0] if role == "matrix" and len(shape) == 2 else 1)
    return LocalParam(fqn, nn.Parameter(torch.ones(held)), shape, role, **more)


def model() -> list[LocalParam]:
    return [
        local("embed.weight", 20, 8, rows=7, start=5),
        local("layers.0.wq.weight", 8, 8),
        local("layers.0.w1.weight", 16, 8),
        local("layers.0.experts", 4, 8, 8, rows=2, start=2),
        local("layers.0.norm.weight", 8),
    ]


def give_gradients(params: list[LocalParam], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.tensor.grad = torch.randn(param.tensor.shape, generator=generator)


def by_parameter(optimizers: Optimizers) -> dict[str, dict[str, Any]]:
    return {name: group for group in optimizers.param_groups for name in group["param_names"]}


def test_roles_rates_and_decay() -> None:
    groups = by_parameter(build_optimizers(model(), CONFIG))
    assert {name: (g["name"], g["lr"], g["weight_decay"]) for name, g in groups.items()} == {
        "embed.weight": ("tail", 0.003, 0.05),
        "layers.0.wq.weight": ("matrix", 0.02, 0.1),
        "layers.0.w1.weight": ("matrix", 0.02, 0.1),
        "layers.0.experts": ("matrix", 0.02, 0.1),
        "layers.0.norm.weight": ("tail", 0.003, 0.0),
    }
    assert all(group["initial_lr"] == group["lr"] for group in groups.values())


@NAMES
def test_every_rule_trains_everything(name: Any) -> None:
    params = model()
    optimizers = build_optimizers(params, refreshing(name, precondition_frequency=1))
    classes = {"muon": Muon, "shampoo": Shampoo, "soap": SOAP, "adamw": torch.optim.AdamW}
    assert [type(o) for o in optimizers.optimizers] == [classes[name], torch.optim.AdamW]
    for seed in range(3):
        give_gradients(params, seed)
        optimizers.step()
    assert all(bool((p.tensor != 1).any()) and bool(p.tensor.isfinite().all()) for p in params)
    optimizers.zero_grad()
    assert all(param.tensor.grad is None for param in params)


@NAMES
def test_options_arrive(name: Any) -> None:
    config = refreshing(
        name,
        betas=(0.7, 0.8),
        eps=1e-5,
        momentum=0.5,
        nesterov=False,
        ns_steps=3,
        ns_coefficients="polar_express",
        scale="spectral",
        precondition_frequency=7,
        max_precond_dim=9,
        start_preconditioning_step=3,
        shampoo_beta=0.6,
        graft_beta=0.4,
        graft_eps=1e-3,
        stagger=False,
    )
    config = replace(config, tail_betas=(0.1, 0.2), tail_eps=1e-4)
    groups = by_parameter(build_optimizers(model(), config))
    expected: dict[str, dict[str, Any]] = {
        "muon": {
            "momentum": 0.5,
            "nesterov": False,
            "ns_steps": 3,
            "ns_coefficients": "polar_express",
            "scale": "spectral",
        },
        "adamw": {"betas": (0.7, 0.8), "eps": 1e-5},
        "soap": {
            "betas": (0.7, 0.8),
            "eps": 1e-5,
            "shampoo_beta": 0.6,
            "precondition_frequency": 7,
            "max_precond_dim": 9,
            "stagger": False,
        },
        "shampoo": {
            "betas": (0.7, 0.8),
            "eps": 1e-5,
            "precondition_frequency": 7,
            "max_precond_dim": 9,
            "start_preconditioning_step": 3,
            "graft": ("adam", 0.4, 1e-3),
            "stagger": False,
        },
    }
    matrix, tail = groups["layers.0.wq.weight"], groups["embed.weight"]
    assert {key: matrix[key] for key in expected[name]} == expected[name]
    assert tail["betas"] == (0.1, 0.2)
    assert tail["eps"] == 1e-4


def test_patterns_make_groups_of_their_own() -> None:
    config = replace(
        CONFIG,
        groups=(
            OptimizerGroup(pattern="*.wq.*", lr=0.5),
            OptimizerGroup(pattern="*.norm.*", weight_decay=0.7),
            OptimizerGroup(pattern="layers.*", lr=0.25),
        ),
    )
    groups = by_parameter(build_optimizers(model(), config))
    found = {name: (g["pattern"], g["lr"], g["weight_decay"]) for name, g in groups.items()}
    assert found == {
        "embed.weight": ("", 0.003, 0.05),
        "layers.0.wq.weight": ("*.wq.*", 0.5, 0.1),
        "layers.0.w1.weight": ("layers.*", 0.25, 0.1),
        "layers.0.experts": ("layers.*", 0.25, 0.1),
        "layers.0.norm.weight": ("*.norm.*", 0.003, 0.7),
    }


def test_a_pattern_that_matches_nothing_names_its_neighbours() -> None:
    config = replace(CONFIG, groups=(OptimizerGroup(pattern="layers.0.wk.weight", lr=1.0),))
    names = [param.fqn for param in model()]
    with pytest.raises(
        ValueError, match=r"optimizer\.groups: .*'layers\.0\.wk\.weight'.*layers\.0\.wq\.weight"
    ):
        check_patterns(names, config)
    check_patterns([*names, "layers.0.wk.weight"], config)


def test_heads_are_blocks_of_the_matrix_and_whole_matrices_are_not() -> None:
    params = [
        local("wq", 8, 6, block_rows=2),
        local("wo", 8, 6),
        local("wk", 8, 6, rows=4, block_rows=2),
    ]
    groups = by_parameter(build_optimizers(params, CONFIG))
    assert {name: group["block_rows"] for name, group in groups.items()} == {
        "wq": 2,
        "wo": None,
        "wk": 2,
    }
    with pytest.raises(ValueError, match=r"block_rows is 2, but SOAP does not cut"):
        build_optimizers(params, replace(CONFIG, name="soap"))


def test_a_cut_matrix_is_a_wrong_state() -> None:
    with pytest.raises(RuntimeError, match="wo: 4 of 8 rows"):
        build_optimizers([local("wo", 8, 6, rows=4)], CONFIG)


@pytest.mark.parametrize(
    "params",
    [
        [],
        [local("wq", 8, 8, rows=0)],
        [local("frozen", 8, 8, trainable=False)],
    ],
    ids=["none", "no rows", "frozen"],
)
def test_a_rank_that_steps_nothing(params: list[LocalParam]) -> None:
    optimizers = build_optimizers(params, CONFIG)
    optimizers.step()
    optimizers.zero_grad()
    optimizers.allocate_state()
    assert optimizers.param_groups == []
    assert optimizers.state_tensors() == []


EXPECTED_STATE = {
    "muon": {"momentum_buffer"},
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "soap": {"step", "exp_avg", "exp_avg_sq"}
    | {f"{side}_{kind}" for side in ("left", "right") for kind in ("factor", "basis")},
    "shampoo": {"step", "exp_avg", "graft_avg_sq"}
    | {f"{side}_{kind}" for side in ("left", "right") for kind in ("factor", "root")},
}


@NAMES
def test_state_is_allocated_as_a_first_step_would(name: Any) -> None:
    config = refreshing(name, precondition_frequency=2, stagger=False)
    lazy, early = model(), model()
    lazy_optimizers, early_optimizers = (build_optimizers(p, config) for p in (lazy, early))
    assert lazy_optimizers.state_tensors() == []
    early_optimizers.allocate_state()
    addresses = [state.tensor.data_ptr() for state in early_optimizers.state_tensors()]
    for seed in range(3):
        for params, optimizers in ((lazy, lazy_optimizers), (early, early_optimizers)):
            give_gradients(params, seed)
            optimizers.step()
    early_optimizers.allocate_state()
    found = early_optimizers.state_tensors()
    assert [state.tensor.data_ptr() for state in found] == addresses, "never moved"
    assert {state.name for state in found if "wq" in state.fqn} == EXPECTED_STATE[name]
    for ours, theirs in zip(found, lazy_optimizers.state_tensors(), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours.per_row == theirs.per_row
        assert torch.equal(ours.tensor, theirs.tensor), ours[:2]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(lazy, early, strict=True))


@NAMES
def test_state_follows_rows_or_is_whole(name: Any) -> None:
    optimizers = build_optimizers(model(), replace(CONFIG, name=name))
    optimizers.allocate_state()
    states = {(s.fqn, s.name): s for s in optimizers.state_tensors()}
    for (fqn, kind), state in states.items():
        if kind == "step":
            assert not state.per_row
            assert state.tensor.ndim == 0
        elif "factor" in kind or "root" in kind or "basis" in kind:
            assert state.per_row == ("experts" in fqn), (
                "a stack's factors are cut between its slices"
            )
        else:
            assert state.per_row
    rows = {s.tensor.size(0) for s in states.values() if s.per_row and "experts" in s.fqn}
    assert rows == {2}
    assert states[("embed.weight", "exp_avg")].tensor.shape == (7, 8)


@NAMES
def test_state_loaded_in_place_continues_the_trajectory(name: Any) -> None:
    config = refreshing(name, precondition_frequency=2)
    whole, half = model(), model()
    straight, first = build_optimizers(whole, config), build_optimizers(half, config)
    for seed in range(3):
        for params, optimizers in ((whole, straight), (half, first)):
            give_gradients(params, seed)
            optimizers.step()
    resumed = build_optimizers(half, config)
    resumed.allocate_state()
    saved = {(s.fqn, s.name): s.tensor.clone() for s in first.state_tensors()}
    for state in resumed.state_tensors():
        state.tensor.copy_(saved.pop((state.fqn, state.name)))
    assert not saved
    for seed in range(3, 6):
        for params, optimizers in ((whole, straight), (half, resumed)):
            give_gradients(params, seed)
            optimizers.step()
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(whole, half, strict=True))


def adamw_update(tensors: list[Tensor], grads: list[list[Tensor]]) -> Tensor:
    params = [
        LocalParam(f"embed.{i}", nn.Parameter(t.clone()), tuple(t.shape), "tail", 1)
        for i, t in enumerate(tensors)
    ]
    optimizers = build_optimizers(params, CONFIG)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.tensor.grad = grad.clone()
        optimizers.step()
    return torch.cat([param.tensor.detach() for param in params])


@pytest.mark.parametrize("columns", [1, 13, 64])
@pytest.mark.parametrize("cuts", [[1, 36], [5, 11, 21], [36, 1], [7] * 5 + [2]])
def test_the_tail_is_the_same_to_the_bit_however_its_rows_are_cut(
    cuts: list[int], columns: int
) -> None:
    weight = torch.randn(37, columns)
    grads = [torch.randn(37, columns) for _ in range(5)]
    whole = adamw_update([weight], [[grad] for grad in grads])
    cut = adamw_update(list(weight.split(cuts)), [list(grad.split(cuts)) for grad in grads])
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("columns", [13, 64])
def test_both_of_torchs_kernels_are_taken(columns: int) -> None:
    """Fused only where rounding cannot depend on the cuts: rows of 13 do not fill its vectors."""
    group = build_optimizers([local("embed", 9, columns)], CONFIG).param_groups[0]
    assert (group["fused"], group["foreach"]) == (columns == 64, columns != 64)
