"""matrix_optimizer: one optimizer, equal to Muon and AdamW built apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from matrixtitan.optim import Muon, matrix_optimizer
from matrixtitan.plan.local_param import LocalParam


class Handle:
    def __init__(self, empty: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {} if empty else {"w": (8, 6), "embed": (10, 4), "norm": (6,)}
        self.params = [
            LocalParam(
                name,
                nn.Parameter(torch.randn(shape, generator=generator)),
                shape,
                "matrix" if name == "w" else "tail",
                shape[0],
            )
            for name, shape in shapes.items()
        ]

    def local_parameters(self) -> list[LocalParam]:
        return self.params

    def tensors(self) -> list[Tensor]:
        return [p.tensor for p in self.params]


def step(optimizers: list[torch.optim.Optimizer], tensors: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)
    for optimizer in optimizers:
        optimizer.step()


TAIL = {"lr": 0.01, "weight_decay": 0.1}


def test_equals_muon_and_adamw_under_a_scheduler_and_after_a_reload() -> None:
    ours, theirs, again = Handle(), Handle(), Handle()
    one = matrix_optimizer(ours, lr=0.1, weight_decay=0.2, tail=TAIL)
    w, embed, norm = theirs.tensors()
    adamw = torch.optim.AdamW(
        [{"params": [embed], "weight_decay": 0.1}, {"params": [norm], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    apart = [Muon([w], lr=0.1, weight_decay=0.2), adamw]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)) for o in (one, *apart)]
    for seed in range(3):
        step([one], ours.tensors(), seed)
        step(apart, theirs.tensors(), seed)
        for schedule in schedules:
            schedule.step()
    assert all(map(torch.equal, ours.tensors(), theirs.tensors()))
    reloaded = matrix_optimizer(again, lr=0.5)
    reloaded.load_state_dict(one.state_dict())
    for mine, other in zip(again.tensors(), ours.tensors(), strict=True):
        mine.data.copy_(other.data)
    step([one], ours.tensors(), 9)
    step([reloaded], again.tensors(), 9)
    assert all(map(torch.equal, ours.tensors(), again.tensors()))


def test_a_rank_without_parameters_steps_with_the_same_groups() -> None:
    empty = matrix_optimizer(Handle(empty=True), lr=0.1)
    empty.step()
    empty.load_state_dict(empty.state_dict())
    assert [g["name"] for g in empty.param_groups] == ["matrix", "tail", "tail"]


def test_refusals_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"no option maximize; its options are momentum"):
        matrix_optimizer(Handle(), lr=0.1, maximize=True)
    with pytest.raises(ValueError, match=r"tail has no option foreach"):
        matrix_optimizer(Handle(), lr=0.1, tail={"foreach": True})
    one = matrix_optimizer(Handle(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="bfloat16"):
        scaler.step(one)
    with pytest.raises(ValueError, match="which this rank does not step"):
        one.load_state_dict({**one.state_dict(), "state": {"other": {}}})
