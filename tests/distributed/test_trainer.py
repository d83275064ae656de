"""Whole runs of the trainer on small models: the numbers do not depend on how the batch is shared out."""

from __future__ import annotations

import email
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from matrixtitan.config import Config, load_config
from matrixtitan.trainer import NonFiniteError, Trainer
from tests.lib.distributed import RankFailure, run_distributed

STEPS = 4
TOLERANCE = 5e-5


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small text: enough windows for every test here."""
    folder = tmp_path_factory.mktemp("corpus")
    source = Path(email.__file__).parent
    for path in source.glob("*.py"):
        (folder / f"{path.stem}.txt").write_text(path.read_text())
    return folder


def config_for(corpus: Path, dump_folder: Path, **overrides: object) -> Config:
    """A tiny float32 run on the CPU; `overrides` are config keys with "__" for the dot."""
    path = dump_folder / "run.toml"
    dump_folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"""
[job]
dump_folder = "{dump_folder}"

[model]
flavor = "debug"

[data]
sources = [{{ type = "text", path = ["{corpus}/*.txt"] }}]
cache_dir = "{corpus}"
validation_fraction = 0.2
num_workers = 0

[training]
steps = {STEPS}
seq_len = 16
local_batch_size = 2
global_batch_size = 12
mixed_precision_param = "float32"

[lr_scheduler]
warmup_steps = 2

[parallelism]
strategy = "ddp"

[metrics]
log_freq = 1
"""
    )
    arguments = ["--config", str(path)]
    for key, value in overrides.items():
        arguments += [f"--{key.replace('__', '.')}", str(value)]
    return load_config(arguments)


def curves(dump_folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of the run's TensorBoard folder: tag -> [(step, value)]."""
    events = EventAccumulator(str(dump_folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def train(config: Config) -> None:
    with Trainer(config) as trainer:
        trainer.train()


def run(
    corpus: Path, folder: Path, world_size: int, **overrides: object
) -> dict[str, list[tuple[int, float]]]:
    run_distributed(train, world_size, config_for(corpus, folder, **overrides))
    return curves(folder)


def assert_same_numbers(
    found: Mapping[str, list[tuple[int, float]]], expected: Mapping[str, list[tuple[int, float]]]
) -> None:
    for (step, value), (other_step, other) in zip(
        found["loss/train"], expected["loss/train"], strict=True
    ):
        assert step == other_step
        assert value == pytest.approx(other, abs=TOLERANCE)
    for (_, value), (_, other) in zip(found["grad_norm"], expected["grad_norm"], strict=True):
        assert value == pytest.approx(other, rel=TOLERANCE)


@pytest.fixture(scope="session")
def reference(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, float]]]:
    """One process, the whole batch at once."""
    return run(corpus, tmp_path_factory.mktemp("reference"), 1, training__local_batch_size=12)


@pytest.mark.parametrize(
    ("strategy", "world_size", "local_batch_size"),
    [
        ("ddp", 1, 3),
        ("ddp", 2, 2),
        ("ddp", 3, 4),
        ("matrix_fsdp", 1, 4),
        ("matrix_fsdp", 2, 6),
        ("matrix_fsdp", 3, 2),
        ("matrix_fsdp", 4, 1),
    ],
)
def test_losses_do_not_depend_on_how_the_batch_is_shared(
    corpus: Path,
    tmp_path: Path,
    reference: dict[str, list[tuple[int, float]]],
    strategy: str,
    world_size: int,
    local_batch_size: int,
) -> None:
    found = run(
        corpus,
        tmp_path,
        world_size,
        parallelism__strategy=strategy,
        training__local_batch_size=local_batch_size,
    )
    assert_same_numbers(found, reference)


def test_accumulating_without_reducing_gives_the_same_numbers(
    corpus: Path, tmp_path: Path, reference: dict[str, list[tuple[int, float]]]
) -> None:
    found = run(
        corpus,
        tmp_path,
        2,
        parallelism__strategy="matrix_fsdp",
        parallelism__reduce_each_microbatch="false",
    )
    assert_same_numbers(found, reference)


def test_curves_have_fixed_names_and_count_from_one(
    corpus: Path, tmp_path: Path, reference: dict[str, list[tuple[int, float]]]
) -> None:
    names = {
        "loss/train",
        "grad_norm",
        "lr/matrix",
        "lr/tail",
        "throughput/tokens_per_second",
        "memory/max_rss_gib",
        *(f"time/{phase}_ms" for phase in ("data", "forward_backward", "optimizer")),
    }
    assert names <= reference.keys()
    assert "throughput/mfu" not in reference, "the peak of a CPU is not known"
    for name in names:
        assert [step for step, _ in reference[name]] == list(range(1, STEPS + 1))
    assert reference["loss/train"][0][1] == pytest.approx(math.log(4096), abs=0.3)
    warmup = [value for _, value in reference["lr/matrix"]][:2]
    assert warmup[0] == pytest.approx(warmup[1] / 2)


def test_run_leaves_its_description(corpus: Path, tmp_path: Path) -> None:
    config = config_for(
        corpus,
        tmp_path,
        parallelism__strategy="matrix_fsdp",
        training__steps=2,
        metrics__peak_flops=1e12,
    )
    run_distributed(train, 2, config)
    assert load_config(["--config", str(tmp_path / "config.toml")]) == config
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == 2
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert {"config/text_summary", "plan/text_summary"} <= set(events.Tags()["tensors"])
    tokens_per_second = events.Scalars("throughput/tokens_per_second")[0].value
    assert (
        0 < events.Scalars("throughput/mfu")[0].value < tokens_per_second
    )  # the override made it known


# --- a loss or gradient that is not a number -------------------------------------------------------------------------


def poisoned(
    config: Config, bad_rank: int, bad_step: int, value: float
) -> tuple[str, list[Tensor], int]:
    """Train with `value` added to one rank's loss in one step; the error, the weights at the end, the steps skipped."""
    with Trainer(config) as trainer:

        def poison(module: torch.nn.Module, arguments: object, loss: Tensor) -> Tensor:
            here = trainer.world.rank == bad_rank and trainer.state.step + 1 == bad_step
            return loss + value if here else loss

        trainer.model.head.register_forward_hook(poison)
        message = ""
        try:
            trainer.train()
        except NonFiniteError as error:
            message = str(error)
        weights = [param.tensor.detach().clone() for param in trainer.strategy.local_parameters()]
        return message, weights, trainer.state.skipped_steps


@pytest.mark.parametrize(
    ("strategy", "value"),
    [
        ("ddp", math.nan),
        ("matrix_fsdp", math.inf),
    ],  # inf: the loss alone is bad, its own gradients are numbers
)
def test_one_ranks_bad_loss_stops_all_before_the_update(
    corpus: Path, tmp_path: Path, strategy: str, value: float
) -> None:
    good = config_for(corpus, tmp_path / "good", parallelism__strategy=strategy, training__steps=2)
    bad = config_for(
        corpus, tmp_path / "bad", parallelism__strategy=strategy, training__steps=3, lr_scheduler__total_steps=2,
        metrics__log_freq=100,
    )  # fmt: skip
    expected = run_distributed(poisoned, 2, good, 0, -1, 0.0)
    found = run_distributed(poisoned, 2, bad, 1, 3, value)
    for (message, weights, _), (no_message, expected_weights, _) in zip(
        found, expected, strict=True
    ):
        assert no_message == ""
        assert re.search(r"step 3: .* the loss of ranks \[1\]", message)
        assert "on_nonfinite" in message
        for weight, expected_weight in zip(weights, expected_weights, strict=True):
            assert torch.equal(weight, expected_weight)


def test_bad_steps_are_skipped_and_counted_where_asked_for(corpus: Path, tmp_path: Path) -> None:
    config = config_for(
        corpus, tmp_path, training__on_nonfinite="skip", parallelism__strategy="matrix_fsdp"
    )
    for message, weights, skipped in run_distributed(poisoned, 2, config, 0, 2, math.nan):
        assert message == "" and skipped == 1
        assert all(weight.isfinite().all() for weight in weights)
    found = curves(tmp_path)
    assert [math.isfinite(value) for _, value in found["loss/train"]] == [True, False, True, True]
    assert [step for step, _ in found["skipped_steps"]] == [2, 3, 4]


# --- validation ------------------------------------------------------------------------------------------------------


def test_validation_is_the_same_at_any_world_size(corpus: Path, tmp_path: Path) -> None:
    validation = {"validation__enable": "true", "validation__freq": 2, "validation__steps": 2}
    one = run(corpus, tmp_path / "1", 1, **validation, validation__local_batch_size=4)
    two = run(
        corpus,
        tmp_path / "2",
        2,
        **validation,
        validation__local_batch_size=2,
        parallelism__strategy="matrix_fsdp",
    )
    assert [step for step, _ in one["loss/validation"]] == [2, 4]
    for (_, value), (_, other) in zip(one["loss/validation"], two["loss/validation"], strict=True):
        assert value == pytest.approx(other, abs=TOLERANCE)
        assert 4 < value < math.log(4096) + 0.3


# --- resuming --------------------------------------------------------------------------------------------------------

RESUMABLE = {
    "parallelism__strategy": "matrix_fsdp",
    "checkpoint__enable": "true",
    "checkpoint__interval": 2,
    "lr_scheduler__total_steps": STEPS,
}


@pytest.fixture(scope="session")
def uninterrupted(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, float]]]:
    overrides = {**RESUMABLE, "checkpoint__enable": "false"}
    return run(corpus, tmp_path_factory.mktemp("uninterrupted"), 2, **overrides)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_run_goes_on_as_if_never_stopped(
    corpus: Path, tmp_path: Path, uninterrupted: dict[str, list[tuple[int, float]]], world_size: int
) -> None:
    run(corpus, tmp_path, 2, **RESUMABLE, training__steps=2)
    found = run(corpus, tmp_path, world_size, **RESUMABLE)
    if world_size == 2:
        for tag in ("loss/train", "grad_norm", "lr/matrix", "lr/tail"):
            assert found[tag] == uninterrupted[tag], "to the bit, and each step once"
    assert_same_numbers(found, uninterrupted)
    assert [step for step, _ in found["time/checkpoint_pause_ms"]] == [2, 4]


def told_to_end(config: Config, bad_rank: int, at_step: int) -> int:
    """SIGTERM to one rank during `at_step`; the step that training ended at."""
    with Trainer(config) as trainer:

        def signal_once(module: torch.nn.Module, arguments: object) -> None:
            if trainer.world.rank == bad_rank and trainer.state.step + 1 == at_step:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer.model.head.register_forward_pre_hook(signal_once)
        trainer.train()
        return trainer.state.step


def test_one_rank_told_to_end_saves_and_ends_all(
    corpus: Path, tmp_path: Path, uninterrupted: dict[str, list[tuple[int, float]]]
) -> None:
    config = config_for(corpus, tmp_path, **RESUMABLE)
    assert run_distributed(told_to_end, 2, config, 1, 3) == [3, 3]
    found = run(corpus, tmp_path, 2, **RESUMABLE)
    assert found["loss/train"] == uninterrupted["loss/train"]


def test_other_data_is_refused_on_a_resume(corpus: Path, tmp_path: Path) -> None:
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy, ignore=shutil.ignore_patterns("[!a-z]*"))
    run(copy, tmp_path / "run", 1, **RESUMABLE, training__steps=2)
    for path in copy.glob("*.txt"):
        path.write_text(f"something else entirely\n{path.read_text()}")
    with pytest.raises(
        RankFailure,
        match=r"data is not what the run had read until step 2.*allow_data_change = true",
    ):
        run(copy, tmp_path / "run", 1, **RESUMABLE)
    found = run(copy, tmp_path / "run", 1, **RESUMABLE, data__allow_data_change="true")
    assert [step for step, _ in found["loss/train"]] == [1, 2, 3, 4]
