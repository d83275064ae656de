"""Kill a job that does nothing but save, at random moments, and resume it: no complete checkpoint may be lost.

The short version is in the suite; the long one: `python -m tests.lib.kill_saves --rounds 50`. Every second round saves
in the background. Each resumed job checks all values that it loaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tests.lib.checkpoint_fakes import FakeRun, run_config
from tests.lib.distributed import PRELOAD


@dataclass
class Report:
    rounds: int
    last_step: int
    interrupted_saves: int


def _save_forever(folder: str, rank: int, world_size: int, store: str, async_mode: str) -> None:
    import torch
    import torch.distributed as dist

    from matrixtitan.checkpoint import Checkpointer, TrainState

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    run = FakeRun(rank, world_size, filled=False)
    config = run_config(folder, async_mode=async_mode, keep_latest_k=2, interval=1)
    checkpointer = Checkpointer(config.checkpoint, config, run, run)  # type: ignore[arg-type]
    state = checkpointer.load() or TrainState()
    if state.step:
        run.check(float(state.step))
    if rank == 0:
        _note(folder, "loaded", state.step)
    while True:
        state = TrainState(state.step + 1)
        run.fill(float(state.step))
        checkpointer.save(state.step, state)
        run.fill(-1.0)
        checkpointer.wait()
        if rank == 0:
            _note(folder, "saved", state.step)


def _note(folder: str, what: str, step: int) -> None:
    with Path(folder, "notes").open("a") as notes:
        notes.write(f"{what} {step}\n")


def _notes(folder: Path) -> list[tuple[str, int]]:
    path = folder / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(what, int(step)) for what, step in (line.split() for line in lines)]


def kill_and_resume(folder: Path, rounds: int, world_size: int, seed: int) -> Report:
    """AssertionError if a resumed job does not start from the newest checkpoint that was known to be complete."""
    generator = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    known, interrupted = 0, 0
    for number in range(rounds):
        before = len(_notes(folder))
        with tempfile.TemporaryDirectory() as rendezvous:
            store = os.path.join(rendezvous, "store")
            mode = ("disabled", "async")[number % 2]
            processes = [
                context.Process(
                    target=_save_forever, args=(str(folder), rank, world_size, store, mode)
                )
                for rank in range(world_size)
            ]
            for process in processes:
                process.start()
            try:
                _wait_for_load(folder, before, processes)
                time.sleep(generator.uniform(0.0, 0.5))
            finally:
                for process in generator.sample(processes, world_size):
                    process.kill()
                for process in processes:
                    process.join()
        notes = _notes(folder)[before:]
        loaded = notes[0][1]
        assert loaded in (known, known + 1), (
            f"round {number}: step {known} was complete, but {loaded} was loaded"
        )
        known = notes[-1][1]
        interrupted += any((folder / "checkpoint").glob("*.writing"))
    return Report(rounds, known, interrupted)


def _wait_for_load(folder: Path, before: int, processes: list) -> None:  # type: ignore[type-arg]
    deadline = time.monotonic() + 60
    while len(_notes(folder)) == before:
        dead = [process.exitcode for process in processes if process.exitcode is not None]
        assert not dead, f"a resumed job ended by itself, exit codes {dead}"
        assert time.monotonic() < deadline, "a resumed job did not load within 60 s"
        time.sleep(0.005)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(kill_and_resume(Path(scratch), arguments.rounds, arguments.ranks, arguments.seed))
