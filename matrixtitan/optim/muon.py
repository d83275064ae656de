"""Muon: momentum, orthogonalised by Newton-Schulz. https://kellerjordan.github.io/posts/muon/

Owns the optimizer class and the pure pieces it is made of (`momentum_update`, `learning_rate_scale`), which other
data-parallel strategies reuse on matrices that they gathered. It never communicates. Next: `newton_schulz.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any, Literal, get_args

from torch import Tensor

from matrixtitan.optim.matrix_optimizer import MatrixOptimizer, ParamGroup, as_matrices
from matrixtitan.optim.newton_schulz import batch_indices, orthogonalize
from matrixtitan.optim.newton_schulz_settings import (
    Coefficients,
    Dtype,
    Form,
    NewtonSchulz,
    make_newton_schulz,
)
from matrixtitan.rules.base import Shape, StateSpec
from matrixtitan.rules.muon import MuonRule

Scale = Literal["original", "match_rms_adamw", "spectral"]


class Muon(MatrixOptimizer):
    """Muon over matrices (R, C) and stacks of them (E, R, C).

    buffer = lerp(buffer, grad, 1 - momentum); update = lerp(grad, buffer, momentum) with `nesterov`, else the buffer;
    param = (1 - lr weight_decay) param - lr scale(R, C) orthogonalize(update).

    `scale`: "original" sqrt(max(1, R/C)), "match_rms_adamw" 0.2 sqrt(max(R, C)) (https://arxiv.org/abs/2502.16982),
    "spectral" sqrt(R/C) (https://arxiv.org/abs/2310.17813); R and C are those of the matrix that is orthogonalised:
    a slice of a stack, or a block where the group has `block_rows`. For `ns_coefficients`, `ns_dtype`, `ns_form`
    and `batch` see `newton_schulz_settings.NewtonSchulz`. ValueError for an option that cannot be.
    """

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
        ns_dtype: Dtype = "auto",
        ns_form: Form = "auto",
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
                "ns_form": ns_form,
                "batch": batch,
                "block_rows": block_rows,
            },
        )

    def check_group(self, group: ParamGroup) -> None:
        MuonRule(momentum=group["momentum"], scale=group["scale"]).require()
        newton_schulz_of(group)

    def state_specs(self, shape: Shape, group: ParamGroup) -> dict[str, StateSpec]:
        return MuonRule().state(shape)

    def update(self, params: list[Tensor], group: ParamGroup) -> None:
        settings = newton_schulz_of(group)
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


def momentum_update(grad: Tensor, buffer: Tensor, momentum: float, nesterov: bool) -> Tensor:
    """Advance `buffer` in place to the average with weight 1 - momentum on `grad`; return what to orthogonalise.

    Elementwise, so it may be applied to a shard of rows. The result may be `buffer` itself: do not change it.
    """
    buffer.lerp_(grad, 1 - momentum)
    return grad.lerp(buffer, momentum) if nesterov else buffer


def learning_rate_scale(scale: str, rows: int, cols: int) -> float:
    """What lr is multiplied by for a matrix of the full logical shape (rows, cols). ValueError for an unknown name."""
    if scale == "original":
        return sqrt(max(1, rows / cols))
    if scale == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, cols))
    if scale == "spectral":
        return sqrt(rows / cols)
    raise ValueError(f"scale is {scale!r}; choose one of {', '.join(get_args(Scale))}")


def newton_schulz_of(group: ParamGroup) -> NewtonSchulz:
    """The iteration's settings of one parameter group."""
    return make_newton_schulz(
        group["ns_coefficients"],
        group["ns_steps"],
        dtype=group["ns_dtype"],
        form=group["ns_form"],
        batch=group["batch"],
    )


def _apply(param: Tensor, update: Tensor, group: ParamGroup) -> None:
    """Decay with the plain lr, then the update with the scaled one."""
    lr = group["lr"]
    scale = learning_rate_scale(group["scale"], *update.shape[-2:])
    if group["weight_decay"]:
        param.mul_(1 - lr * group["weight_decay"])
    param.add_(update.reshape(param.shape), alpha=-(lr * scale))
