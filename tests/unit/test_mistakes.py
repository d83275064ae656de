"""What counts as a mistake, and what the launcher makes of the marks that ranks leave."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.run

from matrixtitan.config import TrainingConfig
from matrixtitan.mesh import init_world
from matrixtitan.mistakes import exit_code, is_mistake, tell, told_by_another
from matrixtitan.ranks import split_batch
from matrixtitan.tools import launch


def raised(act: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()  # type: ignore[operator]
    return caught.value


def test_a_mistake_is_a_value_error_that_our_code_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = TrainingConfig(global_batch_size=3, local_batch_size=2)
    assert is_mistake(raised(lambda: split_batch(bad, 1)))
    assert not is_mistake(raised(lambda: torch.optim.AdamW([torch.zeros(1)], lr=-1)))  # torch's
    assert not is_mistake(raised(lambda: split_batch(None, 1)))  # type: ignore[arg-type]
    monkeypatch.setenv("LOCAL_RANK", "first")  # int() raises in our frame, which calls it
    assert not is_mistake(raised(lambda: init_world(None)))  # type: ignore[arg-type]


def test_a_message_appears_once_in_a_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rank(attempt: int, number: int) -> None:
        folder = tmp_path / "run" / f"attempt_{attempt}" / str(number)
        folder.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))

    assert exit_code(tmp_path) is None
    rank(0, 0)
    assert not told_by_another()
    tell("no space", final=False)
    rank(0, 1)
    assert told_by_another()
    tell("no space", final=False)
    assert exit_code(tmp_path) == 1
    rank(1, 0)  # the next try may end otherwise
    assert not told_by_another()
    assert exit_code(tmp_path) is None
    tell("no such flavor", final=True)
    rank(2, 0)  # after a mistake there is nothing to try
    assert told_by_another()
    assert exit_code(tmp_path) == 2
    assert capsys.readouterr().err == "error: no space\nerror: no such flavor\n"


def test_without_torchrun_each_process_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not told_by_another(wait=1000)
    tell("a", final=True)
    tell("b", final=True)
    assert capsys.readouterr().err == "error: a\nerror: b\n"


@pytest.mark.parametrize(
    ("processes", "arguments", "code"),
    [
        ("3", ["--training.local_batch_size", "8"], 2),
        ("2", ["--parallelism.data_parallel_shard_degree", "3"], 2),
        ("2", ["--training.stepz", "8"], 2),
        ("2", ["--training.global_batch_size", "0", "--training.steps", "0"], 2),
        # the ranks of a dry run are not those of the machine
        ("1", ["--parallelism.dry_run_world_size", "3", "--training.local_batch_size", "8"], 2),
        ("2", ["--parallelism.dry_run_world_size", "2"], 2),
        ("1", ["--training.local_batch_size", "8"], 0),
        ("1", ["--training.local_batch_size", "8"], 1),
    ],
)
def test_the_launcher_checks_before_torchrun(
    processes: str,
    arguments: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = []

    def torchrun(argv: list[str]) -> None:
        started.append(argv)
        logging.getLogger("torch.distributed.elastic").warning("a rank ended")
        if code:
            raise torch.distributed.DistNetworkError("port 29500 is taken\nframe #0")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(torch.distributed.run, "main", torchrun)
    argv = ["--nnodes", "1", "--nproc-per-node", processes, "/repo/train.py", *arguments]
    assert launch.main(argv) == code
    assert len(started) == (code != 2)
    err = capsys.readouterr().err
    assert err.startswith("config error: ") == (code == 2)
    assert all(line.startswith(("config error: ", "error: ")) for line in err.splitlines())
    assert ("port 29500 is taken" in err) == (code == 1)
    assert "frame" not in err
    assert list(tmp_path.iterdir()) == []  # nothing of the launcher's is left


def test_the_launcher_needs_no_torch_for_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)
    argv = ["--nnodes", "1", "--nproc-per-node", "1", "train.py", "--training.steps"]
    assert launch.main(argv) == 2
    with pytest.raises(ImportError):
        launch.main(argv[:-1])
