"""Shampoo: a matrix preconditioner on each side of the gradient. https://arxiv.org/abs/1802.09568

Owns the optimizer class. Bias-corrected factors, grafting and blocks for long sides follow
https://arxiv.org/abs/2309.06497. Never communicates. Next: `matrix_roots.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matrixtitan.optim.base import MatrixOptimizer, ParamGroup, named_params
from matrixtitan.optim.matrix_roots import DecompositionError, inverse_root
from matrixtitan.optim.newton_schulz import normalize
from matrixtitan.optim.refresh import FailureCount, refresh_offset
from matrixtitan.rules.shampoo import ShampooRule, Tile, tiles

INVERSE_ROOT = 4
"""2 x the number of sides: the preconditioner is L^(-1/4) G R^(-1/4)."""


class Shampoo(MatrixOptimizer):
    """Shampoo over matrices (R, C) and stacks of them (E, R, C).

    Factors L = EMA(G G^T), R = EMA(G^T G) decay by `betas[1]` (plain sums where it is 1). Their
    inverse fourth roots, with `eps` added to the spectrum, are computed at
    `start_preconditioning_step` and then at every step that `precondition_frequency` divides. They
    act on the gradient's EMA with `betas[0]`, or on the gradient itself where that is 0.
    `use_bias_correction` is for both averages. A side longer than `max_precond_dim` is cut into
    blocks of that length. Every block has its own factors and is grafted alone.

    `graft` is the method that gives each update its norm, and steps alone before
    `start_preconditioning_step`: ("adam", beta2, eps), ("rmsprop", beta2, eps), ("adagrad", eps),
    ("sgd",) or None. Decay is decoupled, with the plain lr. `stagger`, `max_failures` and
    `failures` are as in `soap.SOAP`. State is float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        betas: Sequence[float] = (0.9, 0.99),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        max_precond_dim: int = 1024,
        precondition_frequency: int = 10,
        start_preconditioning_step: int = -1,
        use_bias_correction: bool = True,
        graft: Sequence[Any] | None = ("adam", 0.99, 1e-8),
        stagger: bool = False,
        max_failures: int = 3,
    ) -> None:
        self.failures = FailureCount(max_failures)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "max_precond_dim": max_precond_dim,
                "precondition_frequency": precondition_frequency,
                "start_preconditioning_step": start_preconditioning_step,
                "use_bias_correction": use_bias_correction,
                "graft": None if graft is None else tuple(graft),
                "stagger": stagger,
            },
        )

    def rule_of(self, group: ParamGroup) -> ShampooRule:
        graft = _Graft.parse(group["graft"])
        return ShampooRule(
            betas=group["betas"],
            eps=group["eps"],
            precondition_frequency=group["precondition_frequency"],
            start_preconditioning_step=group["start_preconditioning_step"],
            max_precond_dim=group["max_precond_dim"],
            # the rule's only graft with a second moment stands for all that keep one
            graft="adam" if graft.has_state else "none",
            graft_beta=graft.beta2,
            graft_eps=graft.eps,
            stagger=group["stagger"],
        )

    def update(self, params: list[Tensor], group: ParamGroup) -> None:
        names = {param: name for name, param in named_params(group)}
        for param in params:
            assert param.grad is not None
            state, grad = self.state[param], param.grad.float()
            state["step"] += 1
            step = int(state["step"])
            blocks = _tiles(param, group)
            for tile in blocks:
                _update_factors(state, _block(grad, tile), tile.suffix, group["betas"][1])
            if _is_refresh(names[param], step, group):
                for tile in blocks:
                    self._refresh_roots(state, tile.suffix, step, names[param], group)
            direction = _direction(state, grad, blocks, step, group)
            if group["weight_decay"]:
                direction.add_(param, alpha=group["weight_decay"])
            param.add_(direction, alpha=-group["lr"])

    def _refresh_roots(
        self, state: dict[str, Tensor], suffix: str, step: int, name: str, group: ParamGroup
    ) -> None:
        beta2 = group["betas"][1]
        correction = 1 - beta2**step if group["use_bias_correction"] and beta2 < 1 else 1.0
        for side in ("left", "right"):
            factor = state[f"{side}_factor{suffix}"]
            try:
                root = inverse_root(factor / correction, INVERSE_ROOT, group["eps"])
            except DecompositionError as error:
                self.failures.failure(f"{name} ({side}{suffix})", error)
                continue
            self.failures.success(f"{name} ({side}{suffix})")
            state[f"{side}_root{suffix}"].copy_(root)


def _tiles(param: Tensor, group: ParamGroup) -> list[Tile]:
    rows, cols = param.shape[-2:]
    return list(tiles(rows, cols, group["max_precond_dim"]))


def _block(tensor: Tensor, tile: Tile) -> Tensor:
    """A view of the tile's rows and columns."""
    rows = slice(tile.top, tile.top + tile.rows)
    return tensor[..., rows, tile.left : tile.left + tile.cols]


class _Graft(NamedTuple):
    """The method that gives an update its norm."""

    kind: str
    beta2: float
    eps: float

    @property
    def has_state(self) -> bool:
        return self.kind in ("adam", "rmsprop", "adagrad")

    @staticmethod
    def parse(spec: Sequence[Any] | None) -> _Graft:
        """From the option; kind "none" for None. ValueError for an unknown method."""
        match tuple(spec) if spec is not None else ("none",):
            case ("none" | "sgd" as kind,):
                return _Graft(kind, 1.0, 0.0)
            case ("adagrad", eps):
                return _Graft("adagrad", 1.0, float(eps))
            case ("adam" | "rmsprop" as kind, beta2, eps):
                return _Graft(kind, float(beta2), float(eps))
        raise ValueError(
            f"graft is {spec!r}; take ('adam', beta2, eps), ('rmsprop', beta2, eps), "
            "('adagrad', eps), ('sgd',) or None"
        )


def _is_refresh(name: str, step: int, group: ParamGroup) -> bool:
    frequency = group["precondition_frequency"]
    start = _start(group)
    if step <= start:
        return step == start
    return (step + refresh_offset(name, frequency, group["stagger"])) % frequency == 0


def _start(group: ParamGroup) -> int:
    """The first preconditioned step; by default the first that the frequency divides."""
    start = group["start_preconditioning_step"]
    return start if start >= 1 else group["precondition_frequency"]


def _update_factors(state: dict[str, Tensor], grad: Tensor, suffix: str, beta2: float) -> None:
    weight = 1.0 if beta2 == 1 else 1 - beta2
    state[f"left_factor{suffix}"].mul_(beta2).add_(grad @ grad.mT, alpha=weight)
    state[f"right_factor{suffix}"].mul_(beta2).add_(grad.mT @ grad, alpha=weight)


def _direction(
    state: dict[str, Tensor], grad: Tensor, blocks: Sequence[Tile], step: int, group: ParamGroup
) -> Tensor:
    """The step before decay and lr: preconditioned, and grafted block by block."""
    graft = _Graft.parse(group["graft"])
    if graft.has_state:
        weight = 1.0 if graft.beta2 == 1 else 1 - graft.beta2
        state["graft_avg_sq"].mul_(graft.beta2).addcmul_(grad, grad, value=weight)
    average = _average(state, grad, step, group)
    grafted = _grafted(state, average, step, graft)
    if step < _start(group) and grafted is not None:
        return grafted.clone() if grafted is average else grafted
    direction = torch.empty_like(average)
    for tile in blocks:
        root_left, root_right = state[f"left_root{tile.suffix}"], state[f"right_root{tile.suffix}"]
        preconditioned = root_left @ _block(average, tile) @ root_right
        if grafted is not None:
            norms = torch.linalg.matrix_norm(_block(grafted, tile), keepdim=True)
            preconditioned = normalize(preconditioned).mul_(norms)
        _block(direction, tile).copy_(preconditioned)
    return direction


def _average(state: dict[str, Tensor], grad: Tensor, step: int, group: ParamGroup) -> Tensor:
    """The gradient's bias-corrected EMA."""
    beta1 = group["betas"][0]
    if not beta1:
        return grad
    state["exp_avg"].lerp_(grad, 1 - beta1)
    return state["exp_avg"] / (1 - beta1**step if group["use_bias_correction"] else 1.0)


def _grafted(state: dict[str, Tensor], average: Tensor, step: int, graft: _Graft) -> Tensor | None:
    """The step of the grafted method; None without one."""
    if graft.kind == "none":
        return None
    if graft.kind == "sgd":
        return average
    correction = 1 - graft.beta2**step if graft.kind == "adam" and graft.beta2 < 1 else 1.0
    return average / (state["graft_avg_sq"] / correction).sqrt_().add_(graft.eps)
