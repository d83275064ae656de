"""What a resume does to the learning rate: the old and the new schedule, at the next step.

Both rates come from the code that training uses, so every key that a rate depends on counts. Pure.
Next: `optim/lr_schedule.py`.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from matrixtitan.config import LRSchedulerConfig, OptimizerGroup
from matrixtitan.config.show import toml_value
from matrixtitan.optim.lr_schedule import lr_factor, schedule_steps

Run = Mapping[str, Any]
"""A run's config as JSON values, as a checkpoint stores it."""

_WHOSE = {"optimizer.lr": "the matrices", "optimizer.tail_lr": "the rest"}


class _Rates(NamedTuple):
    settings: dict[str, Any]
    """Every key that the rates depend on; lr_scheduler.total_steps is a number here, and
    optimizer.groups has OptimizerGroups."""
    factor: float
    by_key: dict[str, float]
    """The rate, by the key that holds its peak."""
    ends_at_zero: bool


def rate_changes(saved: Run, current: Run, name: str, step: int) -> list[str]:
    """Warnings for a run whose first step is `step`, after checkpoint `name` of the run `saved`.

    None if the rates agree. Another number of tokens per step is a warning too: the same rate then
    acts on a batch of another size.
    """
    try:
        before, after = _rates(saved, step), _rates(current, step)
        tokens_before, tokens_after = _tokens_per_step(saved), _tokens_per_step(current)
    # a config that another version stored
    except (KeyError, TypeError, ValueError) as error:
        return [f"{name}: whether the learning rate changes cannot be told: {error!r}"]
    lines = []
    changed = [
        (key, before.by_key.get(key), after.by_key.get(key))
        for key in {**before.by_key, **after.by_key}
        if not _equal(before.by_key.get(key), after.by_key.get(key))
    ]
    if changed:
        text = ", ".join(
            f"{_number(old)} -> {_number(new)} for {_WHOSE.get(key, key)}{_times(old, new)}"
            for key, old, new in changed
        )
        if not _equal(before.factor, after.factor):
            text += f"; relative to the peak {_number(before.factor)} -> {_number(after.factor)}"
        lines.append(
            f"the learning rate of step {step} is not what the schedule of {name} gives: {text}. "
            + _how_to_keep(before, after, step)
        )
    if tokens_before != tokens_after:
        stays = "is not scaled for it" if changed else "stays"
        lines.append(
            f"a step is {tokens_after:,} tokens, and was {tokens_before:,} in {name}; the "
            f"learning rate {stays} ({_number(after.by_key['optimizer.lr'])} for the matrices), "
            "and the schedule goes on to count steps: consider optimizer.lr, optimizer.tail_lr "
            "and lr_scheduler.total_steps"
        )
    return lines


def _how_to_keep(before: _Rates, after: _Rates, step: int) -> str:
    """The options that give `step` its old rate, in a form that the command line takes."""
    end = before.settings["lr_scheduler.total_steps"]
    ended = end < step
    if ended and before.ends_at_zero:
        return (
            f"The old schedule has ended, at rate 0 after step {end}, so there is no rate to keep: "
            "for a lower one set lower peaks, optimizer.lr and optimizer.tail_lr"
        )
    changed = {
        key: value
        for key, value in before.settings.items()
        if _of_rates(value) != _of_rates(after.settings[key]) and key != "training.steps"
    }
    note = " (it has ended: its last rate stays)" if ended else ""
    if before.ends_at_zero and after.settings["training.steps"] > end:
        changed["training.steps"] = end
        note = f" (its rate is 0 after step {end}, so no step can follow)"
    options = " ".join(f"--{key} {_argument(value)}" for key, value in changed.items())
    return f"To keep the old schedule: {options}{note}"


def _of_rates(value: Any) -> Any:
    """A key's value, without the weight decays of optimizer.groups."""
    return [(group.pattern, group.lr) for group in value] if isinstance(value, tuple) else value


def _argument(value: Any) -> str:
    """A value as `load_config` reads it from a shell's command line."""
    if value is None:
        return "none"
    return shlex.quote(value if isinstance(value, str) else toml_value(value))


def _rates(run: Run, step: int) -> _Rates:
    known = {field.name for field in dataclasses.fields(LRSchedulerConfig)}
    given = {key: value for key, value in run["lr_scheduler"].items() if key in known}
    schedule = LRSchedulerConfig(**given)
    schedule.require("lr_scheduler.")
    steps = schedule_steps(schedule, run["training"]["steps"])
    factor = lr_factor(schedule, steps, step)
    optimizer = run["optimizer"]
    peaks = {key: optimizer[key.removeprefix("optimizer.")] for key in _WHOSE} | {
        f"optimizer.groups {group['pattern']!r}": group["lr"]
        for group in optimizer["groups"]
        if group["lr"] is not None
    }
    keys = dataclasses.asdict(dataclasses.replace(schedule, total_steps=steps))
    settings = {
        **{f"lr_scheduler.{key}": value for key, value in keys.items()},
        **{key: peaks[key] for key in _WHOSE},
        "optimizer.groups": tuple(OptimizerGroup(**group) for group in optimizer["groups"]),
        "training.steps": run["training"]["steps"],
    }
    by_key = {key: peak * factor for key, peak in peaks.items()}
    return _Rates(settings, factor, by_key, schedule.ends_at_zero(steps))


def _tokens_per_step(run: Run) -> int:
    return int(run["training"]["global_batch_size"] * run["training"]["seq_len"])


def _equal(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is after
    return math.isclose(before, after, rel_tol=1e-9)


def _number(value: float | None) -> str:
    return "its role's rate" if value is None else f"{value:.4g}"


def _times(before: float | None, after: float | None) -> str:
    return f" ({after / before:.3g} times)" if before and after is not None else ""
