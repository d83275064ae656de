"""Real runs resumed: every optimizer, other numbers of ranks and layouts, restarts by the launcher."""

from __future__ import annotations

import email
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from matrixtitan.checkpoint.folder import list_steps
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
OPTIMIZERS = {
    "muon": OptimizerConfig(name="muon"),
    "adamw": OptimizerConfig(name="adamw", lr=1e-3),
    "shampoo": OptimizerConfig(name="shampoo", lr=1e-3, precondition_frequency=2),
    "soap": OptimizerConfig(name="soap", lr=1e-3, precondition_frequency=2),
}


def config_of(folder: Path, optimizer: str, world_size: int, replicas: int = 1) -> Config:
    return Config(
        job=JobConfig(dump_folder=str(folder / optimizer)),
        data=DataConfig(
            sources=(DataSource(type="text", path=(str(folder.parent / "corpus" / "*.txt"),)),),
            cache_dir=str(folder.parent / "corpus"),
            num_workers=0,
        ),
        training=TrainingConfig(
            global_batch_size=24,
            local_batch_size=24 // world_size,  # one microbatch: fewer collectives, a faster test
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
    configs = [config_of(workplace / "whole", optimizer, 4) for optimizer in OPTIMIZERS]
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
    configs = [
        config_of(workplace / name, optimizer, world_size, replicas) for optimizer in optimizers
    ]
    configs = [replace(c, checkpoint=replace(c.checkpoint, interval=1000)) for c in configs]
    losses = run_distributed(losses_of, world_size, *configs, timeout=150)[0]
    return dict(zip(optimizers, losses, strict=True))


def test_the_same_ranks_go_on_to_the_bit(
    workplace: Path, uninterrupted: dict[str, list[float]]
) -> None:
    for optimizer, losses in resumed(workplace, "same", 4, list(OPTIMIZERS)).items():
        assert losses == uninterrupted[optimizer][SAVED_AT:], optimizer


@pytest.mark.parametrize(
    ("world_size", "replicas"),
    [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (8, 1),
    ],
)
def test_other_ranks_and_replicas_go_on_alike(
    workplace: Path,
    uninterrupted: dict[str, list[float]],
    world_size: int,
    replicas: int,
) -> None:
    found = resumed(workplace, f"{world_size}x{replicas}", world_size, list(OPTIMIZERS), replicas)
    for optimizer, losses in found.items():
        expected = uninterrupted[optimizer][SAVED_AT:]
        assert len(losses) == STEPS - SAVED_AT
        assert losses == pytest.approx(expected, abs=TOLERANCE, rel=0), optimizer


# --- under the launcher ---------------------------------------------------------------------------


def launch(folder: Path, corpus: Path, steps: int, log: Path) -> subprocess.Popen[bytes]:
    """Two ranks under torchrun, one restart allowed, saving every second step."""
    keys = {
        "job.dump_folder": folder,
        "data.sources": f'[{{type = "text", path = ["{corpus}/*.txt"]}}]',
        "data.cache_dir": corpus,
        "data.num_workers": 0,
        "validation.enable": "false",
        "training.global_batch_size": 4,
        "training.local_batch_size": 1,
        "training.seq_len": 16,
        "training.steps": steps,
        "lr_scheduler.total_steps": 100,
        "lr_scheduler.warmup_steps": 2,
        "checkpoint.enable": "true",
        "checkpoint.interval": 2,
        "checkpoint.async_mode": "async",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*torchrun, "--local-addr", "127.0.0.1", "--max-restarts", "1", "train.py"]
    command += [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    # The store that torchrun shares with its workers outlives a restart, and with it the addresses
    # of the dead ones: gloo then connects to nobody. Without sharing each round has a new one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parents[2],
            stdout=output,
            stderr=output,
            env=environment,
        )


def newest(folder: Path) -> int:
    complete, _ = list_steps(folder / "checkpoint")
    return complete[0] if complete else 0


def wait_for_step(folder: Path, step: int, launcher: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while newest(folder) < step:
        assert launcher.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_preempted_and_killed_under_torchrun_nothing_complete_is_lost(
    workplace: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    launcher = launch(folder, workplace / "corpus", 100, log)
    try:
        wait_for_step(folder, 2, launcher, log)
        launcher.send_signal(signal.SIGTERM)  # pre-emption: torchrun passes it on, then waits 30 s
        launcher.wait(timeout=30)
        saved = newest(folder)
        assert f"step {saved}: told to end" in log.read_text()

        launcher = launch(folder, workplace / "corpus", saved + 9, log)
        wait_for_step(folder, saved + 4, launcher, log)
        os.kill(children(launcher.pid)[0], signal.SIGKILL)  # torchrun restarts both ranks
        assert launcher.wait(timeout=90) == 0, log.read_text()
    finally:
        launcher.terminate()
        launcher.wait(timeout=40)
    assert newest(folder) == saved + 9
    loaded = re.findall(r"loaded \S+: step (\d+)", log.read_text())
    assert int(loaded[0]) == saved
    assert int(loaded[1]) >= saved + 4
