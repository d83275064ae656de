"""A failed assemble closes its strategy, and a dry run steps on zeros. One process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from matrixtitan import parallelize
from matrixtitan.assemble import Assembled, assemble
from matrixtitan.config import Config, OptimizerConfig, config_from_dict
from matrixtitan.fsdp import InitRows
from matrixtitan.log import get_logger
from matrixtitan.mesh import World, init_world
from matrixtitan.optim.build import Optimizers
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.rules import MuonRule
from matrixtitan.strategies.ddp import DDP
from matrixtitan.strategies.dry_run import DryRun
from models import build_model

CPU = torch.device("cpu")


class Watched(DDP):
    """DDP on one rank that counts its closings and can be made to fail while it is built."""

    closed = 0
    fails_in = ""

    def materialize(self, init_rows: InitRows | None) -> None:
        self._fail("materialize")
        super().materialize(init_rows)

    def build_optimizers(self, config: OptimizerConfig) -> Optimizers:
        self._fail("build_optimizers")
        return super().build_optimizers(config)

    def close(self) -> None:
        self.closed += 1

    def _fail(self, where: str) -> None:
        if self.fails_in == where:
            raise ValueError(f"fails in {where}")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """Every strategy that is built as "ddp"."""
    built: list[Watched] = []

    def build(model: Any, specs: Any, config: Config, mesh: Any, device: torch.device) -> Watched:
        built.append(Watched(model, specs, device=device))
        return built[-1]

    monkeypatch.setitem(parallelize.BUILDERS, "ddp", build)
    return built


def config_for(strategy: str, **parallelism: Any) -> Config:
    config = config_from_dict({"model": {"flavor": "netlab"}, "training": {"seq_len": 16}}, "test")
    section = dataclasses.replace(config.parallelism, strategy=strategy, **parallelism)
    return dataclasses.replace(config, parallelism=section)


def assemble_here() -> Assembled:
    # one rank has no mesh
    world = World(0, 1, 0, CPU, mesh=None, owns_group=False)  # type: ignore[arg-type]
    return assemble(config_for("ddp"), 300, world)


@pytest.mark.parametrize("where", ["materialize", "build_optimizers"])
def test_a_strategy_that_cannot_be_built_is_closed(
    where: str, watched: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "fails_in", where)
    with pytest.raises(ValueError, match=f"fails in {where}"):
        assemble_here()
    assert [strategy.closed for strategy in watched] == [1]


def test_what_is_assembled_trains(watched: list[Watched]) -> None:
    model, strategy, optimizers = assemble_here()
    assert strategy is watched[0] and not strategy.closed
    tokens = torch.arange(32).view(2, 16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    strategy.model(tokens, tokens).backward()
    assert strategy.clip_grad_norm_(1.0) > 0
    strategy.step(optimizers)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert strategy.report(optimizers) is None


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 1), ("zero1_owner", 1), ("fsdp2", 4)])
def test_a_dry_run_steps_on_zeros_and_counts_what_its_rank_keeps(strategy: str, share: int) -> None:
    config = config_for(strategy, dry_run_world_size=4, dry_run_rank=3)
    with init_world(config) as world:
        model, dry_run, optimizers = assemble(config, 300, world)
        assert isinstance(dry_run, DryRun)
        tokens = torch.arange(32).view(2, 16)
        dry_run.model(tokens, tokens).backward()
        assert dry_run.clip_grad_norm_(1.0).item() == 0
        for param in dry_run.stepped_parameters():
            assert param.tensor.grad is not None and not param.tensor.grad.any()
        dry_run.step(optimizers)
        weights = 4 * model.num_parameters // share
        report = dry_run.report(optimizers)
        assert report.startswith(f"dry run: rank 3 of 4 keeps {weights:,} bytes of weights, as")
        assert "planned" not in report, "these strategies have no plan"


def test_per_head_patterns_take_no_matrix_whose_rows_are_no_heads() -> None:
    def specs_of(pattern: str) -> list[ParamSpec]:
        config = config_for("ddp")
        rule = MuonRule(per_head_patterns=(pattern,))
        config = dataclasses.replace(config, optimizer=OptimizerConfig(rule=rule))
        with torch.device("meta"):
            model = build_model("llama3", "netlab", vocab_size=300, max_seq_len=16)
        return parallelize.model_specs(model, config)

    heads = [spec.fqn for spec in specs_of("*.w[qkv].weight") if spec.block_rows == 24]
    assert len(heads) == 3 * 6
    # head_dim divides the rows of both
    for other in ("layers.*.feed_forward.w2.weight", "layers.3.attention.w*.weight"):
        with pytest.raises(ValueError, match=r"per_head_patterns: .* whose rows are no heads; "):
            specs_of(other)


@pytest.mark.parametrize("rank", [0, 63])
def test_a_dry_run_of_any_rank_warns_of_ranks_without_a_matrix(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for("matrix_fsdp", dry_run_world_size=64, dry_run_rank=rank)
    monitor = get_logger()
    monitor.addHandler(caplog.handler)
    try:
        with init_world(config) as world:
            assemble(config, 300, world).strategy.close()
    finally:
        monitor.removeHandler(caplog.handler)
    assert [text for text in caplog.messages if "of 64 ranks own no matrix" in text]


def test_a_dry_run_closes_what_it_wraps(watched: list[Watched]) -> None:
    config = config_for("ddp", dry_run_world_size=4)
    with init_world(config) as world:
        assemble(config, 300, world).strategy.close()
    assert [strategy.closed for strategy in watched] == [1]
