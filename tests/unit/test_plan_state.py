"""The state bytes that a plan reckons with are those that the optimizers allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from matrixtitan.optim import SOAP, Muon, Shampoo
from matrixtitan.plan.cost import CostSettings, block_cost
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.rules import MuonRule, Rule, ShampooRule, SOAPRule

SHAPES = [(6, 10), (24, 8), (16, 16), (3, 8, 12)]


def _allocated(optimizer: Any) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"  # counters are not counted
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda p: Muon([p]), MuonRule()),
        (lambda p: SOAP([p]), SOAPRule()),
        (
            lambda p: SOAP([p], max_precond_dim=9),
            SOAPRule(max_precond_dim=9),
        ),
        (lambda p: Shampoo([p]), ShampooRule()),
        (
            lambda p: Shampoo([p], max_precond_dim=5, graft=None),
            ShampooRule(max_precond_dim=5, graft="none"),
        ),
    ],
    ids=["muon", "soap", "soap_onesided", "shampoo", "shampoo_blocks"],
)
def test_state_bytes(build: Any, rule: Rule, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = build(param)
    optimizer.allocate_state()
    rows = shape[0]
    spec = ParamSpec("p", shape, "matrix", "u", rows if len(shape) == 2 else 1)
    stored = CostSettings(param_bytes=dtype.itemsize, state_bytes=dtype.itemsize, rule=rule)
    blocks = rows // spec.block_rows
    state = blocks * block_cost(spec, stored).resident.optimizer_state
    assert state == _allocated(optimizer)
