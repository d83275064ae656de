"""Checkpointer: saves and loads a run, whole or not at all, at any world size.

Owns the policy: when to save, which checkpoint to load, which to keep, and that all ranks have one
outcome. A save in the background runs the same code as one in the foreground, in a thread, on
copies in host memory. Its collectives have a gloo group of their own: on training's group they
would mix with training's collectives and deadlock. Next: `writing.py`, `reading.py`, and
`folder.py` for the life of a `step-N` folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from matrixtitan.checkpoint import folder as folders
from matrixtitan.checkpoint.collective import from_rank_0, on_all_ranks, reason_of
from matrixtitan.checkpoint.config_changes import changed_keys
from matrixtitan.checkpoint.errors import CheckpointError, CorruptCheckpointError
from matrixtitan.checkpoint.preemption import Preemption
from matrixtitan.checkpoint.rate_changes import rate_changes
from matrixtitan.checkpoint.reading import (
    CONFIG_FILE,
    FORMAT_VERSION,
    META_FILE,
    PLAN_FILE,
    StoredCheckpoint,
    find_checkpoint,
)
from matrixtitan.checkpoint.stager import HostStager
from matrixtitan.checkpoint.state import (
    Tensors,
    TrainState,
    cast_for_export,
    model_tensors,
    optimizer_tensors,
    random_tensors,
    require_finite,
    restore_random,
    train_state_from,
    train_state_tensors,
)
from matrixtitan.checkpoint.writing import write_checkpoint
from matrixtitan.config import Config, tables, upgraded
from matrixtitan.log import get_logger
from matrixtitan.optim.build import Optimizers
from matrixtitan.strategies.base import DataParallel

logger = get_logger()

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""How long a rank waits for another rank's slow disk."""
PROBE_SECONDS = 10.0
"""A network file system may show a new file to other machines only after some seconds."""


class Checkpointer:
    """Use it as a context manager, so that a background save ends before the process group does.

    With `checkpoint.enable` false it loads and saves nothing. Making one is collective, and so are
    all methods but `is_save_step` and `is_saved`. The whole `config` and the strategy's plan are
    saved beside the tensors, and a resume logs which keys of the config changed.

    `data_stream` (JSON values) describes the data and its order, which give a window's index its
    meaning. A resume with another description is refused, unless data.allow_data_change is true.

    Raises ValueError for a configuration that cannot work, and CheckpointError (a RuntimeError) for
    a load or a save that failed. Each is raised on all ranks.
    """

    def __init__(
        self,
        config: Config,
        strategy: DataParallel,
        optimizers: Optimizers,
        data_stream: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config.checkpoint
        self.folder = Path(config.job.dump_folder) / self.config.folder
        self._run = json.loads(json.dumps(tables(config)))
        self._strategy = strategy
        self._optimizers = optimizers
        self._data_stream = data_stream
        self._allow_data_change = config.data.allow_data_change
        self._saving: Future[Path] | None = None
        self._saving_step: int | None = None
        self._newest_saved: int | None = None
        self._ending = False
        """Whether the save under way is the run's last. If that fails, the run fails."""
        self._patience = config.comm.init_timeout_seconds
        self._preemption: Preemption | None = None
        self._lock: BinaryIO | None = None
        """Held by rank 0, so that no other run writes to the folder."""
        self._stager: HostStager | None = None
        self.patient_groups: list[dist.ProcessGroup] = []
        """Groups that wait for the slowest disk, and so keep a time limit of their own in training.
        """
        if not self.config.enable:
            return
        if self.config.async_mode != "disabled":
            self._stager = HostStager(pinned=self.config.async_mode == "async_with_pinned_mem")
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # One group for saving and loading, one for questions while a save is under way.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._patience))
        self.patient_groups.append(self._group)
        self._open_folder()
        self._preemption = Preemption()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close(None if error is None else self._patience)
        except Exception as failure:
            if error is None:
                raise
            # The first error is raised: it is often the cause of this one.
            logger.error("the checkpoint being saved is lost too: %s", reason_of(failure))

    def close(self, within: float | None = None) -> None:
        """Wait for a save under way, `within` seconds if given.

        Raises its failure according to checkpoint.on_error.
        """
        if self._preemption is not None:
            self._preemption.close()
        try:
            self.wait(within)
        finally:
            if self._lock is not None:
                self._lock.close()

    # --- saving -----------------------------------------------------------------------------------

    def is_save_step(self, step: int, last: bool = False) -> bool:
        return self.config.enable and (last or step % self.config.interval == 0)

    def maybe_save(
        self, step: int, state: TrainState, last: bool = False, now: bool = False
    ) -> float | None:
        """Save if it is time to, or at once if `now` (on pre-emption).

        Returns the pause of training in seconds, or None without a save.
        """
        if not self.is_save_step(step, last) and not (now and self.config.enable):
            return None
        return self.save(step, state, last, now)

    def save(self, step: int, state: TrainState, last: bool = False, now: bool = False) -> float:
        """Save `step`. Returns for how many seconds training stood still.

        Saves in the background if checkpoint.async_mode says so. The last save and one on
        pre-emption are always in the foreground. A save that is still under way is waited for
        first. An inf or nan in the weights or the optimizer state fails the save, so that older
        checkpoints stay to go back to.

        If checkpoint.on_error is "continue", a failure is logged. A failure of the last save is
        always raised.
        """
        started = time.perf_counter()
        if self._saving is not None and not self._saving.done() and self._rank == 0:
            logger.warning(
                "step %d: the save before is still under way; raise checkpoint.interval", step
            )
        self.wait()
        self._ending = last or now
        contents = "model" if last and not now and self.config.last_save_model_only else "full"
        tensors = self._collect(state, contents)
        try:
            on_all_ranks(self._group, f"saving step {step}", lambda: require_finite(tensors))
        except CheckpointError as error:
            self._stop_or_log(error)
            return time.perf_counter() - started
        side_files = self._side_files(state, contents)
        self._saving, self._saving_step = Future(), step
        if self._stager is None or last or now:
            _fulfil(self._saving, lambda: self._write(step, tensors, side_files))
            self.wait()
        else:
            staged, copied = self._stager.stage(tensors)

            # DCP waits for the current stream of the thread that calls it. In a new thread that
            # would be the default stream of GPU 0. None, on the CPU, changes nothing.
            stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None

            def write_copies() -> Path:
                with torch.cuda.stream(stream):
                    copied()
                    return self._write(step, staged, side_files)

            threading.Thread(
                target=_fulfil, args=(self._saving, write_copies), name="save", daemon=True
            ).start()
        pause = time.perf_counter() - started
        if self._rank == 0:
            logger.info("step %d: training paused for %.3f s to save", step, pause)
        return pause

    def before_update(self) -> None:
        """Call before weights or optimizer state change: copies of them may be under way."""
        if self._stager is not None:
            self._stager.before_change()

    def check_failure(self) -> None:
        """Raise or log the failure of a background save, once the save has ended on all ranks.

        Collective, between two steps: one tiny all-reduce while a save is under way, else nothing.
        """
        if self._saving is None:
            return
        ended = torch.tensor([int(self._saving.done())], dtype=torch.int32)
        dist.all_reduce(ended, op=dist.ReduceOp.MIN, group=self._control)
        if ended.item():
            self.wait()

    def preempted(self) -> bool:
        """Whether any rank was told to end. Collective: one tiny all-reduce."""
        return self._preemption is not None and self._preemption.agreed(self._control)

    def is_saved(self, step: int) -> bool:
        """Whether this run's newest complete checkpoint is of `step`; alike on all ranks."""
        return self._newest_saved == step

    def wait(self, within: float | None = None) -> None:
        """Return when no save is under way, with the same outcome on all ranks.

        Raises CheckpointError after `within` seconds, if given; only this may differ between ranks.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if not futures.wait([saving], within).done:
            raise CheckpointError(
                f"it was not written within {within} s (comm.init_timeout_seconds)"
            )
        try:
            saving.result()
            self._newest_saved = self._saving_step
        except CheckpointError as error:
            self._stop_or_log(error)

    def _stop_or_log(self, error: CheckpointError) -> None:
        if self.config.on_error == "stop" or self._ending:
            raise error
        if self._rank == 0:
            logger.error(
                "%s; training goes on without this checkpoint (checkpoint.on_error)", error
            )

    def _collect(self, state: TrainState, contents: str) -> Tensors:
        weights = model_tensors(self._strategy.local_parameters())
        if contents == "model":
            return cast_for_export(weights, getattr(torch, self.config.export_dtype))
        # parameters without a gradient so far have state too: a load wants all of it
        self._optimizers.allocate_state()
        tensors = {
            **weights,
            **optimizer_tensors(
                self._optimizers.state_tensors(), self._strategy.stepped_parameters()
            ),
            **random_tensors(self._rank),
        }
        if self._rank == 0:
            tensors.update(train_state_tensors(state))
        return tensors

    def _side_files(self, state: TrainState, contents: str) -> dict[str, bytes]:
        meta = {
            "format": FORMAT_VERSION,
            "contents": contents,
            "world_size": self._world_size,
            "torch": torch.__version__,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "train_state": dataclasses.asdict(state),
            "data_stream": self._data_stream,
        }
        files = {META_FILE: meta, CONFIG_FILE: self._run}
        if self._strategy.plan is not None:
            files[PLAN_FILE] = self._strategy.plan.to_json()
        return {name: json.dumps(content, indent=1).encode() for name, content in files.items()}

    def _write(self, step: int, tensors: Tensors, side_files: dict[str, bytes]) -> Path:
        started = time.perf_counter()
        path = write_checkpoint(self.folder, step, tensors, side_files, self._group)
        if self._rank == 0:
            logger.info("saved %s in %.3f s", path, time.perf_counter() - started)
            self._prune(step)
        return path

    def _prune(self, saved: int) -> None:
        """Delete all checkpoints but the newest checkpoint.keep_latest_k; 0 keeps all.

        A failure to delete is only logged.
        """
        if self.config.keep_latest_k == 0:
            return
        try:
            complete, _ = folders.list_steps(self.folder)
        except OSError as error:
            logger.warning("could not look for old checkpoints to delete: %s", error)
            return
        for step in complete[self.config.keep_latest_k :]:
            if step != saved:
                folders.discard(folders.step_folder(self.folder, step))

    # --- loading ----------------------------------------------------------------------------------

    def load(self) -> TrainState | None:
        """Load what the run continues from: its newest checkpoint, or checkpoint.initial_load_path.

        Fills weights and optimizer state in place. Returns None if there is nothing to load, or if
        only weights were loaded.
        """
        if not self.config.enable:
            return None
        self.wait()
        complete, incomplete = from_rank_0(
            self._group, f"listing {self.folder}", lambda: folders.list_steps(self.folder)
        )
        if incomplete and self._rank == 0:
            logger.warning(
                "skipping incomplete checkpoints in %s: %s", self.folder, ", ".join(incomplete)
            )
        if self.config.load_step >= 0:
            return self._load_step(self.config.load_step, complete)
        if complete:
            return self._load_newest(complete)
        if self.config.initial_load_path:
            return self._load_initial()
        return None

    def _load_step(self, step: int, complete: list[int]) -> TrainState | None:
        if step not in complete:
            raise ValueError(
                f"checkpoint.load_step is {step}, but the steps with complete checkpoints in "
                f"{self.folder} are {complete[::-1]}"
            )
        if complete[0] > step and self._rank == 0:
            logger.warning(
                "going back to step %d; step-%d stays until it is replaced", step, complete[0]
            )
        stored = self._open(folders.step_folder(self.folder, step))
        if stored.meta["contents"] != "full":
            raise ValueError(
                f"{stored.path} has the model only, no optimizer state: choose another "
                "checkpoint.load_step, or start a new run from it with "
                "checkpoint.initial_load_path"
            )
        return self._resume(stored)

    def _load_newest(self, complete: list[int]) -> TrainState | None:
        for step in complete:
            try:
                stored = self._open(folders.step_folder(self.folder, step))
                if stored.meta["contents"] == "full":
                    return self._resume(stored)
                if self._rank == 0:
                    logger.warning(
                        "skipping %s: it has the model only, no optimizer state", stored.path
                    )
            except CorruptCheckpointError as error:
                if not self.config.skip_corrupt:
                    raise CorruptCheckpointError(
                        f"{error}. To fall back to an older one, set checkpoint.skip_corrupt = true"
                    ) from error
                if self._rank == 0:
                    logger.error("skipping a damaged checkpoint: %s", error)
        raise CheckpointError(
            f"none of the checkpoints in {self.folder} can be resumed from (steps "
            f"{complete[::-1]}); to start afresh, choose another checkpoint.folder"
        )

    def _resume(self, stored: StoredCheckpoint) -> TrainState | None:
        saved = upgraded(
            on_all_ranks(
                self._group, f"resuming from {stored.path}", lambda: stored.read_json(CONFIG_FILE)
            )
        )
        changes = changed_keys(saved, self._run)
        if changes and self._rank == 0:
            logger.warning(
                "the configuration changed since %s: %s", stored.path.name, "; ".join(changes)
            )
        self._check_data(stored)
        state = self._load_from(stored, model_only=False)
        if state is not None and self._rank == 0:
            for line in rate_changes(saved, self._run, stored.path.name, state.step + 1):
                logger.warning("%s", line)
        return state

    def _check_data(self, stored: StoredCheckpoint) -> None:
        """Refuse a resume if the data changed so that the next batch would differ.

        Data is compared by content, so files may have moved.
        """
        before = stored.meta.get("data_stream")
        if before is None or self._data_stream is None:
            if self._rank == 0:
                logger.warning("%s: whether the data changed since cannot be told", stored.path)
            return
        changes = "; ".join(changed_keys(before, self._data_stream))
        if not changes:
            return
        message = (
            f"the data is not what {stored.path} had read ({changes}), so the next window is other "
            "text"
        )
        if not self._allow_data_change:
            raise ValueError(
                f"{message}. Put the data and the settings back, or go on with "
                "data.allow_data_change = true"
            )
        if self._rank == 0:
            logger.warning("%s; going on with it (data.allow_data_change)", message)

    def _load_initial(self) -> TrainState | None:
        given = Path(self.config.initial_load_path)
        path = from_rank_0(
            self._group, "checkpoint.initial_load_path", lambda: find_checkpoint(given)
        )
        stored = self._open(path, allow_foreign=True)
        if stored.meta.get("contents") == "full" and not self.config.initial_load_model_only:
            # so this run goes on at the step and window of that run
            return self._resume(stored)
        return self._load_from(stored, self.config.initial_load_model_only)

    def _open(self, path: Path, allow_foreign: bool = False) -> StoredCheckpoint:
        return on_all_ranks(
            self._group,
            f"opening {path}",
            lambda: StoredCheckpoint.open(path, allow_foreign=allow_foreign),
        )

    def _load_from(self, stored: StoredCheckpoint, model_only: bool) -> TrainState | None:
        if stored.checksums is None and self._rank == 0:
            logger.warning("%s has no checksums: damage to it cannot be noticed", stored.path)
        wanted = self._wanted(stored, model_only)
        excluded = self._excluded(stored, self._asked(wanted), model_only)
        tensors = {key: tensor for key, tensor in wanted.items() if key not in excluded}
        stored.load(tensors, self._group)
        if f"random.{self._rank}.torch_cpu" in tensors:
            restore_random(tensors, self._rank)
        state = train_state_from(tensors) if "train_state.step" in tensors else None
        if self._rank == 0:
            logger.info(
                "loaded %s%s",
                stored.path,
                f": step {state.step}" if state else ", without its step",
            )
        return state

    def _wanted(self, stored: StoredCheckpoint, model_only: bool) -> Tensors:
        """All tensors that this rank could fill."""
        weights = model_tensors(self._strategy.local_parameters())
        if model_only:
            return weights
        self._optimizers.allocate_state()  # DCP loads in place
        wanted = {
            **weights,
            **optimizer_tensors(
                self._optimizers.state_tensors(), self._strategy.stepped_parameters()
            ),
            **train_state_tensors(TrainState()),
        }
        if stored.meta.get("world_size") == self._world_size:
            generators = random_tensors(self._rank)
            on_gpu = f"random.{self._rank}.torch_cuda"
            if on_gpu not in stored.tensors:  # saved on a CPU
                generators.pop(on_gpu, None)
            wanted.update(generators)
        elif self._rank == 0:
            logger.info("random generators start from the seed: the number of ranks changed")
        return wanted

    def _asked(self, wanted: Tensors) -> set[str]:
        """Collective: the keys that any rank could fill."""
        everyone: list[list[str]] = [[] for _ in range(self._world_size)]
        dist.all_gather_object(everyone, list(wanted), group=self._group)
        return {key for keys in everyone for key in keys}

    def _excluded(self, stored: StoredCheckpoint, asked: set[str], model_only: bool) -> set[str]:
        """The keys that checkpoint.exclude_from_loading names; the same on all ranks.

        A pattern is a section, a prefix up to a dot, or a name with wildcards. A stored weight or
        state that no rank asks for means another model or optimizer: CheckpointError, unless a
        pattern matches it.
        """
        patterns = self.config.exclude_from_loading
        known = asked | stored.tensors.keys()
        for pattern in patterns:
            if not any(_matches(key, pattern) for key in known):
                raise ValueError(
                    f"checkpoint.exclude_from_loading: {pattern!r} matches nothing in {stored.path}"
                )
        excluded = {key for key in known if any(_matches(key, pattern) for pattern in patterns)}
        sections = ("model.",) if model_only else ("model.", "optimizer.")
        placed = {stored.stored_key(key) for key in asked}
        extra = [
            key
            for key in stored.tensors
            if key.startswith(sections) and key not in placed | excluded
        ]
        if extra:
            raise CheckpointError(
                f"{stored.path} holds {len(extra)} tensors that this run has no place for, "
                f"{extra[0]} first: another model or optimizer. To leave them out, name them in "
                "checkpoint.exclude_from_loading"
            )
        return excluded

    # --- the folder -------------------------------------------------------------------------------

    def _open_folder(self) -> None:
        """Make the folder, clear what a killed job left, check that all ranks see one folder."""

        def prepare() -> str:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = folders.lock(self.folder)
            for line in folders.recover(self.folder):
                logger.warning("%s: %s", self.folder, line)
            probe = self.folder / f"{folders.PROBE}{uuid.uuid4().hex}"
            folders.write_file(probe, b"")
            return probe.name

        name = from_rank_0(self._group, f"preparing checkpoint.folder {self.folder}", prepare)
        try:
            on_all_ranks(
                self._group,
                "checking that all ranks share checkpoint.folder",
                lambda: self._see(name),
            )
        finally:
            if self._rank == 0:
                folders.unlink_probe(self.folder / name)

    def _see(self, name: str) -> None:
        deadline = time.monotonic() + PROBE_SECONDS
        while name not in (path.name for path in self.folder.glob(f"{folders.PROBE}*")):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.folder} on {os.uname().nodename} is not the folder that rank 0 sees; "
                    "put job.dump_folder on a file system that all machines share"
                )
            time.sleep(0.1)


def _fulfil(future: Future[Path], act: Callable[[], Path]) -> None:
    try:
        future.set_result(act())
    # whoever waits for the future raises it
    except BaseException as error:
        future.set_exception(error)


def _matches(key: str, pattern: str) -> bool:
    return key == pattern or key.startswith(f"{pattern}.") or fnmatchcase(key, pattern)
