"""The warnings of a resume: another learning rate at the next step, another batch size."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from matrixtitan.checkpoint.rate_changes import rate_changes
from matrixtitan.config import (
    Config,
    TrainingConfig,
    config_from_dict,
    load_config,
    to_toml,
    upgraded,
)


def run(**keys: Any) -> dict[str, Any]:
    """A config as stored: 20 steps, warm-up until 4. `keys` have "__" for the dot."""
    settings = {
        "training__global_batch_size": 8,
        "training__seq_len": 16,
        "training__steps": 20,
        "lr_scheduler__warmup_steps": 4,
        **keys,
    }
    config = dataclasses.asdict(Config(training=TrainingConfig(global_batch_size=8)))
    for key, value in settings.items():
        section, name = key.split("__")
        assert name in config[section], key
        config[section][name] = value
    found = json.loads(json.dumps(config))
    assert isinstance(found, dict)
    return found


def with_recommended(current: dict[str, Any], line: str, folder: Path) -> dict[str, Any]:
    """The run `current`, started again with the options that the warning recommends."""
    path = folder / "run.toml"
    config = config_from_dict(_without_nulls(upgraded(current)), "current")
    path.write_text(to_toml(config))
    options = line.partition("To keep the old schedule: ")[2].partition(" (")[0]
    again = load_config(["--config", str(path), *shlex.split(options)])
    found = json.loads(json.dumps(dataclasses.asdict(again)))
    assert isinstance(found, dict)
    return found


def _without_nulls(tables: Any) -> Any:
    if isinstance(tables, dict):
        return {key: _without_nulls(value) for key, value in tables.items() if value is not None}
    return [_without_nulls(item) for item in tables] if isinstance(tables, list) else tables


def warning(saved: dict[str, Any], current: dict[str, Any], step: int) -> str:
    (line,) = rate_changes(saved, current, f"step-{step - 1}", step)
    return line


def test_a_finished_run_made_longer_leaps_back_to_a_higher_rate() -> None:
    line = warning(run(), run(training__steps=40), 21)
    assert "the learning rate of step 21 is not what the schedule of step-20 gives" in line
    assert "0 -> 0.01056 for the matrices, 0 -> 0.001583 for the rest" in line
    assert "relative to the peak 0 -> 0.5278" in line  # (40 - 21) / (40 - 4)
    assert "To keep" not in line  # which would be to train at rate 0
    assert "The old schedule has ended, at rate 0 after step 20, so there is no rate to" in line


def test_a_finished_run_made_longer_can_keep_its_last_rate(tmp_path: Path) -> None:
    floor = {"lr_scheduler__min_lr_factor": 0.1}
    saved, longer = run(**floor), run(**floor, training__steps=40)
    line = warning(saved, longer, 21)
    assert line.endswith("--lr_scheduler.total_steps 20 (it has ended: its last rate stays)")
    assert rate_changes(saved, with_recommended(longer, line, tmp_path), "step-20", 21) == []


@pytest.mark.parametrize(
    ("keys", "rates", "keep"),
    [
        (
            {"training__steps": 40},
            "0.01125 -> 0.01611 ",
            "--lr_scheduler.total_steps 20 --training.steps 20 (its rate is 0 after step 20, so no "
            "step can follow)",
        ),
        (
            {"lr_scheduler__total_steps": 40},
            "-> 0.01611 ",
            "--lr_scheduler.total_steps 20",
        ),
        ({"lr_scheduler__warmup_steps": 12}, "-> 0.01833 ", "--lr_scheduler.warmup_steps 4"),
        ({"lr_scheduler__decay_ratio": 0.2}, "-> 0.02 ", "--lr_scheduler.decay_ratio none"),
        ({"lr_scheduler__decay_type": "sqrt"}, "-> 0.006771 ", "--lr_scheduler.decay_type linear"),
        ({"lr_scheduler__min_lr_factor": 0.5}, "-> 0.01562 ", "--lr_scheduler.min_lr_factor 0.0"),
        (
            {"optimizer__lr": 0.04},
            "0.01125 -> 0.0225 for the matrices (2 times)",
            "--optimizer.lr 0.02",
        ),
        (
            {"optimizer__tail_lr": 0.03},
            "-> 0.01688 for the rest (10 times)",
            "--optimizer.tail_lr 0.003",
        ),
    ],
)
def test_every_key_that_the_rate_depends_on_is_noticed_and_named(
    keys: dict[str, Any], rates: str, keep: str, tmp_path: Path
) -> None:
    line = warning(run(), run(**keys), 11)
    assert rates in line
    assert line.partition("To keep the old schedule: ")[2] == keep
    assert rate_changes(run(), with_recommended(run(**keys), line, tmp_path), "step-10", 11) == []


def test_the_rate_of_a_group_of_parameters_is_noticed(tmp_path: Path) -> None:
    group = {"pattern": "layers.0.*", "lr": 0.1, "weight_decay": None}
    line = warning(run(), run(optimizer__groups=[group]), 5)
    assert "its role's rate -> 0.09375 for optimizer.groups 'layers.0.*'" in line
    assert line.endswith("To keep the old schedule: --optimizer.groups '[]'")
    saved, current = (run(optimizer__groups=[{**group, "lr": lr}]) for lr in (0.1, 0.2))
    line = warning(saved, current, 5)
    assert line.endswith("--optimizer.groups '[{pattern = \"layers.0.*\", lr = 0.1}]'")
    assert rate_changes(saved, with_recommended(current, line, tmp_path), "step-4", 5) == []


def test_no_warning_where_the_rates_agree() -> None:
    for saved, current, step in (
        (run(), run(), 11),
        (run(), run(training__steps=40), 3),  # both in the warm-up
        (run(), run(training__steps=40, lr_scheduler__total_steps=20), 21),
        (run(), run(training__local_batch_size=4, checkpoint__interval=3), 11),
        (
            run(lr_scheduler__decay_ratio=0.0),
            run(lr_scheduler__decay_ratio=0.0, training__steps=40),
            21,
        ),
        (
            run(lr_scheduler__decay_ratio=0.2),
            run(lr_scheduler__decay_ratio=0.2, training__steps=40),
            11,
        ),
    ):
        assert rate_changes(saved, current, "step", step) == []


def test_another_batch_at_the_same_rate_is_said() -> None:
    line = warning(run(), run(training__global_batch_size=32), 11)
    assert "a step is 512 tokens, and was 128" in line
    assert "the learning rate stays (0.01125 for the matrices)" in line
    both = rate_changes(run(), run(training__global_batch_size=32, optimizer__lr=0.04), "step", 11)
    assert len(both) == 2
    assert (
        rate_changes(run(), run(training__global_batch_size=4, training__seq_len=32), "s", 9) == []
    )


def test_a_checkpoint_of_another_version_resumes_with_a_warning() -> None:
    saved = run(lr_scheduler__decay_type="steps")
    assert "cannot be told" in warning(saved, run(), 11)
    del saved["lr_scheduler"]
    assert "cannot be told" in warning(saved, run(), 11)
    older = run()
    older["lr_scheduler"]["gone"] = 1
    del older["lr_scheduler"]["decay_type"]
    assert rate_changes(older, run(), "step", 11) == []
