"""The learning-rate schedule: its corners to the last digit, and every group its own peak."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from matrixtitan.config import LRSchedulerConfig
from matrixtitan.optim.build import Optimizers
from matrixtitan.optim.lr_schedule import LRSchedule, lr_factor

SHAPES = pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])


def factors(total: int, **options: Any) -> list[float]:
    """The factor of steps 1 .. total."""
    config = LRSchedulerConfig(**options)
    return [lr_factor(config, total, step) for step in range(1, total + 1)]


@SHAPES
@pytest.mark.parametrize("decay_ratio", [None, 0.2, 0.5])
@pytest.mark.parametrize("minimum", [0.0, 0.1])
def test_corners(decay_type: Any, decay_ratio: float | None, minimum: float) -> None:
    got = factors(
        100, warmup_steps=10, decay_ratio=decay_ratio, decay_type=decay_type, min_lr_factor=minimum
    )
    assert got[0] == 1 / 10, "step 1"
    assert got[9] == 1.0, "step warmup_steps"
    assert got[-1] == minimum, "the last step"
    assert all(a <= b for a, b in pairwise(got[:10])), "rises"
    assert all(a >= b for a, b in pairwise(got[9:])), "falls"
    stable = 100 - round(100 * decay_ratio) if decay_ratio is not None else 10
    assert all(factor == 1.0 for factor in got[9:stable])
    assert got[stable] < 1.0


def test_halfway_of_each_shape() -> None:
    for decay_type, expected in (("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)):
        got = factors(100, warmup_steps=20, decay_type=decay_type)[59]
        assert got == pytest.approx(expected, abs=1e-12)


def test_beyond_the_last_step_the_minimum_stays() -> None:
    config = LRSchedulerConfig(warmup_steps=2, min_lr_factor=0.25)
    assert lr_factor(config, 10, 11) == lr_factor(config, 10, 1000) == 0.25


def test_beyond_the_last_step_a_rate_that_never_decayed_stays() -> None:
    for options in ({"warmup_steps": 2, "decay_ratio": 0.0}, {"warmup_steps": 10}):
        config = LRSchedulerConfig(**options)
        assert [lr_factor(config, 10, step) for step in (10, 11, 1000)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("total", "options", "expected"),
    [
        (3, {"warmup_steps": 0}, [1.0, 0.5, 0.0]),
        (3, {"warmup_steps": 3}, [1 / 3, 2 / 3, 1.0]),
        (4, {"warmup_steps": 1, "decay_ratio": 0.0, "min_lr_factor": 0.1}, [1.0, 1.0, 1.0, 1.0]),
        (4, {"warmup_steps": 2, "decay_ratio": 0.5}, [0.5, 1.0, 0.5, 0.0]),
        (1, {"warmup_steps": 0}, [1.0]),
    ],
)
def test_short_runs(total: int, options: dict[str, Any], expected: list[float]) -> None:
    assert factors(total, **options) == pytest.approx(expected, abs=1e-12)


def test_each_group_keeps_its_own_peak() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (0.02, 0.001)]
    optimizers = Optimizers([torch.optim.AdamW(groups)])
    schedule = LRSchedule(LRSchedulerConfig(warmup_steps=4), optimizers, 10)
    for step, factor in ((1, 0.25), (4, 1.0), (10, 0.0), (2, 0.5)):
        schedule.set_step(step)
        assert [group["lr"] for group in optimizers.param_groups] == [0.02 * factor, 0.001 * factor]


def test_total_steps_of_the_config_wins_over_the_trainings() -> None:
    config = LRSchedulerConfig(warmup_steps=0, total_steps=100)
    assert LRSchedule(config, Optimizers([]), 10).total_steps == 100


@pytest.mark.parametrize(
    ("options", "total", "message"),
    [
        ({"total_steps": 0}, 10, "total_steps is 0"),
        ({"warmup_steps": 11}, 10, "warmup_steps 11 exceeds the 10 steps"),
        ({"warmup_steps": 6, "decay_ratio": 0.5}, 10, "overlap"),
        ({"warmup_steps": 0, "decay_ratio": 1.5}, 10, "decay_ratio is 1.5"),
        ({"warmup_steps": 0, "min_lr_factor": -0.1}, 10, "min_lr_factor is -0.1"),
        ({"warmup_steps": 0, "decay_type": "steps"}, 10, "'linear', 'sqrt', 'cosine'"),
    ],
)
def test_schedules_that_do_not_fit(options: dict[str, Any], total: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRSchedule(LRSchedulerConfig(**options), Optimizers([]), total)
