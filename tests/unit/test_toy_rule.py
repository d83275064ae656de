"""A new rule touches one registry. Config, planner, optimizers and checkpoints read the rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from matrixtitan.checkpoint.state import optimizer_tensors
from matrixtitan.config import ConfigError, help_text, load_config, to_toml
from matrixtitan.config.checks import problems_with_fsdp2
from matrixtitan.optim.base import MatrixOptimizer, ParamGroup
from matrixtitan.optim.build import build_optimizers
from matrixtitan.options import key
from matrixtitan.parallelize import plan_settings
from matrixtitan.plan.cost import block_cost
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.rules import RULES, MuonRule, Rule, StateSpec


@dataclass(frozen=True)
class ToyRule(Rule):
    """Scales each row's gradient by its running norm."""

    name = "toy"
    optimizer = f"{__name__}:Toy"

    decay: float = key(0.9, "decay of the rows' norms", low=0, below=1)

    def arguments(self) -> dict[str, Any]:
        return {"decay": self.decay}

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        return {"row_norm": StateSpec(shape[:-1], per_row=True, dtype="float32")}

    def flops(self, rows: int, cols: int) -> int:
        return 3 * rows * cols


class Toy(MatrixOptimizer):
    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "decay": decay})

    def rule_of(self, group: ParamGroup) -> ToyRule:
        return ToyRule(decay=group["decay"])

    def update(self, params: list[Tensor], group: ParamGroup) -> None:
        for param in params:
            assert param.grad is not None
            norm = self.state[param]["row_norm"]
            norm.lerp_(param.grad.norm(dim=-1), 1 - group["decay"])
            param.sub_(param.grad / norm.unsqueeze(-1), alpha=group["lr"])


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "toy", ToyRule)


def load(tmp_path: Path, table: str) -> Any:
    path = tmp_path / "toy.toml"
    path.write_text(f'[training]\nglobal_batch_size = 8\n[optimizer]\nname = "toy"\n{table}')
    return load_config(["--config", str(path)])


def test_the_config_has_its_table(tmp_path: Path) -> None:
    config = load(tmp_path, "[optimizer.toy]\ndecay = 0.5")
    assert config.optimizer.rule == ToyRule(decay=0.5)
    assert "[optimizer.toy]\ndecay = 0.5" in to_toml(config)
    assert "--optimizer.toy.decay  (number, at least 0 and below 1, default 0.9)" in help_text()
    with pytest.raises(ConfigError, match=r"optimizer\.toy\.decay is 2\.0; it must be at least 0"):
        load(tmp_path, "[optimizer.toy]\ndecay = 2")


def test_fsdp2_takes_it_only_if_it_is_a_muon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class OtherMuon(MuonRule):
        name = "toy"

    fsdp2 = '[parallelism]\nstrategy = "fsdp2"'
    with pytest.raises(ConfigError, match=r"optimizer\.name toy needs whole matrices"):
        load(tmp_path, fsdp2)
    monkeypatch.setitem(RULES, "toy", OtherMuon)
    config = load(tmp_path, fsdp2)
    assert list(problems_with_fsdp2(config.optimizer)) == []


def test_the_planner_prices_it(tmp_path: Path) -> None:
    settings = plan_settings(load(tmp_path, ""))
    cost = block_cost(ParamSpec("w", (6, 10), "matrix", "unit", 6), settings)
    assert cost.resident.optimizer_state == 6 * 4
    assert cost.flops == 3 * 60


def test_it_trains_and_its_state_is_saved_by_rows(tmp_path: Path) -> None:
    optimizer = load(tmp_path, "").optimizer
    stack = LocalParam("experts", nn.Parameter(torch.ones(2, 3, 4)), (6, 3, 4), "matrix", 1, 2)
    matrix = LocalParam("w", nn.Parameter(torch.ones(3, 4)), (3, 4), "matrix", 3)
    for param in (stack, matrix):
        param.tensor.grad = torch.ones_like(param.tensor)
    optimizers = build_optimizers([stack, matrix], optimizer)
    optimizers.step()
    assert all((param.tensor != 1).all() for param in (stack, matrix))
    saved = optimizer_tensors(optimizers.state_tensors(), [stack, matrix])
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert shapes == {"optimizer.experts.row_norm": (6, 3), "optimizer.w.row_norm": (3,)}
