"""Real runs of every optimizer on other numbers of ranks, resumed too; restarts by the launcher."""

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
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from matrixtitan.checkpoint.folder import list_steps
from matrixtitan.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DataSource,
    DebugConfig,
    JobConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from matrixtitan.data.tokenizer import write_ranks
from matrixtitan.rules import ShampooRule, SOAPRule
from matrixtitan.trainer import Trainer
from models.llama import LLAMA3_FLAVORS, LlamaFlavor
from tests.lib.distributed import run_distributed

SAVED_AT, STEPS = 10, 20
TOLERANCE = 5e-5
SOAP_BAND = 2e-3
"""The eigenbases of rank-deficient factors depend on rounding. `test_band_of_soap` measured
differences of at most 8e-4.
"""
OPTIMIZERS = {
    "muon": OptimizerConfig(name="muon"),
    "adamw": OptimizerConfig(name="adamw", lr=1e-3),
    "shampoo": OptimizerConfig(
        name="shampoo", lr=1e-3, rule=ShampooRule(precondition_frequency=4, max_precond_dim=128)
    ),
    "soap": OptimizerConfig(
        name="soap", lr=1e-3, rule=SOAPRule(precondition_frequency=2, max_precond_dim=128)
    ),
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
        lr_scheduler=LRSchedulerConfig(warmup_steps=2, total_steps=STEPS),
        parallelism=ParallelismConfig(data_parallel_replicate_degree=replicas),
        checkpoint=CheckpointConfig(enable=True, interval=SAVED_AT, keep_latest_k=0),
        metrics=MetricsConfig(log_freq=1, enable_tensorboard=False),
    )


def losses_of(*configs: Config, save_first: bool = False) -> list[list[float]]:
    """The losses of each run, one run after the other.

    With `save_first`, what was loaded is saved again before training.
    """
    found = []
    for config in configs:
        losses: list[float] = []
        with Trainer(config) as trainer:
            if save_first:
                trainer.checkpointer.save(trainer.state.step, trainer.state)
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
    """The losses of runs on 4 ranks, which leave checkpoints of step SAVED_AT."""
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


def assert_alike(losses: list[float], expected: list[float], optimizer: str) -> None:
    band = SOAP_BAND if optimizer == "soap" else TOLERANCE
    assert losses == pytest.approx(expected, abs=band, rel=0), optimizer


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
        assert_alike(losses, uninterrupted[optimizer][SAVED_AT:], optimizer)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_do_not_depend_on_the_number_of_ranks(
    workplace: Path, uninterrupted: dict[str, list[float]], world_size: int
) -> None:
    folder = workplace / f"from the start on {world_size}"
    configs = [
        replace(config_of(folder, optimizer, world_size), checkpoint=CheckpointConfig())
        for optimizer in OPTIMIZERS
    ]
    found = run_distributed(losses_of, world_size, *configs, timeout=150)[0]
    for (optimizer, expected), losses in zip(uninterrupted.items(), found, strict=True):
        assert_alike(losses, expected, optimizer)


@pytest.mark.measure
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("batch", "seq_len"), [(12, 4), (24, 16), (24, 64)])
def test_band_of_soap(workplace: Path, batch: int, seq_len: int, seed: int) -> None:
    """With few tokens all factors are rank-deficient. Run with -s to see the figures of
    docs/optimizers.md.
    """
    losses = []
    for world_size in (1, 2, 3, 4):
        config = config_of(workplace / f"{batch} {seq_len} {seed}", "soap", world_size)
        training = replace(
            config.training,
            global_batch_size=batch,
            local_batch_size=batch // world_size,
            seq_len=seq_len,
        )
        config = replace(
            config,
            training=training,
            # both sides of every matrix
            optimizer=replace(
                config.optimizer, rule=replace(config.optimizer.rule, max_precond_dim=8192)
            ),
            checkpoint=CheckpointConfig(),
            debug=DebugConfig(seed=seed),
        )
        losses.append(torch.tensor(run_distributed(losses_of, world_size, config)[0][0]))
    worst = (torch.stack(losses) - losses[0]).abs().max()
    print(f"{batch * seq_len} tokens, seed {seed}: {worst:.1e}")
    assert worst <= SOAP_BAND


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint that does not belong to a rank: weights, optimizer state,
    counters.
    """
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("random.")
    }
    dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors


def test_state_survives_four_two_three_ranks(
    workplace: Path, uninterrupted: dict[str, list[float]]
) -> None:
    """What is loaded and saved again is bitwise identical.

    If trained on instead, the losses are as without a stop.
    """
    middle = (SAVED_AT + STEPS) // 2
    losses: dict[str, list[float]] = {optimizer: [] for optimizer in OPTIMIZERS}
    previous, at = workplace / "whole", SAVED_AT
    for world_size, until in ((2, middle), (3, STEPS)):
        folder = workplace / f"passed on to {world_size}"
        for optimizer in OPTIMIZERS:
            step = Path(optimizer, "checkpoint", f"step-{at}")
            shutil.copytree(previous / step, folder / step)
        configs = [config_of(folder, optimizer, world_size) for optimizer in OPTIMIZERS]
        configs = [replace(c, training=replace(c.training, steps=until)) for c in configs]
        run = partial(losses_of, save_first=True)
        found = run_distributed(run, world_size, *configs, timeout=150)[0]
        for optimizer, part in zip(OPTIMIZERS, found, strict=True):
            losses[optimizer] += part
            step = Path(optimizer, "checkpoint", f"step-{at}")
            before, after = stored(previous / step), stored(folder / step)
            assert sum(name.startswith("optimizer.") for name in before) > 30
            assert before.keys() == after.keys()
            for name, tensor in before.items():
                assert torch.equal(tensor, after[name]), (optimizer, world_size, name)
        previous, at = folder, until
    for optimizer, expected in uninterrupted.items():
        assert_alike(losses[optimizer], expected[SAVED_AT:], optimizer)


# --- past the end of an epoch ---------------------------------------------------------------------


def tiny_run(folder: Path, num_workers: int, world_size: int) -> Config:
    """A very small model on 52 windows of bytes, of which a step takes 8."""
    config = config_of(folder, "adamw", world_size)
    model = ModelConfig(
        flavor="tiny",
        tokenizer_path=str(folder.parent / "bytes.tiktoken"),
        tokenizer_pattern="llama3",
    )
    source = DataSource(type="text", path=(str(folder.parent / "tiny.txt"),))
    return replace(
        config,
        model=model,
        data=replace(
            config.data, sources=(source,), num_workers=num_workers, validation_fraction=0.0
        ),
        training=replace(
            config.training,
            global_batch_size=8,
            # two microbatches, which share the step that ends an epoch
            local_batch_size=4 // world_size,
            steps=15,
        ),
        checkpoint=replace(config.checkpoint, interval=6),
    )


def losses_and_windows(*configs: Config) -> list[tuple[list[float], list[tuple[int, ...]]]]:
    """For each run, one after the other: the loss of every step, and this rank's windows."""
    LLAMA3_FLAVORS["tiny"] = LlamaFlavor(16, 1, 2, 1, 32)
    found = []
    for config in configs:
        losses: list[float] = []
        windows: list[tuple[int, ...]] = []
        with Trainer(config) as trainer:
            log_step, batches = trainer.metrics.log_step, trainer.batches

            def record(*args, **keys):  # type: ignore[no-untyped-def]
                report = log_step(*args, **keys)  # noqa: B023
                losses.append(report.loss)  # noqa: B023
                return report

            def seen():  # type: ignore[no-untyped-def]
                for tokens, labels in batches:  # noqa: B023
                    rows = torch.cat((tokens, labels[:, -1:]), dim=1)
                    windows.extend(map(tuple, rows.tolist()))  # noqa: B023
                    yield tokens, labels

            trainer.metrics.log_step = record  # type: ignore[method-assign]
            trainer.batches = seen()
            trainer.train()
        batches = iter(())  # the loader's workers end with it
        found.append((losses, windows))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_past_the_end_of_an_epoch_goes_on_to_the_bit(
    tmp_path: Path, world_size: int
) -> None:
    """Epochs end inside steps 7 and 13; the run stops after step 6 and resumes to step 15."""
    size = 52
    write_ranks(tmp_path / "bytes.tiktoken", [bytes([byte]) for byte in range(256)])
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (size * 16 - 1,), generator=generator)  # BOS, letters, EOS
    (tmp_path / "tiny.txt").write_bytes(bytes(letters.tolist()))
    whole = tiny_run(tmp_path / "whole", 0, world_size)
    resumed = tiny_run(tmp_path / "resumed", 0, world_size)
    stopped = replace(resumed, training=replace(resumed.training, steps=6))
    first, before = zip(
        *run_distributed(losses_and_windows, world_size, whole, stopped, timeout=90), strict=True
    )
    shutil.copytree(tmp_path / "resumed", tmp_path / "with workers")
    with_workers = tiny_run(tmp_path / "with workers", 2, world_size)
    after = run_distributed(losses_and_windows, world_size, resumed, with_workers, timeout=90)
    assert len(first[0][0]) == 15
    for rank in range(world_size):
        for losses, windows in after[rank]:
            assert before[rank][0] + losses == first[rank][0]
            assert before[rank][1] + windows == first[rank][1]

    stream = [256, *letters.tolist(), 257]
    expected = sorted(tuple(stream[16 * number : 16 * number + 17]) for number in range(size))
    assert len(set(expected)) == size
    half = 4 // world_size  # of a microbatch on each rank
    seen = [windows for _, windows in first]
    order = [
        row
        for start in range(0, len(seen[0]), half)
        for part in seen
        for row in part[start : start + half]
    ]
    assert sorted(order[:size]) == sorted(order[size : 2 * size]) == expected


# --- under the launcher ---------------------------------------------------------------------------


def launch(folder: Path, corpus: Path, steps: int, log: Path) -> subprocess.Popen[bytes]:
    """Two ranks under torchrun, one restart allowed, saving every second step."""
    keys = {
        "job.dump_folder": folder,
        "data.sources": f'[{{type = "text", path = ["{corpus}/*.txt"]}}]',
        "data.cache_dir": corpus,
        "data.num_workers": 1,  # which gets torchrun's SIGTERM too
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
