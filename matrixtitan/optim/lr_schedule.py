"""The learning rate of every step: a pure function of the step, applied to each group's own peak.

Warmup-stable-decay; plain cosine and linear decay are the cases without a stable part. It keeps no
state of its own, so a resumed run needs only the step. To add a shape of decay, add a case to
`_decayed` and its name to `LRSchedulerConfig.decay_type` in `config/schema.py`. Next:
`fsdp/grad_norm.py`.
"""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import Literal

from matrixtitan.config import LRSchedulerConfig
from matrixtitan.optim.build import Optimizers


def schedule_steps(config: LRSchedulerConfig, training_steps: int) -> int:
    """Where the schedule ends."""
    return training_steps if config.total_steps is None else config.total_steps


def lr_factor(config: LRSchedulerConfig, total_steps: int, step: int) -> float:
    """What the peak learning rate is multiplied by at the 1-based `step`.

    It rises by 1/warmup_steps a step to 1 at step warmup_steps. It stays 1 until the last
    decay_ratio of the steps (None: no stable part), then falls to min_lr_factor at step
    total_steps. Later steps have the rate of step total_steps.
    """
    step = min(step, total_steps)
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    peak_step = max(config.warmup_steps, 1)
    decay_steps = total_steps - peak_step
    if config.decay_ratio is not None:
        decay_steps = min(round(total_steps * config.decay_ratio), decay_steps)
    done = step - (total_steps - decay_steps)
    if done <= 0:
        return 1.0
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * (
        1.0 - _decayed(config.decay_type, done / decay_steps)
    )


def _decayed(decay_type: Literal["linear", "sqrt", "cosine"], progress: float) -> float:
    """The share of the way from peak to minimum: 0 at progress 0, exactly 1 at progress 1."""
    if decay_type == "linear":
        return progress
    if decay_type == "sqrt":
        return sqrt(progress)
    return 0.5 - 0.5 * cos(pi * progress)


class LRSchedule:
    """Sets the groups' learning rates. ValueError where the schedule does not fit its steps."""

    def __init__(
        self, config: LRSchedulerConfig, optimizers: Optimizers, training_steps: int
    ) -> None:
        total = schedule_steps(config, training_steps)
        problems = [f"lr_scheduler.{problem}" for problem in config.problems_in(total)]
        if problems:
            raise ValueError("\n".join(problems))
        self.config = config
        self.total_steps = total
        self.optimizers = optimizers

    def factor(self, step: int) -> float:
        """The factor on every peak at the 1-based `step`, also on ranks that step nothing."""
        return lr_factor(self.config, self.total_steps, step)

    def set_step(self, step: int) -> None:
        """Set every group's lr for the 1-based step about to run."""
        factor = self.factor(step)
        for group in self.optimizers.param_groups:
            group["lr"] = group["initial_lr"] * factor
