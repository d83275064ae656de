"""Traces and memory snapshots of a training run, every profile_freq steps; off by default.

Owns `torch.profiler`'s schedule and the history of the CUDA allocator. In job.dump_folder it writes
profile_traces/step_N/rank_R.json (open it in https://ui.perfetto.dev) and
memory_snapshot/step_N/rank_R.pickle (open it in https://pytorch.org/memory_viz). Next:
`trainer.py`, which calls `step()` once per step.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import TracebackType

import torch

from matrixtitan.config import ProfilingConfig
from matrixtitan.log import get_logger

logger = get_logger()

# the profiler's start-up cost falls into these steps, which are dropped
WARMUP_STEPS = 3
ACTIVE_STEPS = 1
# allocator events that are kept; a step of a large model makes some ten thousand
MAX_SNAPSHOT_EVENTS = 100_000


class Profiler:
    """A context manager around the training loop. Does nothing unless the config turns it on.

    `start_step` is the number of steps done before this run: files are named by the true step.
    """

    def __init__(
        self, config: ProfilingConfig, dump_folder: Path, rank: int, start_step: int = 0
    ) -> None:
        config.require("profiling.")
        self._traces: Path | None = None
        self._snapshots: Path | None = None
        if config.enable_profiling:
            self._traces = dump_folder / config.save_traces_folder
        if config.enable_memory_snapshot:
            if not torch.cuda.is_available():
                raise ValueError(
                    "profiling.enable_memory_snapshot records the CUDA allocator and this machine "
                    "has no CUDA device: set it to false, or use profiling.enable_profiling"
                )
            self._snapshots = dump_folder / config.save_memory_snapshot_folder
        self._freq = config.profile_freq
        self._rank = rank
        self._step = start_step
        self._profile = self._make_profile() if self._traces else None

    def _make_profile(self) -> torch.profiler.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=self._freq - WARMUP_STEPS - ACTIVE_STEPS,
                warmup=WARMUP_STEPS,
                active=ACTIVE_STEPS,
            ),
            on_trace_ready=self._write_trace,
            record_shapes=True,
        )

    def _write_trace(self, profile: torch.profiler.profile) -> None:
        assert self._traces is not None
        path = self._traces / f"step_{self._step}" / f"rank_{self._rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        logger.info("profiler trace written to %s", path)

    def _write_snapshot(self, name: str) -> None:
        assert self._snapshots is not None
        path = self._snapshots / name / f"rank_{self._rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file)
        logger.info("memory snapshot written to %s", path)

    def __enter__(self) -> Profiler:
        if self._profile:
            self._profile.__enter__()
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=MAX_SNAPSHOT_EVENTS)
        return self

    def step(self) -> None:
        """Call at the end of each step."""
        self._step += 1
        if self._profile:
            self._profile.step()
        if self._snapshots and self._step % self._freq == 0:
            self._write_snapshot(f"step_{self._step}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._snapshots:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot(f"step_{self._step + 1}_out_of_memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._profile:
            self._profile.__exit__(kind, error, trace)
