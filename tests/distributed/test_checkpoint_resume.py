"""Real runs resumed: every optimizer, other numbers of ranks and layouts, restarts by the launcher."""

from __future__ import annotations

import email
import shutil
from dataclasses import replace
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
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from matrixtitan.trainer import Trainer
from tests.lib.distributed import run_distributed

SAVED_AT, STEPS = 3, 13
TOLERANCE = 5e-5
SOAP_TOLERANCE = 2e-3  # its eigenbases turn rounding into other, equally good, bases
OPTIMIZERS = {
    "muon": OptimizerConfig(name="muon"),
    "adamw": OptimizerConfig(name="adamw", lr=1e-3),
    "shampoo": OptimizerConfig(name="shampoo", lr=1e-3, precondition_frequency=2),
    "soap": OptimizerConfig(name="soap", lr=1e-3, precondition_frequency=2),
}


def config_of(folder: Path, optimizer: str, replicas: int = 1) -> Config:
    return Config(
        job=JobConfig(dump_folder=str(folder / optimizer)),
        data=DataConfig(
            sources=(DataSource(type="text", path=(str(folder.parent / "corpus" / "*.txt"),)),),
            cache_dir=str(folder.parent / "corpus"),
            num_workers=0,
        ),
        training=TrainingConfig(
            global_batch_size=24,
            local_batch_size=1,
            seq_len=16,
            steps=STEPS,
            mixed_precision_param="float32",
        ),
        optimizer=OPTIMIZERS[optimizer],
        lr_scheduler=LRSchedulerConfig(warmup_steps=2),
        parallelism=ParallelismConfig(data_parallel_replicate_degree=replicas),
        checkpoint=CheckpointConfig(enable=True, interval=SAVED_AT, keep_latest_k=0),
        metrics=MetricsConfig(log_freq=1, enable_tensorboard=False),
    )


def losses_of(*configs: Config) -> list[list[float]]:
    """The losses of each run, one run after the other."""
    found = []
    for config in configs:
        losses: list[float] = []
        with Trainer(config) as trainer:
            log_step = trainer.metrics.log_step

            def record(*args, **keys):  # type: ignore[no-untyped-def]
                report = log_step(*args, **keys)  # noqa: B023
                losses.append(report.loss)  # noqa: B023
                return report

            trainer.metrics.log_step = record  # type: ignore[method-assign]
            trainer.train()
        found.append(losses)
    return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "corpus").mkdir()
    for path in Path(email.__file__).parent.glob("*.py"):
        (folder / "corpus" / f"{path.stem}.txt").write_text(path.read_text())
    return folder


@pytest.fixture(scope="module")
def uninterrupted(workplace: Path) -> dict[str, list[float]]:
    """Losses of runs on 4 ranks, which leave checkpoints of step SAVED_AT."""
    configs = [config_of(workplace / "whole", optimizer) for optimizer in OPTIMIZERS]
    losses = run_distributed(losses_of, 4, *configs, timeout=150)[0]
    return dict(zip(OPTIMIZERS, losses, strict=True))


def resumed(
    workplace: Path, name: str, world_size: int, optimizers: list[str], replicas: int = 1
) -> dict[str, list[float]]:
    for optimizer in optimizers:
        shutil.copytree(
            workplace / "whole" / optimizer / "checkpoint" / f"step-{SAVED_AT}",
            workplace / name / optimizer / "checkpoint" / f"step-{SAVED_AT}",
        )
    configs = [config_of(workplace / name, optimizer, replicas) for optimizer in optimizers]
    configs = [replace(c, checkpoint=replace(c.checkpoint, interval=1000)) for c in configs]
    losses = run_distributed(losses_of, world_size, *configs, timeout=150)[0]
    return dict(zip(optimizers, losses, strict=True))


def test_the_same_ranks_go_on_to_the_bit(
    workplace: Path, uninterrupted: dict[str, list[float]]
) -> None:
    for optimizer, losses in resumed(workplace, "same", 4, list(OPTIMIZERS)).items():
        assert losses == uninterrupted[optimizer][SAVED_AT:], optimizer


@pytest.mark.parametrize(
    ("world_size", "replicas", "optimizers"),
    [
        (1, 1, ["soap"]),
        (2, 1, ["adamw"]),
        (3, 1, list(OPTIMIZERS)),
        (4, 2, ["shampoo"]),
        (8, 1, ["muon"]),
    ],
)
def test_other_ranks_and_replicas_go_on_alike(
    workplace: Path,
    uninterrupted: dict[str, list[float]],
    world_size: int,
    replicas: int,
    optimizers: list[str],
) -> None:
    found = resumed(workplace, f"{world_size}x{replicas}", world_size, optimizers, replicas)
    for optimizer, losses in found.items():
        tolerance = SOAP_TOLERANCE if optimizer == "soap" else TOLERANCE
        expected = uninterrupted[optimizer][SAVED_AT:]
        assert len(losses) == STEPS - SAVED_AT
        assert losses == pytest.approx(expected, abs=tolerance, rel=0), optimizer
