"""Checkpoints saved on 2 December 2026 open, and their runs go on with the same losses.

`data/old_checkpoints` holds step 4 of 8 of two tiny runs on 2 ranks, their corpus, and the losses
of all 8 steps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from matrixtitan.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DataSource,
    JobConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from matrixtitan.rules import MuonRule, SOAPRule
from matrixtitan.trainer import Trainer
from models.llama import LLAMA3_FLAVORS, LlamaFlavor
from tests.lib.corpus import byte_tokenizer
from tests.lib.distributed import run_distributed

OLD = Path(__file__).parent / "data" / "old_checkpoints"
SAVED_AT, STEPS = 4, 8
OPTIMIZERS = {
    "muon": OptimizerConfig(name="muon", lr=0.02, rule=MuonRule(ns_batch=False)),
    "soap": OptimizerConfig(name="soap", lr=1e-3, rule=SOAPRule(precondition_frequency=2)),
}
TOLERANCE = {"muon": 1e-5, "soap": 1e-3}
"""SOAP's eigenbases of rank-deficient factors follow from rounding."""


def resumed_losses(folder: Path, name: str) -> list[float]:
    LLAMA3_FLAVORS["tiny"] = LlamaFlavor(16, 2, 2, 1, 32)
    config = Config(
        job=JobConfig(dump_folder=str(folder)),
        model=ModelConfig(
            flavor="tiny",
            tokenizer_path=str(folder / "bytes.tiktoken"),
            tokenizer_pattern="llama3",
        ),
        data=DataConfig(
            sources=(DataSource(type="text", path=(str(OLD / "corpus.txt"),)),),
            cache_dir=str(folder / "cache"),
            num_workers=0,
            validation_fraction=0.0,
        ),
        training=TrainingConfig(
            global_batch_size=4,
            local_batch_size=1,
            seq_len=16,
            steps=STEPS,
            mixed_precision_param="float32",
        ),
        optimizer=OPTIMIZERS[name],
        lr_scheduler=LRSchedulerConfig(warmup_steps=2, total_steps=STEPS),
        checkpoint=CheckpointConfig(enable=True, interval=STEPS),
        metrics=MetricsConfig(log_freq=1, enable_tensorboard=False),
    )
    losses: list[float] = []
    with Trainer(config) as trainer:
        assert trainer.state.step == SAVED_AT
        log_step = trainer.metrics.log_step

        def record(*args, **keys):  # type: ignore[no-untyped-def]
            report = log_step(*args, **keys)
            losses.append(report.loss)
            return report

        trainer.metrics.log_step = record  # type: ignore[method-assign]
        trainer.train()
    return losses


@pytest.mark.parametrize(("name", "world_size"), [("muon", 1), ("soap", 2)])
def test_an_old_checkpoint_goes_on_with_the_same_losses(
    name: str, world_size: int, tmp_path: Path
) -> None:
    byte_tokenizer(tmp_path)
    shutil.copytree(OLD / name, tmp_path / "checkpoint")
    losses = run_distributed(resumed_losses, world_size, tmp_path, name)[0]
    expected = json.loads((OLD / "losses.json").read_text())[name][SAVED_AT:]
    assert losses == pytest.approx(expected, abs=TOLERANCE[name], rel=0)
