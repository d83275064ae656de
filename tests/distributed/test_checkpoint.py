"""Saving and loading on several ranks: any world size and cut, whole or nothing, pauses."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from matrixtitan.checkpoint import Checkpointer, CheckpointError, StoredCheckpoint, TrainState
from matrixtitan.checkpoint import checkpointer as checkpointer_module
from matrixtitan.checkpoint import folder as folders
from matrixtitan.config import CommConfig, Config, LRSchedulerConfig
from matrixtitan.log import get_logger
from matrixtitan.plan.local_param import LocalParam
from tests.lib.checkpoint_fakes import PARAMS, FakeRun, expected, run_config
from tests.lib.distributed import run_distributed
from tests.lib.kill_saves import kill_and_resume, save_forever


def on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **keys: Any) -> list[Any]:
    return run_distributed(partial(fn, **keys), world_size, *args)


def make(
    folder: str, *, bias: int = 0, filled: bool = True, **keys: Any
) -> tuple[Checkpointer, FakeRun]:
    run = FakeRun(dist.get_rank(), dist.get_world_size(), bias=bias, filled=filled)
    config = run_config(folder, **keys)
    return Checkpointer(config, run, run), run  # type: ignore[arg-type]


def save(folder: str, step: int = 2, offset: float = 0.0, **keys: Any) -> None:
    checkpointer, run = make(folder, **keys)
    with checkpointer:
        run.fill(offset)
        checkpointer.save(step, TrainState(step, step * 10, step * 80))


def load_and_check(folder: str, offset: float = 0.0, **keys: Any) -> TrainState | None:
    checkpointer, run = make(folder, bias=3, filled=False, **keys)
    with checkpointer:
        state = checkpointer.load()
        run.check(offset)
    return state


@pytest.fixture(scope="module")
def saved_by_4(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    on_ranks(save, 4, folder)
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_any_world_size_and_cut_loads_what_four_saved(saved_by_4: str, world_size: int) -> None:
    states = on_ranks(load_and_check, world_size, saved_by_4)
    assert states == [TrainState(2, 20, 160)] * world_size


def dtensors(device_mesh: DeviceMesh) -> dict[str, DTensor]:
    """A plain FSDP2 model's weights: DTensors cut by rows."""
    return {
        fqn: distribute_tensor(expected(fqn, shape, 0, shape[0]), device_mesh, [Shard(0)])
        for fqn, (shape, _) in PARAMS.items()
    }


def dtensor_run(device_mesh: DeviceMesh, filled: bool) -> FakeRun:
    """What the fsdp2 strategy holds: parameters and their state are DTensors."""
    run = FakeRun(0, 1, filled=filled)
    run.params = [
        dataclasses.replace(p, tensor=distribute_tensor(p.tensor, device_mesh, [Shard(0)]))
        for p in run.params
    ]
    run.states = [
        state._replace(tensor=distribute_tensor(state.tensor, device_mesh, [Shard(0)]))
        if state.per_row
        else state
        for state in run.states
    ]
    return run


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exchange_with_dtensors(ours: str, folder: str) -> None:
    """In one call, since a rank's first use of DTensors takes seconds."""
    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = dtensors(device_mesh)

    loaded = {fqn: torch.zeros_like(tensor) for fqn, tensor in model.items()}
    dcp.load({"model": loaded}, checkpoint_id=f"{ours}/checkpoint/step-2")
    for fqn, tensor in model.items():
        assert torch.equal(local(loaded[fqn]), local(tensor)), fqn

    dcp.save({"model": model}, checkpoint_id=f"{folder}/nested")
    dcp.save(dict(model), checkpoint_id=f"{folder}/bare")

    config, run = run_config(ours), dtensor_run(device_mesh, filled=False)
    with Checkpointer(config, run, run) as checkpointer:  # type: ignore[arg-type]
        assert checkpointer.load() == TrainState(2, 20, 160)
    for ours_now, wanted in zip(
        [*run.params, *run.states],
        [*(full := dtensor_run(device_mesh, filled=True)).params, *full.states],
        strict=True,
    ):
        assert torch.equal(local(ours_now.tensor), local(wanted.tensor)), ours_now.fqn

    config, run = run_config(f"{folder}/strategy"), dtensor_run(device_mesh, filled=True)
    with Checkpointer(config, run, run) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(2, TrainState(2, 20, 160))


def load_theirs(folder: str, theirs: str) -> None:
    checkpointer, run = make(folder, filled=False, initial_load_path=theirs)
    with checkpointer:
        assert checkpointer.load() is None
        for param in run.params:
            rows = param.tensor.shape[0]
            value = expected(param.fqn, param.full_shape, param.start, rows)
            assert torch.equal(param.tensor, value), param.fqn


def test_plain_dcp_and_dtensors_load_ours_and_we_load_theirs(
    saved_by_4: str, tmp_path: Path
) -> None:
    on_ranks(exchange_with_dtensors, 3, saved_by_4, str(tmp_path))
    for theirs in ("nested", "bare"):
        on_ranks(load_theirs, 2, str(tmp_path / theirs / "run"), str(tmp_path / theirs))
    on_ranks(load_and_check, 2, str(tmp_path / "strategy"))


def test_dcp_converts_to_a_torch_save_file(saved_by_4: str, tmp_path: Path) -> None:
    dcp_to_torch_save(f"{saved_by_4}/checkpoint/step-2", tmp_path / "model.pt")
    model = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert model.keys() == PARAMS.keys()
    for fqn, (shape, _) in PARAMS.items():
        assert torch.equal(model[fqn], expected(fqn, shape, 0, shape[0])), fqn


def save_several(folder: str, steps: list[int], **keys: Any) -> list[str]:
    checkpointer, run = make(folder, **keys)
    with checkpointer:
        for step in steps:
            run.fill(step)
            checkpointer.maybe_save(step, TrainState(step), last=step == steps[-1])
            run.fill(-1)  # as training would, while a background save is under way
            checkpointer.check_failure()
    return sorted(path.name for path in Path(folder, "checkpoint").iterdir())


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_keep_latest_k_and_the_newest_is_loaded(tmp_path: Path, async_mode: str) -> None:
    names = on_ranks(
        save_several, 2, str(tmp_path), [2, 3, 4, 6, 8, 9], keep_latest_k=2, async_mode=async_mode
    )[0]
    assert names == ["step-8", "step-9"]
    assert on_ranks(load_and_check, 3, str(tmp_path), 9.0)[0] == TrainState(9)
    assert on_ranks(load_and_check, 3, str(tmp_path), 8.0, load_step=8)[0] == TrainState(8)


def test_a_vanished_folder_is_no_reason_to_stop(tmp_path: Path) -> None:
    on_ranks(save_behind_a_janitor, 1, str(tmp_path))


def save_behind_a_janitor(folder: str) -> None:
    checkpointer, _ = make(folder, keep_latest_k=1)
    with checkpointer:
        checkpointer.save(2, TrainState(2))
        original = folders.list_steps
        try:
            folders.list_steps = lambda path: (
                [4, 3, 2],
                [],
            )  # 3 was deleted by someone else in between
            checkpointer.save(4, TrainState(4))
        finally:
            folders.list_steps = original
    assert [p.name for p in Path(folder, "checkpoint").iterdir()] == ["step-4"]


def resume_from_a_link(folder: str) -> None:
    """Step 2 is a link. It loads, and is pruned when steps 4 and 6 are saved."""
    checkpointer, run = make(folder, filled=False, keep_latest_k=1, load_step=2)
    with checkpointer:
        assert checkpointer.load() == TrainState(2, 20, 160)
        run.check(0.0)
        for step in (4, 6):
            checkpointer.save(step, TrainState(step))


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_block_the_next_start(
    tmp_path: Path,
) -> None:
    on_ranks(save, 2, str(tmp_path))
    kept, link = tmp_path / "kept", tmp_path / "checkpoint" / "step-2"
    link.rename(kept)
    files = sorted(path.name for path in kept.iterdir())
    link.symlink_to(kept)
    on_ranks(resume_from_a_link, 2, str(tmp_path))
    (link.with_name("step-1.deleting")).symlink_to(kept)  # as an earlier version left it
    assert on_ranks(load_and_check, 2, str(tmp_path))[0] == TrainState(6)
    assert [path.name for path in link.parent.iterdir()] == ["step-6"]
    assert sorted(path.name for path in kept.iterdir()) == files


def warnings_on_resume(first: Config, second: Config) -> list[str]:
    """The warnings of a rank when `second` resumes from the step that `first` saved."""
    run, lines = FakeRun(dist.get_rank(), dist.get_world_size()), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    with Checkpointer(first, run, run) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(8, TrainState(8, 80, 640))
    lines.clear()
    with Checkpointer(second, run, run) as checkpointer:  # type: ignore[arg-type]
        checkpointer.load()
    return [line for line in lines if "learning rate" in line]


def test_a_finished_run_made_longer_warns_of_the_leap_of_the_rate(tmp_path: Path) -> None:
    """Rank 0 alone warns, with both rates and the key that avoids the change.

    There is no warning where that key is set.
    """
    config = run_config(str(tmp_path))
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, global_batch_size=4, steps=8),
        lr_scheduler=LRSchedulerConfig(warmup_steps=2, decay_ratio=0.25, min_lr_factor=0.1),
    )
    longer = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=16))
    (warning,), others = on_ranks(warnings_on_resume, 2, config, longer)
    assert "learning rate of step 9" in warning
    assert "0.002 -> 0.02 for the matrices" in warning
    assert "--lr_scheduler.total_steps 8" in warning
    assert others == []
    kept = dataclasses.replace(
        longer, lr_scheduler=dataclasses.replace(config.lr_scheduler, total_steps=8)
    )
    assert on_ranks(warnings_on_resume, 1, config, kept) == [[]]


def save_the_same_step_again(folder: str) -> None:
    for offset in (1.0, 2.0):
        checkpointer, run = make(folder)
        with checkpointer:
            run.fill(offset)
            checkpointer.save(2, TrainState(2))


def test_a_step_saved_again_replaces_the_older_one(tmp_path: Path) -> None:
    on_ranks(save_the_same_step_again, 2, str(tmp_path))
    on_ranks(load_and_check, 2, str(tmp_path), 2.0)
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["step-2"]


def load_error(folder: str, **keys: Any) -> str:
    checkpointer, _ = make(folder, filled=False, **keys)
    with checkpointer, pytest.raises((CheckpointError, ValueError)) as caught:
        checkpointer.load()
    return f"{type(caught.value).__name__}: {caught.value}"


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_one_stops_with_its_name_or_falls_back(tmp_path: Path) -> None:
    on_ranks(save_several, 2, str(tmp_path), [2, 4])
    path = tmp_path / "checkpoint" / "step-4" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    messages = on_ranks(load_error, 2, str(tmp_path))
    assert all(
        "CorruptCheckpointError" in m and "__1_0.distcp" in m and "skip_corrupt" in m
        for m in messages
    )
    assert on_ranks(load_and_check, 2, str(tmp_path), 2.0, skip_corrupt=True)[1] == TrainState(2)
    flip_bit(tmp_path / "checkpoint" / "step-2" / "checksums.json", 200)
    messages = on_ranks(load_error, 2, str(tmp_path), skip_corrupt=True)
    assert all("none of the checkpoints" in m for m in messages)


def test_incomplete_ones_are_skipped(tmp_path: Path) -> None:
    on_ranks(save, 2, str(tmp_path))
    (tmp_path / "checkpoint" / "step-7").mkdir()
    (tmp_path / "checkpoint" / "step-8.writing").mkdir()
    assert on_ranks(load_and_check, 2, str(tmp_path))[0] == TrainState(2, 20, 160)
    assert not (tmp_path / "checkpoint" / "step-8.writing").exists()


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    on_ranks(save, 2, str(tmp_path))
    (message,) = set(on_ranks(load_error, 2, str(tmp_path), load_step=5))
    assert "load_step is 5" in message
    assert "[2]" in message


def save_under_limit(folder: str, on_error: str, async_mode: str) -> str:
    """A file-size limit makes the kernel refuse the write, as a full disk does."""
    checkpointer, _ = make(folder, on_error=on_error, async_mode=async_mode)
    with checkpointer:
        checkpointer.save(2, TrainState(2))
        checkpointer.wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        message = ""
        try:
            checkpointer.save(4, TrainState(4))
            while checkpointer._saving is not None:  # the steps that follow
                checkpointer.check_failure()
        except CheckpointError as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpointer.save(6, TrainState(6))
    return message


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_write_that_fails_on_one_rank_is_everyones_error(
    tmp_path: Path, on_error: str, async_mode: str
) -> None:
    messages = on_ranks(save_under_limit, 2, str(tmp_path), on_error, async_mode)
    if on_error == "stop":
        assert all(
            "step-4" in message and "rank 1" in message and "too large" in message
            for message in messages
        )
    else:
        assert messages == ["", ""]
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-6"]


def save_ruined(folder: str, spoil: str, on_error: str, **keys: Any) -> str:
    """Saves at 2, 4 and 6. At 4, one number on rank 1 is inf or nan."""
    checkpointer, run = make(folder, on_error=on_error, **keys)
    with checkpointer:
        checkpointer.save(2, TrainState(2))
        if dist.get_rank() == 1:
            held = {f"model.{param.fqn}": param.tensor.detach() for param in run.params}
            held |= {f"optimizer.{state.fqn}.{state.name}": state.tensor for state in run.states}
            held[spoil].view(-1)[-1] = math.inf if spoil.startswith("model") else math.nan
        message = ""
        try:
            checkpointer.save(4, TrainState(4))
        except CheckpointError as error:
            message = str(error)
        run.fill(0.0)
        checkpointer.save(6, TrainState(6), last=True)
    return message


@pytest.mark.parametrize("on_error", ["stop", "continue"])
@pytest.mark.parametrize(
    ("spoil", "value"),
    [
        ("model.norm", "inf"),
        ("optimizer.layers.1.w.momentum", "nan"),
        ("optimizer.stack.step", "nan"),
    ],
)
def test_ruined_numbers_on_one_rank_are_not_saved(
    tmp_path: Path, spoil: str, value: str, on_error: str
) -> None:
    messages = on_ranks(save_ruined, 2, str(tmp_path), spoil, on_error, async_mode="async")
    for message in messages:
        if on_error == "stop":
            assert "saving step 4 failed" in message
            assert f"{spoil} holds {value}" in message and "(rank 1)" in message
        else:
            assert message == ""
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-6"]


def export_too_large(folder: str) -> str:
    checkpointer, run = make(folder, last_save_model_only=True, export_dtype="float16")
    with checkpointer:
        run.fill(1e5)  # float16 ends at 65504
        try:
            checkpointer.save(2, TrainState(2), last=True)
        except CheckpointError as error:
            return str(error)
    return ""


def test_weights_that_overflow_in_the_export_dtype_are_not_saved(tmp_path: Path) -> None:
    for message in on_ranks(export_too_large, 1, str(tmp_path)):
        assert "holds inf in torch.float16" in message
    assert list((tmp_path / "checkpoint").iterdir()) == []


def ends_without_its_save(folder: str, **when: bool) -> str:
    """The run's last save fails, as on a full disk, where on_error says to go on."""
    checkpointer, run = make(folder, on_error="continue", async_mode="async")
    run.fill(math.nan)
    with checkpointer:
        try:
            checkpointer.save(4, TrainState(4), **when)
        except CheckpointError as error:
            return str(error)
    return ""


def test_no_run_ends_well_without_its_last_save(tmp_path: Path) -> None:
    """Otherwise a pre-empted run would end with status 0 and nothing to resume from."""
    for when in ("last", "now"):
        for message in on_ranks(ends_without_its_save, 1, str(tmp_path), **{when: True}):
            assert "saving step 4 failed" in message
    for message in on_ranks(ends_without_its_save, 1, str(tmp_path)):
        assert message == ""  # logged: training goes on


def fails_during_a_save(folder: str) -> tuple[str, float]:
    """The error, and the seconds from it to the end, while a frozen rank keeps the save from
    ending.
    """
    never = threading.Event()
    checkpointer_module.write_checkpoint = lambda *_: never.wait(60)  # type: ignore[assignment]
    run, config = FakeRun(0, 1), run_config(folder, async_mode="async")
    config = dataclasses.replace(config, comm=CommConfig(init_timeout_seconds=1))
    start = time.monotonic()
    try:
        with Checkpointer(config, run, run) as checkpointer:  # type: ignore[arg-type]
            checkpointer.save(2, TrainState(2))
            raise RuntimeError("training's own")
    except RuntimeError as error:
        return str(error), time.monotonic() - start


def test_a_save_that_never_ends_does_not_keep_a_failed_run(tmp_path: Path) -> None:
    ((message, seconds),) = on_ranks(fails_during_a_save, 1, str(tmp_path))
    assert message == "training's own"
    assert 1 <= seconds < 20


def save_nothing(folder: str) -> list[str]:
    checkpointer, _ = make(folder, enable=False)
    with checkpointer:
        assert checkpointer.load() is None
        assert checkpointer.maybe_save(2, TrainState(2), last=True, now=True) is None
        assert not checkpointer.preempted()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # there is nothing to save
        checkpointer.check_failure()
    return os.listdir(folder)


def test_without_checkpoints_nothing_is_written(tmp_path: Path) -> None:
    assert on_ranks(save_nothing, 1, str(tmp_path)) == [[]]


def folder_that_cannot_be(folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        make(f"{folder}/file")
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_everyones_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    messages = on_ranks(folder_that_cannot_be, 2, str(tmp_path))
    assert all(
        "Not a directory" in message and "checkpoint.folder" in message for message in messages
    )


def different_folders(folder: str) -> str:
    checkpointer_module.PROBE_SECONDS = 0.2
    with pytest.raises(CheckpointError) as caught:
        make(f"{folder}/{dist.get_rank()}")
    return str(caught.value)


def test_ranks_that_see_different_folders_are_told_at_start(tmp_path: Path) -> None:
    messages = on_ranks(different_folders, 2, str(tmp_path))
    assert all("rank 1" in message and "share" in message for message in messages)


def export(folder: str) -> None:
    checkpointer, run = make(folder, last_save_model_only=True, export_dtype="bfloat16")
    with checkpointer:
        checkpointer.save(2, TrainState(2))
        run.fill(1.0)
        checkpointer.save(4, TrainState(4), last=True)


def test_model_only_export_is_cast_and_not_resumed_from(tmp_path: Path) -> None:
    on_ranks(export, 2, str(tmp_path))
    stored = StoredCheckpoint.open(tmp_path / "checkpoint" / "step-4")
    assert all(key.startswith("model.") for key in stored.tensors)
    tensor = stored.read("model.embedding")
    assert torch.equal(tensor, expected("embedding", (11, 3), 0, 11, 1.0).bfloat16())
    assert on_ranks(load_and_check, 2, str(tmp_path))[0] == TrainState(2)
    (message,) = set(on_ranks(load_error, 2, str(tmp_path), load_step=4))
    assert "model only" in message


def load_another_model(folder: str) -> str:
    checkpointer, run = make(folder, filled=False)
    if dist.get_rank() == 0:
        run.params[0] = dataclasses.replace(run.params[0], fqn="layers.9.w")
        run.states = [state for state in run.states if state.fqn != "layers.0.w"]
    with checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.load()
    return str(caught.value)


def test_another_model_is_refused_by_name(saved_by_4: str) -> None:
    messages = on_ranks(load_another_model, 2, saved_by_4)
    assert all(
        "model.layers.0.w" in message or "model.layers.9.w" in message for message in messages
    )


def test_an_excluded_name_that_matches_nothing_is_named(saved_by_4: str) -> None:
    (message,) = on_ranks(load_error, 1, saved_by_4, exclude_from_loading=("foo*",))
    assert message.startswith("ValueError: checkpoint.exclude_from_loading: 'foo*' matches nothing")


def resume_random(folder: str) -> tuple[list[float], list[float]]:
    checkpointer, _ = make(folder)
    with checkpointer:
        random.gauss(0, 1)  # leaves a second value in Python's generator
        checkpointer.save(2, TrainState(2))
        before = [torch.rand(()).item(), random.random(), random.gauss(0, 1)]
        checkpointer.load()
        return before, [torch.rand(()).item(), random.random(), random.gauss(0, 1)]


def test_random_states_are_restored_rank_by_rank(tmp_path: Path) -> None:
    for before, after in on_ranks(resume_random, 2, str(tmp_path)):
        assert before == after


def resume_on_a_gpu(folder: str) -> TrainState | None:
    checkpointer, _ = make(folder)
    with checkpointer:
        checkpointer.save(2, TrainState(2))
        here = checkpointer_module.random_tensors
        checkpointer_module.random_tensors = lambda rank: {  # type: ignore[assignment]
            **here(rank),
            f"random.{rank}.torch_cuda": torch.zeros(16, dtype=torch.uint8),
        }
        return checkpointer.load()


def test_saved_on_cpus_resumes_where_a_gpu_has_a_generator_too(tmp_path: Path) -> None:
    assert on_ranks(resume_on_a_gpu, 2, str(tmp_path)) == [TrainState(2)] * 2


def pauses(folder: str) -> list[tuple[float, float]]:
    """(pause, time until saved) in seconds, of foreground and background saves of 16 MB a rank."""
    found = []
    for async_mode in ("disabled", "async"):
        config, run = run_config(f"{folder}/{async_mode}", async_mode=async_mode), FakeRun(0, 1)
        rank, rows = dist.get_rank(), 2048
        big = torch.ones(rows, 2048)
        run.params = [
            LocalParam("big", big, (rows * dist.get_world_size(), 2048), "tail", 1, rows * rank)
        ]
        run.states = []
        with Checkpointer(config, run, run) as checkpointer:  # type: ignore[arg-type]
            checkpointer.save(1, TrainState(1))  # the first background one allocates the copies
            checkpointer.wait()
            dist.barrier()
            started = time.perf_counter()
            pause = checkpointer.save(2, TrainState(2))
            checkpointer.wait()
            found.append((pause, time.perf_counter() - started))
    return found


def test_a_background_save_pauses_training_for_a_fraction_only(tmp_path: Path) -> None:
    for (synchronous, _), (background, until_saved) in on_ranks(pauses, 2, str(tmp_path)):
        assert background < 0.5 * synchronous  # about 0.05 on an idle machine
        assert background < 0.5 * until_saved


def corrupt_at_random(folder: str, count: int) -> int:
    """Change one byte, load, and put the byte back. Returns how many loads noticed the change."""
    checkpointer, run = make(folder, filled=False)
    step = Path(folder, "checkpoint", "step-2")
    files = sorted(step.iterdir())
    sizes = [path.stat().st_size for path in files]
    generator = random.Random(0)
    noticed = 0
    with checkpointer:
        for _ in range(count):
            path = generator.choices(files, sizes)[0]
            original = path.read_bytes()
            damaged = bytearray(original)
            damaged[generator.randrange(len(original))] ^= generator.randrange(1, 256)
            path.write_bytes(damaged)
            run.fill(7.0)
            message = ""
            try:
                assert checkpointer.load() == TrainState(2, 20, 160)
            except CheckpointError as error:
                message = str(error)
                noticed += 1
            if message:
                assert path.name in message or path.name == "checksums.json", message
            else:
                run.check(0.0)
            path.write_bytes(original)
        assert checkpointer.load() == TrainState(2, 20, 160)
    return noticed


def test_a_changed_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    on_ranks(save, 2, str(tmp_path))
    (noticed,) = on_ranks(corrupt_at_random, 1, str(tmp_path), 200)
    assert noticed > 100


def preempted_after(folder: str, told: int) -> list[bool]:
    checkpointer, _ = make(folder)
    answers = []
    with checkpointer:
        for step in range(3):
            if step == told and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(checkpointer.preempted())
            dist.barrier()
            checkpointer.maybe_save(step * 2 + 1, TrainState(step * 2 + 1), now=answers[-1])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return answers


def test_a_signal_to_one_rank_is_agreed_on_by_all(tmp_path: Path) -> None:
    assert on_ranks(preempted_after, 3, str(tmp_path), 1) == [[False, True, True]] * 3
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-3", "step-5"]


def test_killed_in_the_middle_of_saves_nothing_complete_is_lost(tmp_path: Path) -> None:
    report = kill_and_resume(save_forever, tmp_path, rounds=4, world_size=2, seed=0)
    assert report.rounds == 4
    assert report.last_step > 4
