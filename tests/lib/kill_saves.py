"""Kill jobs with SIGKILL at random moments, saves included, and resume them.

No complete checkpoint may be lost. A short version is in the suite. These are the long ones:

    python -m tests.lib.kill_saves --rounds 50           # a job that does nothing but save
    python -m tests.lib.kill_saves --rounds 50 --train   # real training, saving after every step

Every second round saves in the background. The first kind checks each value that it loads. The
second ends with a run that was never killed: its weights and optimizer state must be bitwise
identical.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

from matrixtitan.checkpoint.folder import list_steps, step_folder
from matrixtitan.config import (
    Config,
    DataConfig,
    LRSchedulerConfig,
    MetricsConfig,
    TrainingConfig,
)
from tests.lib.checkpoint_fakes import FakeRun, run_config
from tests.lib.distributed import PRELOAD

AsyncMode = Literal["disabled", "async"]
Job = Callable[[str, AsyncMode, int], None]


@dataclass
class Report:
    rounds: int
    last_step: int
    interrupted_saves: int


def save_forever(folder: str, async_mode: AsyncMode, _: int) -> None:
    """A job whose values at each step are known."""
    import torch.distributed as dist

    from matrixtitan.checkpoint import Checkpointer, TrainState

    rank = dist.get_rank()
    run = FakeRun(rank, dist.get_world_size(), filled=False)
    config = run_config(folder, async_mode=async_mode, keep_latest_k=2, interval=1)
    checkpointer = Checkpointer(config, run, run)  # type: ignore[arg-type]
    state = checkpointer.load() or TrainState()
    if state.step:
        run.check(float(state.step))
    _note(folder, rank, state.step)
    while True:
        state = TrainState(state.step + 1)
        run.fill(float(state.step))
        checkpointer.save(state.step, state)
        run.fill(-1.0)


def train(folder: str, async_mode: AsyncMode, steps: int) -> None:
    """Real training of `steps` steps with Muon on the standard library's text."""
    from matrixtitan.trainer import Trainer

    with Trainer(training_config(folder, async_mode, steps)) as trainer:
        _note(folder, trainer.world.rank, trainer.state.step)
        trainer.train()


def training_config(folder: str, async_mode: AsyncMode, steps: int) -> Config:
    return replace(
        run_config(folder, async_mode=async_mode, interval=1, keep_latest_k=2),
        data=DataConfig(num_workers=0),
        training=TrainingConfig(
            global_batch_size=4,
            local_batch_size=1,
            seq_len=16,
            steps=steps,
            mixed_precision_param="float32",
        ),
        lr_scheduler=LRSchedulerConfig(warmup_steps=2, total_steps=10_000),
        metrics=MetricsConfig(enable_tensorboard=False),
    )


def _note(folder: str, rank: int, step: int) -> None:
    """What was loaded, for the process that kills."""
    if rank == 0:
        with Path(folder, "loaded").open("a") as notes:
            notes.write(f"{step}\n")


def _loaded(folder: Path) -> list[int]:
    path = folder / "loaded"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def newest(folder: Path) -> int:
    complete, _ = list_steps(folder / "checkpoint")
    return complete[0] if complete else 0


def _run_rank(
    job: Job, folder: str, mode: AsyncMode, steps: int, rank: int, world_size: int, store: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    job(folder, mode, steps)
    dist.barrier()
    dist.destroy_process_group()


def start(
    job: Job, folder: Path, mode: AsyncMode, steps: int, world_size: int, store: str
) -> list[ForkServerProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = [
        context.Process(
            target=_run_rank, args=(job, str(folder), mode, steps, rank, world_size, store)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def kill_and_resume(
    job: Job, folder: Path, rounds: int, world_size: int, seed: int, longest: float = 0.5
) -> Report:
    """AssertionError if a job ends by itself, or does not resume from the newest complete
    checkpoint.

    `longest` is how many seconds a job lives at most after it has loaded.
    """
    generator = random.Random(seed)
    interrupted = 0
    for number in range(rounds):
        complete, before = newest(folder), len(_loaded(folder))
        mode: AsyncMode = "async" if number % 2 else "disabled"
        with tempfile.TemporaryDirectory() as rendezvous:
            processes = start(
                job, folder, mode, 10_000, world_size, os.path.join(rendezvous, "store")
            )
            try:
                _wait_for_load(folder, before, processes)
                time.sleep(generator.uniform(0.0, longest))
            finally:
                for process in generator.sample(processes, world_size):
                    process.kill()
                for process in processes:
                    process.join()
        loaded = _loaded(folder)[before]
        assert loaded == complete, f"round {number}: {complete} was complete, {loaded} was loaded"
        assert newest(folder) >= complete, f"round {number}: step {complete} was lost"
        interrupted += any((folder / "checkpoint").glob("*.writing"))
    return Report(rounds, newest(folder), interrupted)


def _wait_for_load(folder: Path, before: int, processes: list[ForkServerProcess]) -> None:
    deadline = time.monotonic() + 90
    while len(_loaded(folder)) == before:
        dead = [process.exitcode for process in processes if process.exitcode is not None]
        assert not dead, f"a resumed job ended by itself, exit codes {dead}"
        assert time.monotonic() < deadline, "a resumed job did not load within 90 s"
        time.sleep(0.005)


def compare_with_uninterrupted(folder: Path, never_killed: Path, world_size: int) -> int:
    """Train both to the same step, and require bitwise identical tensors; return how many there
    are.
    """
    import torch

    from matrixtitan.checkpoint import StoredCheckpoint

    steps = newest(folder) + 2
    for path in (folder, never_killed):
        with tempfile.TemporaryDirectory() as rendezvous:
            store = os.path.join(rendezvous, "store")
            for process in start(train, path, "disabled", steps, world_size, store):
                process.join()
                assert process.exitcode == 0
    killed, whole = (
        StoredCheckpoint.open(step_folder(path / "checkpoint", steps))
        for path in (folder, never_killed)
    )
    assert killed.tensors.keys() == whole.tensors.keys()
    for key in whole.tensors:
        assert torch.equal(killed.read(key).nan_to_num(), whole.read(key).nan_to_num()), key
    return len(whole.tensors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help="real training")
    options = parser.parse_args()
    job = train if options.train else save_forever
    longest = 2.0 if options.train else 0.5
    with tempfile.TemporaryDirectory() as scratch:
        killed, whole = Path(scratch, "killed"), Path(scratch, "whole")
        for path in (killed, whole):
            path.mkdir()
        print(kill_and_resume(job, killed, options.rounds, options.ranks, options.seed, longest))
        if options.train:
            count = compare_with_uninterrupted(killed, whole, options.ranks)
            print(f"{count} tensors are those of a run that was never killed, to the bit")


if __name__ == "__main__":
    main()
