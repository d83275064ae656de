"""SOAP: Adam in the eigenbasis of Shampoo's factors. https://arxiv.org/abs/2409.11321

Owns the optimizer class. What the paper leaves open follows its authors' implementation: the first
step only builds the bases. Never communicates. Next: `matrix_roots.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from matrixtitan.optim.base import MatrixOptimizer, ParamGroup, named_params
from matrixtitan.optim.matrix_roots import DecompositionError, eigenbasis, refine_eigenbasis
from matrixtitan.optim.newton_schulz import normalize
from matrixtitan.optim.refresh import FailureCount, refresh_offset
from matrixtitan.rules.soap import SOAPRule


class SOAP(MatrixOptimizer):
    """SOAP over matrices (R, C) and stacks of them (E, R, C).

    Factors L = EMA(G G^T) and R = EMA(G^T G) decay by `shampoo_beta`, or by `betas[1]` where that
    is negative. Adam's moments live in the factors' eigenbases, which one power iteration and QR
    refresh every `precondition_frequency` steps. A side longer than `max_precond_dim` has no
    factor. `stagger` moves each parameter's refreshes by a number of steps that depends on its
    name, so that no step pays for all of them. `normalize_grads` scales each update to unit RMS.
    `correct_bias` is Adam's. A failed decomposition keeps the old basis, and `failures.total`
    counts it. After `max_failures` in a row a step raises RuntimeError. State is float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: Sequence[float] = (0.95, 0.95),
        shampoo_beta: float = -1,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        normalize_grads: bool = False,
        correct_bias: bool = True,
        stagger: bool = False,
        max_failures: int = 3,
    ) -> None:
        self.failures = FailureCount(max_failures)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "shampoo_beta": shampoo_beta,
                "eps": eps,
                "weight_decay": weight_decay,
                "precondition_frequency": precondition_frequency,
                "max_precond_dim": max_precond_dim,
                "normalize_grads": normalize_grads,
                "correct_bias": correct_bias,
                "stagger": stagger,
            },
        )

    def rule_of(self, group: ParamGroup) -> SOAPRule:
        return SOAPRule(
            betas=group["betas"],
            eps=group["eps"],
            shampoo_beta=group["shampoo_beta"],
            precondition_frequency=group["precondition_frequency"],
            max_precond_dim=group["max_precond_dim"],
            stagger=group["stagger"],
        )

    def update(self, params: list[Tensor], group: ParamGroup) -> None:
        names = {param: name for name, param in named_params(group)}
        for param in params:
            assert param.grad is not None
            state, grad = self.state[param], param.grad.float()
            state["step"] += 1
            step = int(state["step"]) - 1  # the first call builds the bases and steps nothing
            if step == 0:
                _update_factors(state, grad, group)
                self._build_bases(state, names[param])
                continue
            _adam_step(param, state, grad, step, group)
            _update_factors(state, grad, group)
            frequency = group["precondition_frequency"]
            if (step + refresh_offset(names[param], frequency, group["stagger"])) % frequency == 0:
                self._refresh_bases(state, names[param])

    def _build_bases(self, state: dict[str, Tensor], name: str) -> None:
        for side in _sides(state):
            basis = state[f"{side}_basis"]
            try:
                basis.copy_(eigenbasis(state[f"{side}_factor"]))
                self.failures.success(f"{name} ({side})")
            except DecompositionError as error:
                self.failures.failure(f"{name} ({side})", error)
                # Adam in the plain basis until the next refresh
                basis.copy_(torch.eye(basis.size(-1), device=basis.device).expand_as(basis))

    def _refresh_bases(self, state: dict[str, Tensor], name: str) -> None:
        """New bases. The first moment is carried over, the second permuted as the columns are."""
        exp_avg = _project_back(state["exp_avg"], state)
        for side, dim in _sides(state).items():
            try:
                basis, order = refine_eigenbasis(state[f"{side}_factor"], state[f"{side}_basis"])
            except DecompositionError as error:
                self.failures.failure(f"{name} ({side})", error)
                continue
            self.failures.success(f"{name} ({side})")
            state[f"{side}_basis"].copy_(basis)
            exp_avg_sq = state["exp_avg_sq"]
            index = order.unsqueeze(-1 if dim == -2 else -2).expand_as(exp_avg_sq)
            exp_avg_sq.copy_(exp_avg_sq.gather(dim, index))
        state["exp_avg"].copy_(_project(exp_avg, state))


def _sides(state: dict[str, Tensor]) -> dict[str, int]:
    """The preconditioned sides and their dims."""
    return {side: dim for side, dim in (("left", -2), ("right", -1)) if f"{side}_basis" in state}


def _project(matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Q_L^T M Q_R, without a side that is not preconditioned."""
    if "left_basis" in state:
        matrix = state["left_basis"].mT @ matrix
    return matrix @ state["right_basis"] if "right_basis" in state else matrix


def _project_back(matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Q_L M Q_R^T, without a side that is not preconditioned."""
    if "left_basis" in state:
        matrix = state["left_basis"] @ matrix
    return matrix @ state["right_basis"].mT if "right_basis" in state else matrix


def _update_factors(state: dict[str, Tensor], grad: Tensor, group: ParamGroup) -> None:
    beta = group["shampoo_beta"] if group["shampoo_beta"] >= 0 else group["betas"][1]
    if "left_factor" in state:
        state["left_factor"].lerp_(grad @ grad.mT, 1 - beta)
    if "right_factor" in state:
        state["right_factor"].lerp_(grad.mT @ grad, 1 - beta)


def _adam_step(
    param: Tensor, state: dict[str, Tensor], grad: Tensor, step: int, group: ParamGroup
) -> None:
    """Adam in the eigenbasis, then decay with the plain lr."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    projected = _project(grad, state)
    state["exp_avg"].lerp_(projected, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
    direction = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
    update = _project_back(direction, state)
    if group["normalize_grads"]:
        update = normalize(update).mul_(sqrt(update.size(-2) * update.size(-1)))
    step_size = lr * sqrt(1 - beta2**step) / (1 - beta1**step) if group["correct_bias"] else lr
    param.add_(update, alpha=-step_size)
    if group["weight_decay"]:
        param.mul_(1 - lr * group["weight_decay"])
