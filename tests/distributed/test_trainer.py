"""Whole runs of the trainer on small models. How ranks share a batch changes no number."""

from __future__ import annotations

import dataclasses
import email
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from matrixtitan import mesh
from matrixtitan.checkpoint import checkpointer as checkpointer_module
from matrixtitan.checkpoint.stager import HostStager
from matrixtitan.config import Config, load_config
from matrixtitan.curves import read_curves
from matrixtitan.data import prepare
from matrixtitan.data.tokenizer import EMBEDDED_PATH, mark_file
from matrixtitan.log import get_logger
from matrixtitan.trainer import NonFiniteError, Trainer
from tests.lib.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
TOLERANCE = 5e-5

Curves = dict[str, list[tuple[int, float]]]
"""tag -> [(step, value)]"""


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


def curves(dump_folder: Path) -> Curves:
    """Every scalar of the run's TensorBoard folder."""
    events = EventAccumulator(str(dump_folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def train(*configs: Config) -> None:
    """One run after the other in the same processes, which saves starting them."""
    for config in configs:
        with Trainer(config) as trainer:
            trainer.train()


def run(corpus: Path, folder: Path, world_size: int, *runs: Mapping[str, object]) -> list[Curves]:
    """The curves of each of `runs`, each in a folder of its own."""
    folders = [folder / str(number) for number in range(len(runs))]
    configs = [
        config_for(corpus, f, **overrides) for f, overrides in zip(folders, runs, strict=True)
    ]
    run_distributed(train, world_size, *configs)
    return [curves(folder) for folder in folders]


def assert_same_numbers(found: Curves, expected: Curves) -> None:
    assert [step for step, _ in found["loss/train"]] == [step for step, _ in expected["loss/train"]]
    for (_, value), (_, other) in zip(found["loss/train"], expected["loss/train"], strict=True):
        assert value == pytest.approx(other, abs=TOLERANCE)
    for (_, value), (_, other) in zip(found["grad_norm"], expected["grad_norm"], strict=True):
        assert value == pytest.approx(other, rel=TOLERANCE)


def split(strategy: str, local_batch_size: int, **overrides: object) -> dict[str, object]:
    return {
        "parallelism__strategy": strategy,
        "training__local_batch_size": local_batch_size,
        **overrides,
    }


@pytest.fixture(scope="session")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """One process, the whole batch at once."""
    return run(corpus, tmp_path_factory.mktemp("reference"), 1, split("ddp", 12))[0]


@pytest.mark.parametrize(
    ("world_size", "splits"),
    [
        (1, [split("ddp", 3), split("matrix_fsdp", 4)]),
        (
            2,
            [
                split("ddp", 2),
                split("matrix_fsdp", 6),
                split("matrix_fsdp", 2, parallelism__reduce_each_microbatch="false"),
            ],
        ),
        (3, [split("ddp", 4), split("matrix_fsdp", 2)]),
        (4, [split("matrix_fsdp", 1)]),
    ],
)
def test_losses_do_not_depend_on_how_the_batch_is_shared(
    corpus: Path,
    tmp_path: Path,
    reference: Curves,
    world_size: int,
    splits: list[dict[str, object]],
) -> None:
    for found in run(corpus, tmp_path, world_size, *splits):
        assert_same_numbers(found, reference)


def test_losses_do_not_depend_on_padding(corpus: Path, tmp_path: Path) -> None:
    """16 sequences on 3 ranks are 6 rows per rank, 18 in total, so 2 rows are padding.

    With 2 sequences the third rank has nothing but padding.
    """
    short = {"training__steps": 2, "validation__enable": "true", "validation__steps": 1}
    runs = [
        split(strategy, 0, training__global_batch_size=size, **short)
        for strategy, size in (("ddp", 16), ("matrix_fsdp", 2))
    ]
    expected = run(corpus, tmp_path / "1", 1, *runs)
    for found, other in zip(run(corpus, tmp_path / "3", 3, *runs), expected, strict=True):
        assert_same_numbers(found, other)
        assert found["loss/validation"][0][1] == pytest.approx(
            other["loss/validation"][0][1], abs=TOLERANCE
        )


def test_the_debug_config_gives_the_same_losses_at_any_number_of_ranks(
    corpus: Path, tmp_path: Path
) -> None:
    """The config as shipped, with another text and shorter sequences. 3 ranks have padding; 2 and 8
    have none.
    """
    sources = f'[{{type = "text", path = "{corpus}/*.txt"}}]'
    small = ["--data.sources", sources, "--data.cache_dir", str(corpus), "--data.num_workers", "0"]
    small += ["--training.seq_len", "16", "--training.steps", "3", "--metrics.log_freq", "1"]
    small += ["--validation.steps", "2"]
    found = {}
    for ranks in (1, 2, 3, 8):
        folder = ["--job.dump_folder", str(tmp_path / str(ranks))]
        run_distributed(train, ranks, load_config(["--config", "debug", *small, *folder]))
        found[ranks] = curves(tmp_path / str(ranks))
        assert_same_numbers(found[ranks], found[1])
        (_, validation), (_, expected) = (
            curve["loss/validation"][0] for curve in (found[ranks], found[1])
        )
        assert validation == pytest.approx(expected, abs=TOLERANCE)


def train_compiled(*configs: Config) -> None:
    # a pool of compilers takes longer to start than to use
    torch._inductor.config.compile_threads = 1
    train(*configs)
    assert torch._dynamo.utils.counters["inductor"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_blocks_train_as_eager_ones(
    corpus: Path, tmp_path: Path, reference: Curves
) -> None:
    """By inductor, as the config enables it, alone and with selective checkpointing."""
    folders = {mode: tmp_path / mode for mode in ("none", "selective")}
    configs = [
        config_for(
            corpus,
            folder,
            **split("matrix_fsdp", 6, compile__enable="true", activation_checkpoint__mode=mode),
        )
        for mode, folder in folders.items()
    ]
    run_distributed(train_compiled, 2, *configs, timeout=170)
    for folder in folders.values():
        assert_same_numbers(curves(folder), reference)


def test_curves_have_fixed_names_and_count_from_one(
    corpus: Path, tmp_path: Path, reference: Curves
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
    assert ("plan" in events.Tags()["images"]) == (find_spec("matplotlib") is not None)
    written = read_curves(tmp_path / "metrics.jsonl")
    assert written.keys() == set(events.Tags()["scalars"])
    for tag, curve in written.items():
        in_events = [(event.step, event.value) for event in events.Scalars(tag)]
        assert curve == [(step, pytest.approx(value)) for step, value in in_events]  # float32 there
    tokens_per_second = events.Scalars("throughput/tokens_per_second")[0].value
    assert (
        0 < events.Scalars("throughput/mfu")[0].value < tokens_per_second
    )  # the override made it known


# --- a loss or gradient that is not a number ------------------------------------------------------


class Outcome(NamedTuple):
    message: str
    weights: list[Tensor]
    weights_before: list[Tensor]
    skipped_steps: int


def poisoned(config: Config, bad_rank: int, bad_steps: list[int], value: float) -> Outcome:
    """Train with `value` added to the loss of one rank in some steps.

    Returns the error, the weights before the last step, and the weights at the end.
    """
    with Trainer(config) as trainer:
        before: list[Tensor] = []

        def weights() -> list[Tensor]:
            return [param.tensor.detach().clone() for param in trainer.strategy.local_parameters()]

        def poison(module: torch.nn.Module, arguments: object, loss: Tensor) -> Tensor:
            if trainer.state.step + 1 not in bad_steps:
                return loss
            before[:] = weights()
            return loss + value if trainer.world.rank == bad_rank else loss

        trainer.model.head.register_forward_hook(poison)
        message = ""
        try:
            trainer.train()
        except NonFiniteError as error:
            message = str(error)
        return Outcome(message, weights(), before, trainer.state.skipped_steps)


@pytest.mark.parametrize(
    ("strategy", "value"),
    # inf: of the loss alone, its gradients are fine
    [("ddp", math.nan), ("matrix_fsdp", math.inf)],
)
def test_one_ranks_bad_loss_stops_all_before_the_update(
    corpus: Path, tmp_path: Path, strategy: str, value: float
) -> None:
    config = config_for(corpus, tmp_path, parallelism__strategy=strategy, metrics__log_freq=100)
    for outcome in run_distributed(poisoned, 2, config, 1, [3], value):
        assert re.search(r"step 3: .* the loss of ranks \[1\]", outcome.message)
        assert "on_nonfinite" in outcome.message
        assert outcome.weights
        for weight, before in zip(outcome.weights, outcome.weights_before, strict=True):
            assert torch.equal(weight, before)


def test_bad_steps_are_skipped_and_counted_where_asked_for(corpus: Path, tmp_path: Path) -> None:
    config = config_for(
        corpus, tmp_path, training__on_nonfinite="skip", parallelism__strategy="matrix_fsdp"
    )
    for outcome in run_distributed(poisoned, 2, config, 0, [2], math.nan):
        assert outcome.message == ""
        assert outcome.skipped_steps == 1
        assert all(weight.isfinite().all() for weight in outcome.weights)
    found = curves(tmp_path)
    assert [math.isfinite(value) for _, value in found["loss/train"]] == [True, False, True, True]
    assert [step for step, _ in found["skipped_steps"]] == [2, 3, 4]


def test_too_many_bad_steps_in_a_row_stop_the_run(corpus: Path, tmp_path: Path) -> None:
    config = config_for(
        corpus,
        tmp_path,
        training__on_nonfinite="skip",
        training__max_consecutive_skips=2,
        training__steps=6,
        parallelism__strategy="matrix_fsdp",
    )
    for outcome in run_distributed(poisoned, 2, config, 1, [1, 3, 5, 6], math.nan):
        assert "step 6: " in outcome.message  # not 3: step 2 was good
        assert "training.max_consecutive_skips" in outcome.message
        assert outcome.skipped_steps == 4


# --- validation -----------------------------------------------------------------------------------


def test_validation_is_the_same_at_any_world_size(corpus: Path, tmp_path: Path) -> None:
    validation = {
        "validation__enable": "true",
        "validation__freq": 2,
        "validation__steps": 2,
        "metrics__log_freq": 100,
    }
    one, coarse = run(
        corpus,
        tmp_path / "1",
        1,
        {**validation, **split("ddp", 12)},
        {**validation, "validation__local_batch_size": 5},
    )
    (two,) = run(corpus, tmp_path / "2", 2, {**validation, **split("matrix_fsdp", 2)})
    for found in (one, coarse, two):
        assert [step for step, _ in found["loss/validation"]] == [2, 4]
        for (_, value), (_, other) in zip(
            found["loss/validation"], one["loss/validation"], strict=True
        ):
            assert value == pytest.approx(other, abs=TOLERANCE)
            assert 4 < value < math.log(4096) + 0.3


# --- resuming -------------------------------------------------------------------------------------

RESUMABLE = {
    "parallelism__strategy": "matrix_fsdp",
    "checkpoint__enable": "true",
    "checkpoint__interval": 2,
    "lr_scheduler__total_steps": STEPS,
}


@pytest.fixture(scope="session")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return run(corpus, folder, 2, {"parallelism__strategy": "matrix_fsdp"})[0]


def test_a_resumed_run_goes_on_as_if_never_stopped(
    corpus: Path, tmp_path: Path, uninterrupted: Curves
) -> None:
    stopped = config_for(corpus, tmp_path, **RESUMABLE, training__steps=2)
    run_distributed(train, 2, stopped, config_for(corpus, tmp_path, **RESUMABLE))
    found = curves(tmp_path)
    for tag in ("loss/train", "grad_norm", "lr/matrix", "lr/tail"):
        assert found[tag] == uninterrupted[tag], "to the bit, and each step once"
    assert [step for step, _ in found["time/checkpoint_pause_ms"]] == [2, 4]


def test_a_run_resumes_on_other_ranks(corpus: Path, tmp_path: Path, uninterrupted: Curves) -> None:
    run_distributed(train, 2, config_for(corpus, tmp_path, **RESUMABLE, training__steps=2))
    run_distributed(train, 3, config_for(corpus, tmp_path, **RESUMABLE))
    assert_same_numbers(curves(tmp_path), uninterrupted)


def test_tied_weights_are_saved_once_and_resumed(corpus: Path, tmp_path: Path) -> None:
    tied = {**RESUMABLE, "model__tie_embeddings": "true"}
    run_distributed(train, 2, config_for(corpus, tmp_path / "through", **tied))
    resumed = tmp_path / "resumed"
    run_distributed(train, 2, config_for(corpus, resumed, **tied, training__steps=2))
    run_distributed(train, 2, config_for(corpus, resumed, **tied))
    assert curves(resumed)["loss/train"] == curves(tmp_path / "through")["loss/train"]
    saved = FileSystemReader(resumed / "checkpoint" / "step-4").read_metadata().state_dict_metadata
    assert [key for key in saved if key.startswith("model.") and "layers" not in key] == [
        "model.tok_embeddings.weight",
        "model.head.norm.weight",
    ]


def told_to_end(config: Config, bad_rank: int, at_step: int) -> int:
    """SIGTERM to one rank during `at_step`, then a second run in the same folder.

    Returns the step at which the first run ended.
    """
    with Trainer(config) as trainer:

        def signal_once(module: torch.nn.Module, arguments: object) -> None:
            if trainer.world.rank == bad_rank and trainer.state.step + 1 == at_step:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer.model.head.register_forward_pre_hook(signal_once)
        trainer.train()
        ended_at = trainer.state.step
    train(config)
    return ended_at


def test_one_rank_told_to_end_saves_and_ends_all(
    corpus: Path, tmp_path: Path, uninterrupted: Curves
) -> None:
    config = config_for(corpus, tmp_path, **RESUMABLE)
    assert run_distributed(told_to_end, 2, config, 1, 3) == [3, 3]
    assert curves(tmp_path)["loss/train"] == uninterrupted["loss/train"]


class Interrupted(NamedTuple):
    ended_at: int
    batches: int
    """The batches of all validations of the run that was told to end."""
    warnings: list[str]


def told_to_end_in_a_long_phase(config: Config, phase: str) -> Interrupted:
    """SIGTERM to rank 1 in a validation of 400 slow batches or in a save; then a second run."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    batches = 0

    def kill(when: bool = True) -> None:
        if when and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    with Trainer(config) as trainer, pytest.MonkeyPatch.context() as patch:
        if phase == "validation":
            first = next(iter(trainer.validation_batches or ()))

            class Slow:
                def __iter__(self) -> Iterator[Any]:
                    nonlocal batches
                    for _ in range(400):
                        batches += 1
                        time.sleep(0.05)
                        kill(batches == 3)
                        yield first

            trainer.validation_batches = Slow()  # type: ignore[assignment]
        else:
            write = checkpointer_module.write_checkpoint

            def write_and_kill(*arguments: Any) -> Path:
                kill()
                return write(*arguments)

            patch.setattr(checkpointer_module, "write_checkpoint", write_and_kill)
        trainer.train()
        ended_at = trainer.state.step
    train(config)
    return Interrupted(ended_at, batches, lines)


@pytest.mark.parametrize("phase", ["validation", "save"])
def test_told_to_end_in_a_long_phase_the_run_ends_soon_with_its_finished_step_saved(
    corpus: Path, tmp_path: Path, uninterrupted: Curves, phase: str
) -> None:
    """A validation is dropped, not finished. After a save no further step is run.

    The next run repeats nothing.
    """
    config = config_for(
        corpus,
        tmp_path,
        **{**RESUMABLE, "checkpoint__interval": 2 if phase == "save" else 1000},
        validation__enable="true" if phase == "validation" else "false",
        validation__freq=2,
        validation__steps=1,
    )
    one, two = run_distributed(told_to_end_in_a_long_phase, 2, config, phase)
    assert one.ended_at == two.ended_at == 2
    found = curves(tmp_path)
    assert found["loss/train"] == uninterrupted["loss/train"], "to the bit, and each step once"
    assert any("step 2: told to end by a signal; saved" in line for line in one.warnings)
    if phase == "validation":
        assert one.batches == two.batches <= 4
        assert any("step 2: validation dropped" in line for line in one.warnings)
        assert [step for step, _ in found["loss/validation"]] == [4], "only the second run's"


def copies_and_updates(config: Config) -> list[str]:
    """What a run that saves in the background does with its weights, in order."""
    events: list[str] = []

    def recorded(owner: object, name: str) -> None:
        act = getattr(owner, name)

        def wrapper(*args: Any) -> Any:
            events.append(name)
            return act(*args)

        setattr(owner, name, wrapper)

    recorded(HostStager, "stage")
    recorded(HostStager, "before_change")
    with Trainer(config) as trainer:
        recorded(trainer.strategy, "step")
        trainer.train()
    return events


def test_no_update_before_the_copies_of_a_save_are_made(corpus: Path, tmp_path: Path) -> None:
    save = {"enable": "true", "interval": 1, "async_mode": "async"}
    config = config_for(
        corpus, tmp_path, training__steps=3, **{f"checkpoint__{k}": v for k, v in save.items()}
    )
    (events,) = run_distributed(copies_and_updates, 1, config)
    step = ["before_change", "step"]
    assert events == [*step, "stage", *step, "stage", *step]  # the last save is in the foreground


def refusal(
    first: Config, changed: Path, second: Config, elsewhere: Config, allowed: Config
) -> str:
    """What `second`, which has the checkpoint alone, says after `first` and a change of the data.

    Then `allowed` resumes. `elsewhere` moves the whole checkpoint to another folder.
    """
    train(first)
    shutil.copytree(f"{first.job.dump_folder}/checkpoint", f"{second.job.dump_folder}/checkpoint")
    for path in changed.glob("*.txt"):
        path.write_text(f"something else entirely\n{path.read_text()}")
    with pytest.raises(ValueError, match="the data is not") as caught:
        train(second)
    with pytest.raises(ValueError, match="the data is not"):
        train(elsewhere)
    train(allowed)
    return str(caught.value)


def test_other_data_is_refused_on_a_resume(corpus: Path, tmp_path: Path) -> None:
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy, ignore=shutil.ignore_patterns("[!a-z]*"))
    folder = tmp_path / "moved"
    (message,) = run_distributed(
        refusal,
        1,
        config_for(copy, tmp_path / "run", **RESUMABLE, training__steps=2),
        copy,
        config_for(copy, folder, **RESUMABLE),
        config_for(
            copy,
            tmp_path / "elsewhere",
            **RESUMABLE,
            checkpoint__initial_load_path=tmp_path / "run/checkpoint",
            checkpoint__initial_load_model_only="false",
        ),
        config_for(copy, folder, **RESUMABLE, data__allow_data_change="true"),
    )
    assert "step-2 had read (contents: " in message
    assert "data.allow_data_change = true" in message
    assert [step for step, _ in curves(folder)["loss/train"]] == [3, 4]


def go_on_without(first: Config, old: Path, second: Config) -> None:
    train(first)
    shutil.rmtree(old)
    train(second)


def test_the_same_data_in_another_place_is_no_change(corpus: Path, tmp_path: Path) -> None:
    """Data is compared by content, and seeds by the values that they resolve to."""
    old, new, folder = tmp_path / "old", tmp_path / "new", tmp_path / "run"
    for copy in (old, new):
        shutil.copytree(corpus, copy, ignore=shutil.ignore_patterns("[!a-z]*"))
    run_distributed(
        go_on_without,
        1,
        config_for(old, folder, **RESUMABLE, training__steps=2),
        old,
        config_for(new, folder, **RESUMABLE, data__seed=0),  # as debug.seed, which stood for it
    )
    assert [step for step, _ in curves(folder)["loss/train"]] == [1, 2, 3, 4]


def fail_with_own_tokenizer(config: Config, folder: Path) -> str:
    path = str(folder / f"{dist.get_rank()}.tiktoken")
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, tokenizer_path=path)
    )
    with pytest.raises(ValueError, match="tokenizer") as caught:
        Trainer(config)
    return str(caught.value)


def test_a_mistake_on_one_rank_is_raised_on_all(corpus: Path, tmp_path: Path) -> None:
    """Otherwise a rank that finds no mistake would wait for the other, and fail by a lost
    connection.
    """
    shutil.copy(EMBEDDED_PATH, tmp_path / "0.tiktoken")
    shutil.copy(mark_file(EMBEDDED_PATH), mark_file(tmp_path / "0.tiktoken"))
    (tmp_path / "1.tiktoken").write_text("no ranks")
    config = config_for(corpus, tmp_path / "run")
    theirs, mine = run_distributed(fail_with_own_tokenizer, 2, config, tmp_path, timeout=30)
    assert theirs == f"rank 1: {mine}"
    assert "1.tiktoken" in mine


def train_on_own_text(configs: list[Config]) -> str:
    with pytest.raises(ValueError, match="read other text") as caught:
        Trainer(configs[dist.get_rank()])
    return str(caught.value)


def test_ranks_that_read_other_text_are_told_at_start(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(corpus, other, ignore=shutil.ignore_patterns("[!a-z]*"))
    next(other.glob("*.txt")).write_text("stale " * 2000)
    configs = [config_for(corpus, tmp_path / "0"), config_for(other, tmp_path / "1")]
    for message in run_distributed(train_on_own_text, 2, configs):
        assert "ranks [1] read other text than rank 0 (contents: " in message


def start_while_rank_1_tokenises(config: Config, init_timeout: int, folder: Path) -> list[str]:
    """What this rank logs. Rank 1 has its cache late, as on a machine of its own."""
    mesh._WAIT_LOG_SECONDS = 1.0
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    get_logger().addHandler(handler)
    get_logger().setLevel(logging.INFO)
    cache = folder / str(dist.get_rank())
    data = dataclasses.replace(config.data, cache_dir=str(cache))
    config = dataclasses.replace(config, data=data)
    tokenize = prepare.tokenize

    def slowly(*args: Any, **options: Any) -> prepare.Counts:
        time.sleep((init_timeout + 3) * dist.get_rank())
        return tokenize(*args, **options)

    prepare.tokenize = slowly
    dist.destroy_process_group()
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=int(os.environ["RANK"]),
        world_size=2,
        timeout=timedelta(seconds=init_timeout),
    )
    # the second run finds the cache
    for _ in range(2):
        with Trainer(config) as trainer:
            trainer.train()
    return messages


def test_a_rank_may_tokenise_for_longer_than_a_collective_may_take(
    corpus: Path, tmp_path: Path
) -> None:
    config = config_for(corpus, tmp_path, training__steps=2)
    first, second = run_distributed(start_while_rank_1_tokenises, 2, config, 2, tmp_path)
    waits = [message for message in first if message.startswith("waiting")]
    assert 2 <= len(waits) <= 5
    assert set(waits) == {"waiting for ranks 1, which still tokenise data.sources"}
    assert not [message for message in second if message.startswith("waiting")]


def timeouts(config: Config) -> tuple[float, float]:
    """Time limits, in seconds, of a collective in training and of one in a save, after a step."""
    with Trainer(config) as trainer:
        trainer.train()
        (saving,) = trainer.checkpointer.patient_groups
        training = dist.group.WORLD
        assert training is not None
        return tuple(
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in (training, saving)
        )


def test_training_times_out_sooner_than_a_save(corpus: Path, tmp_path: Path) -> None:
    config = config_for(
        corpus, tmp_path, **RESUMABLE, training__steps=2, comm__train_timeout_seconds=17
    )
    for training, saving in run_distributed(timeouts, 2, config):
        assert training == 17
        assert saving > 1000


def kept_bytes(config: Config) -> tuple[int, int]:
    """The weights and optimizer state that this rank keeps after a run, without step counters."""
    with Trainer(config) as trainer:
        trainer.train()
        params = [param.tensor for param in trainer.strategy.stepped_parameters()]
        state = [state.tensor for state in trainer.optimizers.state_tensors()]
        return sum(t.nbytes for t in params), sum(t.nbytes for t in state if t.ndim)


@pytest.mark.parametrize(("optimizer", "ranks", "replicas"), [("muon", 3, 1), ("shampoo", 4, 2)])
def test_a_dry_run_of_a_rank_keeps_what_the_rank_keeps(
    corpus: Path, tmp_path: Path, optimizer: str, ranks: int, replicas: int
) -> None:
    """Each rank alone in one process, compared with the plan to the byte and with a real run."""
    overrides = {
        "optimizer.name": optimizer,
        "parallelism.strategy": "matrix_fsdp",
        "parallelism.data_parallel_replicate_degree": str(replicas),
        "training.local_batch_size": "1",
        "training.steps": "2",
    }
    real = run_distributed(
        kept_bytes,
        ranks,
        config_for(corpus, tmp_path, **{k.replace(".", "__"): v for k, v in overrides.items()}),
        timeout=120,
    )
    for rank in (0, ranks - 1):
        command = [sys.executable, "train.py", "--config", str(tmp_path / "run.toml")]
        for key, value in {
            **overrides,
            "parallelism.dry_run_world_size": str(ranks),
            "parallelism.dry_run_rank": str(rank),
            "job.dump_folder": str(tmp_path / f"dry{rank}"),
        }.items():
            command += [f"--{key}", value]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        report = re.search(
            rf"dry run: rank {rank} of {ranks} keeps (\S+) bytes of weights, as many of gradients, "
            r"(\S+) of "
            r"optimizer state; planned in all: (\S+) bytes; memory .* resident",
            done.stdout + done.stderr,
        )
        assert report, done.stdout + done.stderr
        weights, state, planned = (int(text.replace(",", "")) for text in report.groups())
        assert (weights, state) == real[rank]
        assert 2 * weights + state == planned


def timeouts_from_the_start(*configs: Config) -> list[set[float]]:
    """The time limits, in seconds, of all groups that a trainer makes, before its first step."""
    found = []
    for config in configs:
        before = set(dist.distributed_c10d._world.pg_map)
        with Trainer(config) as trainer:
            made = set(dist.distributed_c10d._world.pg_map) - before
            found.append(
                {
                    group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                    for group in made.difference(trainer.checkpointer.patient_groups)
                }
            )
    return found


def test_groups_have_the_first_steps_timeout_from_the_start(corpus: Path, tmp_path: Path) -> None:
    configs = [
        config_for(
            corpus,
            tmp_path / strategy,
            comm__init_timeout_seconds=23,
            checkpoint__enable="true",
            parallelism__strategy=strategy,
            parallelism__data_parallel_replicate_degree=2,
            training__local_batch_size=3,
        )
        for strategy in ("matrix_fsdp", "fsdp2")
    ]
    for found in run_distributed(timeouts_from_the_start, 4, *configs):
        assert found == [{23.0}, {23.0}]


def frozen_in_the_first_backward(config: Config, port: int, frozen: int) -> None:
    """Train in a group that the trainer makes. Returns how long the other ranks go on."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    start = 0.0
    try:
        with Trainer(config) as trainer:

            def freeze(module: torch.nn.Module, gradients: object) -> None:
                nonlocal start
                start = time.monotonic()
                if trainer.world.rank == frozen:
                    os.kill(os.getpid(), signal.SIGSTOP)

            trainer.model.head.register_full_backward_pre_hook(freeze)
            trainer.train()
    except RuntimeError as error:
        raise RuntimeError(f"ended after {time.monotonic() - start} s") from error


def test_a_frozen_rank_ends_the_others_in_the_first_step(corpus: Path, tmp_path: Path) -> None:
    config = config_for(
        corpus, tmp_path, parallelism__strategy="matrix_fsdp", comm__init_timeout_seconds=4
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    answers = run_distributed(
        frozen_in_the_first_backward,
        3,
        config,
        port,
        2,
        expect_failure=True,
        frozen=[2],
        timeout=30,
    )
    for answer in answers[:2]:
        assert "failed: another rank died, or timed out" in str(answer), answer
        ended = re.search(r"ended after (\S+) s", answer)
        assert ended is not None, answer
        assert float(ended[1]) < 8, answer


COUNT_GLOO_THREADS = """
import atexit, contextlib, sys
from pathlib import Path

def count():
    return sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())

atexit.register(lambda: print("at exit", count()))  # the first to be registered runs last

from matrixtitan.config import load_config
from matrixtitan.trainer import Trainer

def main():
    with contextlib.suppress(StopIteration), Trainer(load_config(sys.argv[1:])) as trainer:
        trainer.train()
        print("training", count())
        {then}

main()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize(("then", "all_end"), [("", True), ("raise StopIteration", False)])
def test_threads_of_groups_end_before_the_interpreter(
    corpus: Path, tmp_path: Path, then: str, all_end: bool
) -> None:
    """A thread of gloo that outlives Python would abort the process now and then.

    After an error threads may wait for a dead peer, and nobody waits for them.
    """
    config_for(corpus, tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-c", COUNT_GLOO_THREADS.format(then=then)),
            *("--config", str(tmp_path / "run.toml")),
            *("--parallelism.strategy", "matrix_fsdp"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    counts = dict(re.findall(r"(training|at exit) (\d+)", done.stdout))
    assert int(counts["training"]) > 0, done
    assert (counts["at exit"] == "0") == all_end, done
