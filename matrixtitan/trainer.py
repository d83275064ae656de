"""One training run: build everything in order, then the loop.

`Trainer.__init__` reads as the list of parts and `Trainer.train` as the phases of a step: data, forward and backward,
optimizer, log, validate, save. Owns the order of things and the train state (step, window, tokens); every part's own
logic is in its own file. Next file: `assemble.py`.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from matrixtitan.assemble import assemble
from matrixtitan.checkpoint import Checkpointer, TrainState
from matrixtitan.checkpoint.config_changes import changed_keys
from matrixtitan.config import Config, to_toml
from matrixtitan.data.dataloader import (
    build_dataloader,
    build_validation_loader,
    open_sources,
    stream_fingerprint,
)
from matrixtitan.data.tokenizer import load_tokenizer
from matrixtitan.log import get_logger
from matrixtitan.mesh import init_world, set_seeds
from matrixtitan.metrics import Metrics, memory_figures, memory_text
from matrixtitan.mistakes import is_mistake
from matrixtitan.optim.lr_schedule import LRSchedule
from matrixtitan.profiler import Profiler
from matrixtitan.ranks import split_batch
from matrixtitan.stuck_weights import StuckWeights
from models.output_head import IGNORE_INDEX

logger = get_logger()
T = TypeVar("T")


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not a number; raised on all ranks, before the update."""


class Trainer:
    """A whole run; use it as a context manager, so that loaders, writers and the process group end with it.

    ValueError for a config that cannot work here, RuntimeError when training cannot go on.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._closing = ExitStack()
        try:
            self._build()
        except BaseException:
            self._closing.__exit__(*sys.exc_info())
            raise

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def _build(self) -> None:
        config, training = self.config, self.config.training

        # Processes: a group over all ranks and its (replicate, shard) mesh
        self.world = self._closing.enter_context(init_world(config))
        self.device = self.world.device
        set_seeds(config.debug)
        self.dump_folder = Path(config.job.dump_folder)
        self.batch_split = split_batch(training, self.world.size)
        self._everywhere(self._make_dump_folder)
        self.tokens_per_step = training.global_batch_size * training.seq_len
        self.tokenizer = self._everywhere(
            lambda: load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_pattern)
        )

        # Model, made data-parallel, with this rank's part of the weights; optimizers and schedule
        self.model, self.strategy, self.optimizers = assemble(
            config, self.tokenizer.n_words, self.world
        )
        self._closing.callback(self.strategy.close)
        self.schedule = LRSchedule(config.lr_scheduler, self.optimizers, training.steps)

        # Data: tokenised here unless it was before, and only now that the model is known to work
        sources = self._everywhere(
            lambda: open_sources(config.data, self.tokenizer), "tokenise data.sources"
        )
        data_stream = stream_fingerprint(config, self.tokenizer, sources)
        self._agree_on(data_stream)

        # Where to start from, and the data from there on
        self.checkpointer = self._closing.enter_context(
            Checkpointer(
                config.checkpoint,
                config,
                self.strategy,
                self.optimizers,
                self.strategy.plan,
                data_stream,
            )
        )
        self.state = self.checkpointer.load() or TrainState()
        self._consecutive_skips = 0
        self.stuck_weights = StuckWeights(config, self.strategy, self.state.step + 1)
        place = (config, sources, self.world.rank, self.world.size)
        self.batches = iter(build_dataloader(*place, start_window=self.state.window))
        self._closing.callback(self._stop_reading)
        self.validation_batches = (
            build_validation_loader(*place) if config.validation.enable else None
        )

        # Reports
        self.metrics = Metrics(
            config.metrics,
            self.dump_folder,
            device=self.device,
            rank=self.world.rank,
            world_size=self.world.size,
            flops_per_token=self.model.flops_per_token(training.seq_len),
            total_steps=training.steps,
            start_step=self.state.step,
        )
        self._closing.callback(self.metrics.close)
        self._describe_run()

    def _make_dump_folder(self) -> None:
        if self.world.rank == 0:
            try:
                self.dump_folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.dump_folder):
                    pass
            except OSError as error:
                raise ValueError(
                    f"job.dump_folder cannot be made or written: {error}; set it to a folder that can be"
                ) from error

    def _everywhere(self, act: Callable[[], T], long_work: str = "") -> T:
        """Collective: what `act` returns here. A mistake that any rank finds in it is raised on all.

        Otherwise the ranks that find none would wait for those that left, and fail in a collective in
        turn. `long_work`: what `act` does, if that may take one rank longer than a collective may take.
        """
        mistake: Exception | None = None
        try:
            result = act()
        except Exception as error:
            if not is_mistake(error):
                raise
            mistake = error
        if long_work:
            self.world.wait_for_all(long_work)
        found = self.world.gather_objects(None if mistake is None else str(mistake))
        if mistake is not None:
            raise mistake
        others = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
        if others:
            raise ValueError(others[0])
        return result

    def _agree_on(self, data_stream: dict[str, Any]) -> None:
        """ValueError if ranks read other text: a stale copy on one machine would train without a word."""
        everyone = self.world.gather_objects(data_stream)
        others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if others:
            changes = "; ".join(changed_keys(everyone[0], everyone[others[0]]))
            raise ValueError(
                f"ranks {others} read other text than rank 0 ({changes}): give every machine the same files in "
                "data.sources, and with python_stdlib the same Python"
            )

    def _stop_reading(self) -> None:
        self.batches = iter(())  # the last reference to the loader's worker processes

    def _describe_run(self) -> None:
        """The resolved config and the plan, beside the run's outputs and in TensorBoard."""
        if self.world.rank != 0:
            return
        config = to_toml(self.config)
        (self.dump_folder / "config.toml").write_text(config)
        self.metrics.log_text("config", config)
        if self.strategy.plan is not None:
            plan = json.dumps(self.strategy.plan.to_json(), indent=1)
            (self.dump_folder / "plan.json").write_text(plan)
            self.metrics.log_text("plan", plan)
        logger.info(
            "%s %s: %s parameters, %d ranks, strategy %s; a step is %d sequences of %d tokens and %d rows of "
            "padding; microbatches a rank: %d of %d",
            self.config.model.name,
            self.config.model.flavor,
            f"{self.model.num_parameters:,}",
            self.world.size,
            self.config.parallelism.strategy,
            self.config.training.global_batch_size,
            self.config.training.seq_len,
            self.batch_split.padding_rows,
            self.batch_split.microbatches,
            self.batch_split.local_batch_size,
        )

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run to `training.steps`. Every rank calls the same collectives in the same order."""
        training = self.config.training
        first_step = self.state.step + 1
        if first_step > training.steps and self.world.rank == 0:
            logger.warning(
                "nothing to do: step %d of %d is done; raise training.steps to go on",
                self.state.step,
                training.steps,
            )
        self._closing.callback(_control_garbage_collection())
        self.metrics.begin()
        with Profiler(
            self.config.profiling, self.dump_folder, self.world.rank, self.state.step
        ) as profiler:
            for step in range(first_step, training.steps + 1):
                last = step == training.steps
                self.schedule.set_step(step)

                loss = self._forward_backward()
                grad_norm = self._update(step, loss)
                self._advance(step)

                if step == first_step or last or step % self.config.metrics.log_freq == 0:
                    self._log(step, loss, grad_norm)
                if self._is_validation_step(step, last):
                    self.validate(step)
                ending = self._save(step, last)

                profiler.step()
                self.metrics.progress(step)
                if ending:
                    break
                if step == first_step:
                    self.world.set_timeout(
                        self.config.comm.train_timeout_seconds,
                        except_for=self.checkpointer.patient_groups,
                    )
                if training.gc_freq and step % training.gc_freq == 0:
                    gc.collect()
        if report := self.strategy.report(self.optimizers):
            logger.info("%s; %s", report, memory_text(memory_figures(self.device)))

    def _forward_backward(self) -> Tensor:
        """Add up the gradients of this rank's part of the global batch; return its part of the loss, on the device."""
        loss_sum = torch.zeros((), device=self.device)
        for microbatch in range(self.batch_split.microbatches):
            with self.metrics.timer.phase("data"):
                tokens, labels = next(self.batches)
                tokens = tokens.to(self.device, non_blocking=True)
                labels = labels.to(self.device, non_blocking=True)
            with self.metrics.timer.phase("forward_backward"):
                self.strategy.set_reduce_gradients(microbatch == self.batch_split.microbatches - 1)
                loss = self.strategy.model(tokens, labels) / self.tokens_per_step
                # 1, or nan where the loss is no number: so one rank's bad loss is in every rank's gradient norm
                loss.backward(gradient=loss.detach() * 0 + 1)
                loss_sum += loss.detach()
        return loss_sum

    def _update(self, step: int, loss: Tensor) -> float:
        """Clip and step the optimizers; return the gradient norm. A norm that is not finite changes no weight."""
        with self.metrics.timer.phase("optimizer"):
            grad_norm = self.strategy.clip_grad_norm_(self.config.training.max_norm).item()
            self.checkpointer.before_update()
            if math.isfinite(grad_norm):  # the norm is the same on all ranks, so they decide alike
                with record_function("optimizer::step"), self.stuck_weights.watch(step):
                    self.strategy.step(self.optimizers)
                self._consecutive_skips = 0
            else:
                self._on_nonfinite(step, loss, grad_norm)
            self.strategy.model.zero_grad(set_to_none=True)
        return grad_norm

    def _on_nonfinite(self, step: int, loss: Tensor, grad_norm: float) -> None:
        """All ranks are here together: find out where it began, then stop or skip."""
        losses = [loss.clone() for _ in range(self.world.size)]
        dist.all_gather(losses, loss)
        bad = [rank for rank, value in enumerate(losses) if not value.isfinite()]
        where = (
            f"the loss of ranks {bad}" if bad else "the gradients only: they overflowed in backward"
        )
        message = f"step {step}: gradient norm {grad_norm}, not finite in {where}; weights are as before this step"
        advice = (
            "Lower the learning rate, look at the data of this step, or go back to an older checkpoint "
            "(checkpoint.load_step)"
        )
        training = self.config.training
        if training.on_nonfinite == "stop":
            raise NonFiniteError(
                f'{message}. {advice}; training.on_nonfinite = "skip" goes on over such steps'
            )
        self.state.skipped_steps += 1
        self._consecutive_skips += 1
        if self._consecutive_skips >= training.max_consecutive_skips:
            raise NonFiniteError(
                f"{message}. {self._consecutive_skips} steps in a row were skipped (training.max_consecutive_skips). "
                f"{advice}"
            )
        if self.world.rank == 0:
            logger.warning("%s; skipped (%d so far)", message, self.state.skipped_steps)

    def _advance(self, step: int) -> None:
        self.state.step = step
        self.state.window += self.config.training.global_batch_size
        self.state.tokens_seen += self.tokens_per_step

    def _log(self, step: int, loss: Tensor, grad_norm: float) -> None:
        factor = self.schedule.factor(step)
        optimizer = self.config.optimizer
        self.metrics.log_step(
            step,
            local_loss=loss.item(),
            grad_norm=grad_norm,
            learning_rates={"matrix": optimizer.lr * factor, "tail": optimizer.tail_lr * factor},
            tokens_per_step=self.tokens_per_step,
            skipped_steps=self.state.skipped_steps,
        )

    def _save(self, step: int, last: bool) -> bool:
        """Save if it is time to; True if the run was told to end (pre-emption), after a save."""
        with self.metrics.timer.phase("checkpoint"):
            self.checkpointer.check_failure()
            ending = self.checkpointer.preempted()
            pause = self.checkpointer.maybe_save(step, self.state, last, now=ending)
            if self.checkpointer.is_saved(step) and not (ending or last):
                # told during the save: another step and another save may take longer than the launcher waits
                ending = self.checkpointer.preempted()
        if pause is not None:
            self.metrics.log_scalars(step, {"time/checkpoint_pause_ms": 1000 * pause})
        if ending and self.world.rank == 0:
            logger.warning(
                "step %d: told to end by a signal; saved, started again the run resumes from here",
                step,
            )
        return ending

    # --- validation --------------------------------------------------------------------------------------------------

    def _is_validation_step(self, step: int, last: bool) -> bool:
        return self.validation_batches is not None and (
            last or step % self.config.validation.freq == 0
        )

    @torch.no_grad()
    def validate(self, step: int) -> float | None:
        """Mean loss over the held-out tokens: the same first windows every time.

        Every rank has equally many batches, and between two of them the ranks agree on whether one
        was told to end. Then the validation is dropped and None returned: launchers kill a job half
        a minute after they told it, and a validation may take longer.
        """
        if self.validation_batches is None:
            raise RuntimeError("validation.enable is false, so no held-out data was opened")
        with self.metrics.timer.phase("validation"):
            self.model.eval()
            dropped = False
            # sum of losses, number of tokens
            total = torch.zeros(2, dtype=torch.float64, device=self.device)
            for tokens, labels in self.validation_batches:
                dropped = self.checkpointer.preempted()
                if dropped:
                    break
                tokens, labels = tokens.to(self.device), labels.to(self.device)
                total[0] += self.strategy.model(tokens, labels)
                total[1] += (labels != IGNORE_INDEX).sum()
            self.model.train()
            if not dropped:
                dist.all_reduce(total)
        if dropped:
            if self.world.rank == 0:
                logger.warning("step %d: validation dropped: told to end by a signal", step)
            return None
        loss_sum, count = total.tolist()
        self.metrics.log_validation(step, loss_sum / count, int(count))
        return loss_sum / count


def _control_garbage_collection() -> Callable[[], None]:
    """Collect only when told: a rank that collects at its own time makes all the others wait. Returns the undoing.

    What exists now is frozen, so that later collections look at the steps' own garbage only.
    """
    gc.collect()
    gc.freeze()
    gc.disable()

    def restore() -> None:
        gc.unfreeze()
        gc.enable()

    return restore
