"""tools/inspect_checkpoint.py: what it shows, and that it finds damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from matrixtitan.checkpoint import Checkpointer, TrainState
from matrixtitan.plan.shard import MatrixShard, Plan, Segment
from matrixtitan.tools.inspect_checkpoint import main
from tests.lib.checkpoint_fakes import PARAMS, FakeRun, cut, expected, run_config
from tests.lib.distributed import run_distributed


def save(folder: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shards = []
    for number, (fqn, (shape, role)) in enumerate(PARAMS.items()):
        segments = [Segment(r, *cut(shape[0], r, world_size)) for r in range(world_size)]
        if role == "matrix" and len(shape) == 2:
            segments = [Segment(number % world_size, 0, shape[0])]
        shards.append(MatrixShard(fqn, shape, role, "unit", 1, tuple(segments)))  # type: ignore[arg-type]
    config, run = run_config(folder), FakeRun(rank, world_size)
    run.plan = Plan(world_size, tuple(shards))
    with Checkpointer(config, run, run) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(7, TrainState(7, 70, 1700))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    run_distributed(save, 2, str(folder))
    return folder


def test_shows_step_plan_shapes_and_norms(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(saved), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["meta"]["train_state"]["step"] == 7
    assert figures["config"]["checkpoint"]["interval"] == 2
    assert Plan.from_json(figures["plan"]).by_fqn["layers.1.w"].owner == 1
    embedding = figures["tensors"]["model.embedding"]
    assert (embedding["shape"], embedding["dtype"], embedding["chunks"]) == ([11, 3], "float32", 2)
    norm = expected("embedding", (11, 3), 0, 11).double().norm().item()
    assert embedding["norm"] == pytest.approx(norm, rel=1e-12)
    assert figures["sections"]["model"] == {"tensors": 5, "bytes": 4 * (24 + 15 + 24 + 33 + 7)}


def test_prints_for_people(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved / "checkpoint" / "step-7"
    assert main([str(path), "--no-norms", "--keys", "*norm*"]) == 0
    printed = capsys.readouterr().out
    assert "step 7, 1,700 tokens seen, next window 70" in printed
    assert "rank 1: " in printed
    assert "layers.1.w" in printed  # in the plan
    assert "optimizer.norm.momentum" in printed
    assert "model.embedding" not in printed


@pytest.mark.parametrize(("keys", "near"), [("layers.1.w*", "model.layers.1.w"), ("", "")])
def test_keys_that_match_nothing_are_an_error(
    keys: str, near: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(saved), "--keys", keys]) == 1
    printed, message = capsys.readouterr()
    assert not printed
    assert f"--keys {keys!r} matches none of the 27 tensors" in message
    assert near in message.partition("nearest are")[2]


def test_a_path_that_cannot_be_opened_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x" * 5000]) == 1
    assert "File name too long" in capsys.readouterr().err


def test_verify_names_what_is_damaged(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step-7"
    shutil.copytree(saved / "checkpoint" / "step-7", path)
    assert main([str(path), "--verify"]) == 0
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 4
    (path / "__0_0.distcp").write_bytes(data)
    (path / "config.json").unlink()
    (path / "__1_0.distcp").unlink()
    capsys.readouterr()
    assert main([str(path), "--verify"]) == 1
    printed = capsys.readouterr().out
    assert "__0_0.distcp: bytes" in printed
    assert "__1_0.distcp: bytes" in printed
    assert "config.json is missing" in printed


def test_no_checkpoint_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "no checkpoint at" in capsys.readouterr().err
