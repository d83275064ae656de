"""Muon: momentum, orthogonalised by Newton-Schulz. https://kellerjordan.github.io/posts/muon/

Owns the optimizer class and its pure functions. Other data-parallel strategies reuse
`momentum_update` on row shards, and `learning_rate_scale` with the shapes of whole matrices. Never
communicates. Next: `newton_schulz.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any, Literal

from torch import Tensor

from matrixtitan.optim.base import (
    MatrixOptimizer,
    ParamGroup,
    as_matrices,
    cut_matrices,
    form_of,
    join_matrices,
)
from matrixtitan.optim.batching import batch_indices, orthogonalize
from matrixtitan.optim.newton_schulz import NewtonSchulz, make_newton_schulz
from matrixtitan.plan.matrix_form import MatrixForm
from matrixtitan.rules.muon import Coefficients, MuonRule

Scale = Literal["original", "match_rms_adamw", "spectral"]


class Muon(MatrixOptimizer):
    """Muon over matrices (R, C) and stacks of them (E, R, C).

    buffer = lerp(buffer, grad, 1 - momentum)
    update = lerp(grad, buffer, momentum) with `nesterov`, else the buffer
    param = (1 - lr weight_decay) param - lr scale(R, C) orthogonalize(update)

    `scale` is "original", sqrt(max(1, R/C)); "match_rms_adamw", 0.2 sqrt(max(R, C))
    (https://arxiv.org/abs/2502.16982); or "spectral", sqrt(R/C) (https://arxiv.org/abs/2310.17813).
    R and C are those of the matrix that is orthogonalised: a slice of a stack, or a block where the
    group has `block_rows`, or one of the matrices that the group's `form` finds in a parameter that
    is fused, transposed or of four or more dimensions. `ns_coefficients` is "quintic",
    "polar_express", one triple for every step, or a list of triples, one for each. For `ns_dtype`
    and `batch` see `newton_schulz.NewtonSchulz`. ValueError for an option that `MuonRule` finds a
    problem in.
    """

    cuts_blocks = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "quintic",
        scale: Scale = "original",
        ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        batch: bool = True,
        block_rows: int | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_steps": ns_steps,
                "ns_coefficients": ns_coefficients,
                "scale": scale,
                "ns_dtype": ns_dtype,
                "batch": batch,
                "block_rows": block_rows,
            },
        )

    def rule_of(self, group: ParamGroup) -> MuonRule:
        return MuonRule(
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            ns_steps=group["ns_steps"],
            ns_coefficients=group["ns_coefficients"],
            ns_dtype=group["ns_dtype"],
            ns_batch=group["batch"],
            scale=group["scale"],
        )

    def update(self, params: list[Tensor], group: ParamGroup) -> None:
        settings = newton_schulz_of(group)
        if form_of(group) != MatrixForm():
            plain, cut = [], params
        else:
            plain = [param for param in params if param.ndim <= 3]
            cut = [param for param in params if param.ndim > 3]
        for param in cut:
            self._update_cut(param, group, settings)
        if plain:
            self._update_plain(plain, group, settings)

    def _update_plain(
        self, params: list[Tensor], group: ParamGroup, settings: NewtonSchulz
    ) -> None:
        """One step of matrices, blocks and stacks as they are stored, equal shapes together."""
        shapes = [as_matrices(param, group["block_rows"]).shape for param in params]
        for indices in batch_indices(shapes, params[0].device):
            batch = [params[i] for i in indices]
            updates = []
            for param in batch:
                assert param.grad is not None
                buffer = self.state[param]["momentum_buffer"]
                update = momentum_update(param.grad, buffer, group["momentum"], group["nesterov"])
                updates.append(as_matrices(update, group["block_rows"]))
            for param, update in zip(batch, orthogonalize(updates, settings), strict=True):
                _apply(param, update, group)

    def _update_cut(self, param: Tensor, group: ParamGroup, settings: NewtonSchulz) -> None:
        """One step of a parameter that its form cuts into matrices, each with its own scale."""
        assert param.grad is not None
        buffer = self.state[param]["momentum_buffer"]
        update = momentum_update(param.grad, buffer, group["momentum"], group["nesterov"])
        parts = orthogonalize(cut_matrices(update, group["block_rows"], form_of(group)), settings)
        scaled = [part * learning_rate_scale(group["scale"], *part.shape[-2:]) for part in parts]
        if group["weight_decay"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(join_matrices(scaled, param.shape, form_of(group)), alpha=-group["lr"])


def momentum_update(grad: Tensor, buffer: Tensor, momentum: float, nesterov: bool) -> Tensor:
    """Advance `buffer` in place to the average with weight 1 - momentum on `grad`.

    Returns the update to orthogonalise. It may be `buffer` itself: do not change it. All of it is
    elementwise, so it may be applied to a shard of rows.
    """
    buffer.lerp_(grad, 1 - momentum)
    return grad.lerp(buffer, momentum) if nesterov else buffer


def learning_rate_scale(scale: str, rows: int, cols: int) -> float:
    """The factor on lr, from the shape of what is orthogonalised: a whole weight, slice or head."""
    if scale == "original":
        return sqrt(max(1, rows / cols))
    if scale == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, cols))
    assert scale == "spectral", scale
    return sqrt(rows / cols)


def newton_schulz_of(group: ParamGroup) -> NewtonSchulz:
    """The iteration's settings of one parameter group."""
    return make_newton_schulz(
        group["ns_coefficients"],
        group["ns_steps"],
        dtype=group["ns_dtype"],
        batch=group["batch"],
    )


def _apply(param: Tensor, update: Tensor, group: ParamGroup) -> None:
    """Decay with the plain lr, then the update with the scaled one."""
    lr = group["lr"]
    scale = learning_rate_scale(group["scale"], *update.shape[-2:])
    if group["weight_decay"]:
        param.mul_(1 - lr * group["weight_decay"])
    param.add_(update.reshape(param.shape), alpha=-(lr * scale))
