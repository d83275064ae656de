"""Exact sums of gradients give bit-identical updates at any number of ranks, for every optimizer.

The loss is linear in the weights with integer coefficients, so each rank's gradient is that integer
and any order of summation gives the same float. Only the update itself could still differ.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrixtitan.config import OptimizerConfig
from matrixtitan.fsdp import fully_shard
from matrixtitan.optim.build import Optimizers, build_optimizers
from matrixtitan.rules import MuonRule, ShampooRule, SOAPRule
from tests.distributed.test_fsdp import collect
from tests.lib.count_collectives import no_collectives
from tests.lib.distributed import run_distributed

STEPS = 6
SHARES = 12  # parts of the global gradient; every world size tested divides it
CONFIGS = {
    "muon": OptimizerConfig(name="muon"),
    "muon, match_rms_adamw": OptimizerConfig(
        name="muon", rule=MuonRule(scale="match_rms_adamw"), lr=1e-3
    ),
    "shampoo": OptimizerConfig(
        name="shampoo",
        lr=1e-3,
        rule=ShampooRule(precondition_frequency=2, start_preconditioning_step=2),
    ),
    "soap": OptimizerConfig(name="soap", lr=1e-3, rule=SOAPRule(precondition_frequency=2)),
    "adamw": OptimizerConfig(name="adamw", lr=1e-3),
}


class Layer(nn.Module):
    """Three matrices and a vector; forward is linear in each."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {
            "tall": (12, 8),
            "wide": (8, 12),
            "square": (8, 8),
            "bias": (8,),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.1))

    def forward(self, coefficients: dict[str, Tensor]) -> Tensor:
        return sum(
            ((param * coefficients[name]).sum() for name, param in self.named_parameters()),
            torch.zeros(()),
        )


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, coefficients: dict[str, dict[str, Tensor]]) -> Tensor:
        return sum(
            (layer(coefficients[str(i)]) for i, layer in enumerate(self.layers)), torch.zeros(())
        )


def coefficients(
    model_shapes: dict[str, torch.Size], step: int, shares: range
) -> dict[str, dict[str, Tensor]]:
    """Small integers, summed over `shares`."""
    result: dict[str, dict[str, Tensor]] = {}
    for index, (fqn, shape) in enumerate(model_shapes.items()):
        _, layer, name = fqn.split(".")
        total = torch.zeros(shape)
        for part in shares:
            generator = torch.Generator().manual_seed(10_000 * step + 100 * index + part)
            total += torch.randint(-4, 5, tuple(shape), generator=generator).float()
        result.setdefault(layer, {})[name] = total
    return result


def build() -> tuple[Linear, dict[str, torch.Size]]:
    torch.manual_seed(0)
    model = Linear()
    return model, {fqn: param.shape for fqn, param in model.named_parameters()}


def without_batches(optimizers: Optimizers) -> None:
    """Batched products are not bit-equal to single ones, and ranks batch what they own."""
    for group in optimizers.param_groups:
        if "batch" in group:
            group["batch"] = False


def train(config: OptimizerConfig) -> dict[str, Tensor]:
    model, shapes = build()
    sharded = fully_shard(
        model, units=[[f"layers.{i}"] for i in range(3)], gradient_reduction="sum"
    )
    optimizers = build_optimizers([p for p in sharded.local_parameters() if p.trainable], config)
    without_batches(optimizers)
    rank, size = dist.get_rank(), SHARES // dist.get_world_size()
    for step in range(STEPS):
        model(coefficients(shapes, step, range(rank * size, (rank + 1) * size))).backward()
        with no_collectives():
            optimizers.step()
            optimizers.zero_grad()
    return collect(sharded)


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_are_bit_identical_at_any_world_size(name: str) -> None:
    alone = run_distributed(train, 1, CONFIGS[name])[0]
    start = dict(build()[0].named_parameters())
    assert all((alone[fqn] != start[fqn]).any() for fqn in start), (
        "an update that changes nothing proves nothing"
    )
    more_ranks_than_matrices = [12] if name == "muon" else []
    for world_size in (2, 3, 4, *more_ranks_than_matrices):
        for fqn, weight in run_distributed(train, world_size, CONFIGS[name])[0].items():
            assert torch.equal(weight, alone[fqn]), (
                f"{fqn} at {world_size} ranks: {(weight - alone[fqn]).abs().max()}"
            )
