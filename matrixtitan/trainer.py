"""One training run: build every part in order, then the loop.

`Trainer._build` is the list of parts. `Trainer.train` is the loop, with one line for each phase of
a step: learning rate (`optim/lr_schedule.py`), forward and backward, update, log, validation, save.
A run that SIGTERM tells to end leaves the loop after `_save`. Owns the order of things and the
train state (step, window, tokens seen). Every part's own logic is in its own file. Next:
`assemble.py`.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

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
from matrixtitan.data.dataset import IGNORE_INDEX
from matrixtitan.data.tokenizer import load_tokenizer
from matrixtitan.log import get_logger
from matrixtitan.mesh import init_world, set_seeds
from matrixtitan.metrics import Metrics, memory_figures, memory_text
from matrixtitan.optim.lr_schedule import LRSchedule
from matrixtitan.parallelize import plan_settings
from matrixtitan.profiler import Profiler
from matrixtitan.ranks import split_batch
from matrixtitan.run_folder import make_run_folder
from matrixtitan.stuck_weights import StuckWeights

logger = get_logger()


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is inf or nan. Raised on all ranks, before the update."""


class Trainer:
    """A whole run. Use it as a context manager, which ends loaders, writers and the process group.

    Raises ValueError for a config that cannot work here, and RuntimeError when training cannot
    go on.
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

        # Processes: a group over all ranks and its (dp_replicate, dp_shard) mesh
        self.world = self._closing.enter_context(init_world(config))
        self.device = self.world.device
        set_seeds(config.debug)
        self.batch_split = split_batch(training, self.world.size)
        self.tokens_per_step = training.global_batch_size * training.seq_len

        # What can be wrong with the config and takes no time to find
        self.dump_folder = Path(config.job.dump_folder)
        self.world.on_all_ranks(lambda: make_run_folder(config) if self.world.rank == 0 else None)
        self.tokenizer = self.world.on_all_ranks(
            lambda: load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_pattern)
        )

        # Model, made data-parallel, with this rank's part of the weights; optimizers and schedule
        self.model, self.strategy, self.optimizers = assemble(
            config, self.tokenizer.n_words, self.world
        )
        self._closing.callback(self.strategy.close)
        self.schedule = LRSchedule(config.lr_scheduler, self.optimizers, training.steps)

        # Data: tokenised here unless a cache has it, and only now that the model is known to work
        sources = self.world.on_all_ranks(
            lambda: open_sources(config.data, self.tokenizer), "tokenise data.sources"
        )
        data_stream = stream_fingerprint(config, self.tokenizer, sources)
        self._require_same_data(data_stream)

        # Where to start from, and the data from there on
        self.checkpointer = self._closing.enter_context(
            Checkpointer(config, self.strategy, self.optimizers, data_stream)
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
        if self.world.rank == 0:
            self._describe_run()

    def _require_same_data(self, data_stream: dict[str, Any]) -> None:
        """ValueError if ranks read different text, such as from a stale copy on one machine."""
        everyone = self.world.gather_objects(data_stream)
        others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if others:
            changes = "; ".join(changed_keys(everyone[0], everyone[others[0]]))
            raise ValueError(
                f"ranks {others} read other text than rank 0 ({changes}): give every machine the "
                "same files in data.sources, and with python_stdlib the same Python"
            )

    def _stop_reading(self) -> None:
        """Drop the last reference to the loader, which ends its worker processes."""
        self.batches = iter(())

    def _describe_run(self) -> None:
        """Write the resolved config and the plan into the run's folder and to TensorBoard."""
        config = to_toml(self.config)
        (self.dump_folder / "config.toml").write_text(config)
        self.metrics.log_text("config", config)
        if self.strategy.plan is not None:
            plan = json.dumps(self.strategy.plan.to_json(), indent=1)
            (self.dump_folder / "plan.json").write_text(plan)
            self.metrics.log_plan(self.strategy.plan, plan_settings(self.config))
        logger.info(
            "%s %s: %s parameters, %d ranks, strategy %s; a step is %d sequences of %d tokens and "
            "%d rows of padding; each rank runs %d microbatches of %d sequences",
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

    # --- the loop ---------------------------------------------------------------------------------

    def train(self) -> None:
        """Run to `training.steps`. Every rank calls the same collectives in the same order."""
        first_step, last_step = self.state.step + 1, self.config.training.steps
        if first_step > last_step and self.world.rank == 0:
            logger.warning(
                "nothing to do: step %d of %d is done; raise training.steps to go on",
                self.state.step,
                last_step,
            )
        profiler = Profiler(
            self.config.profiling, self.dump_folder, self.world.rank, self.state.step
        )
        self.metrics.begin()
        with _garbage_collection_when_told(), profiler:
            for step in range(first_step, last_step + 1):
                last = step == last_step
                self.schedule.set_step(step)

                loss = self._forward_backward()
                grad_norm = self._update(step, loss)
                self._advance(step)

                if step == first_step or last or step % self.config.metrics.log_freq == 0:
                    self._log(step, loss, grad_norm)
                if self._is_validation_step(step, last):
                    self.validate(step)
                told_to_end = self._save(step, last)

                profiler.step()
                self.metrics.progress(step)
                if told_to_end:
                    break
                self._tend_processes(step, first_step)
        if report := self.strategy.report(self.optimizers):
            logger.info("%s; %s", report, memory_text(memory_figures(self.device)))

    def _forward_backward(self) -> Tensor:
        """Add up the gradients of this rank's part of the global batch, microbatch by microbatch.

        Returns this rank's part of the loss, on the device. The ranks' parts add up to the mean.
        """
        loss_sum = torch.zeros((), device=self.device)
        for microbatch in range(self.batch_split.microbatches):
            with self.metrics.timer.phase("data"):
                tokens, labels = next(self.batches)
                tokens = tokens.to(self.device, non_blocking=True)
                labels = labels.to(self.device, non_blocking=True)
            with self.metrics.timer.phase("forward_backward"):
                self.strategy.set_reduce_gradients(microbatch == self.batch_split.microbatches - 1)
                loss = self.strategy.model(tokens, labels) / self.tokens_per_step
                # The gradient is 1, or nan where the loss is not finite. So one rank's bad loss
                # makes the gradient norm of every rank nan, and all ranks skip or stop together.
                loss.backward(gradient=loss.detach() * 0 + 1)
                loss_sum += loss.detach()
        return loss_sum

    def _update(self, step: int, loss: Tensor) -> float:
        """Clip the gradients and step the optimizers. Returns the gradient norm before clipping.

        A norm that is not finite changes no weight.
        """
        with self.metrics.timer.phase("optimizer"):
            grad_norm = self.strategy.clip_grad_norm_(self.config.training.max_norm).item()
            self.checkpointer.before_update()
            # the norm is the same on all ranks, so they decide alike
            if math.isfinite(grad_norm):
                with record_function("optimizer::step"), self.stuck_weights.watch(step):
                    self.strategy.step(self.optimizers)
                self._consecutive_skips = 0
            else:
                self._skip_or_stop(step, loss, grad_norm)
            self.strategy.model.zero_grad(set_to_none=True)
        return grad_norm

    def _skip_or_stop(self, step: int, loss: Tensor, grad_norm: float) -> None:
        """Collective: find the ranks whose loss is not finite, then do as training.on_nonfinite
        says.
        """
        losses = [loss.clone() for _ in range(self.world.size)]
        dist.all_gather(losses, loss)
        bad = [rank for rank, value in enumerate(losses) if not value.isfinite()]
        where = f"the loss of ranks {bad}" if bad else "the gradients (every loss is finite)"
        message = (
            f"step {step}: gradient norm is {grad_norm}; not finite: {where}. No weight was changed"
        )
        advice = (
            "Lower the learning rate, look at the data of this step, or go back to an older "
            "checkpoint (checkpoint.load_step)"
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
                f"{message}. {self._consecutive_skips} steps in a row were skipped "
                f"(training.max_consecutive_skips). {advice}"
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
        """Save if it is time to, or if any rank was told to end (SIGTERM or SIGUSR1).

        Returns whether the run was told to end. Without checkpoint.enable the signals end the
        process at once. See `checkpoint/preemption.py`.
        """
        with self.metrics.timer.phase("checkpoint"):
            self.checkpointer.check_failure()
            told_to_end = self.checkpointer.preempted()
            pause = self.checkpointer.maybe_save(step, self.state, last, now=told_to_end)
            if self.checkpointer.is_saved(step) and not (told_to_end or last):
                # If a rank was told during the save, the run ends here: another step and another
                # save may take longer than the launcher waits.
                told_to_end = self.checkpointer.preempted()
        if pause is not None:
            self.metrics.log_scalars(step, {"time/checkpoint_pause_ms": 1000 * pause})
        if told_to_end and self.world.rank == 0:
            logger.warning(
                "step %d: told to end by a signal; saved. Start the run again to resume from here",
                step,
            )
        return told_to_end

    def _tend_processes(self, step: int, first_step: int) -> None:
        """Between two steps: the collectives' time limit of training, and garbage collection."""
        if step == first_step:
            self.world.set_timeout(
                self.config.comm.train_timeout_seconds,
                except_for=self.checkpointer.patient_groups,
            )
        gc_freq = self.config.training.gc_freq
        if gc_freq and step % gc_freq == 0:
            gc.collect()

    # --- validation -------------------------------------------------------------------------------

    def _is_validation_step(self, step: int, last: bool) -> bool:
        return self.validation_batches is not None and (
            last or step % self.config.validation.freq == 0
        )

    @torch.no_grad()
    def validate(self, step: int) -> float | None:
        """Mean loss over the held-out tokens, which are the same at every validation.

        Returns None if the validation was dropped because a rank was told to end. Launchers kill a
        job half a minute after they told it, and a validation may take longer. So the ranks, which
        have equally many batches, ask each other before every batch.
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


@contextmanager
def _garbage_collection_when_told() -> Iterator[None]:
    """Turn automatic garbage collection off, so that all ranks collect at the same step.

    A rank that collects alone makes all others wait. Objects that exist at the start are frozen, so
    collections scan only objects that the steps create.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
