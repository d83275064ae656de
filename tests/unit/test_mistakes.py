"""What counts as a mistake, and what the launcher makes of the marks that ranks leave."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import train
from matrixtitan.config import Config, TrainingConfig
from matrixtitan.mesh import init_world
from matrixtitan.mistakes import (
    PACKAGES,
    exit_code,
    is_lost_peer,
    is_mistake,
    tell,
    tell_lost_peer,
    told_by_another,
)
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


def failure(rank: int, exitcode: int, error_file: str = "<N/A>") -> ProcessFailure:
    found = ProcessFailure(rank, 1000 + rank, exitcode, error_file)
    found.error_file = error_file  # the file is made later
    return found


@pytest.mark.parametrize(
    ("failures", "machines", "lost", "said"),
    [
        ([failure(0, -15), failure(1, -9)], 1, False, "rank 1 (pid 1001) was ended by SIGKILL"),
        ([failure(0, 1), failure(1, -11)], 1, True, "rank 1 (pid 1001) was ended by SIGSEGV"),
        ([failure(0, 1), failure(1, -15)], 1, True, "rank 1 (pid 1001) was ended by SIGTERM"),
        (
            [failure(0, 1), failure(1, -15)],
            2,
            True,
            "the ranks of this machine lost ranks of other",
        ),
        ([failure(0, 1), failure(1, 1)], 2, True, "the ranks of this machine lost ranks of other"),
        # torchrun's report: of an error that a rank recorded, or of an end that nothing explains
        ([failure(0, -9), failure(1, 1, "recorded")], 1, False, None),
        ([failure(0, 1), failure(1, 1)], 1, True, None),
        ([failure(0, 1), failure(1, -15)], 2, False, "rank 1 (pid 1001) was ended by SIGTERM"),
        ([failure(0, 3)], 1, False, None),
    ],
)
def test_the_launcher_says_which_rank_a_signal_ended(
    failures: list[ProcessFailure],
    machines: int,
    lost: bool,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "recorded").write_text("{}")
    for one in failures:
        one.error_file = str(tmp_path / one.error_file)

    def torchrun(argv: list[str]) -> None:
        rank_folder = Path(argv[1]) / "run/attempt_0/0"
        rank_folder.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(rank_folder / "error.json"))
        if lost:
            tell_lost_peer(RuntimeError("Broken pipe"))
        logging.getLogger("torch.distributed.elastic").warning(
            "Sending process %s closing signal %s", 7, "SIGTERM"
        )
        logging.getLogger("torch.distributed.elastic").warning("another line of torchrun")
        raise ChildFailedError("train.py", dict(enumerate(failures)))

    monkeypatch.setattr(torch.distributed.run, "main", torchrun)
    log = logging.getLogger("torch.distributed")
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(log, "handlers", [handler])
    argv = ["--nnodes", str(machines), "--nproc-per-node", "2", "/repo/train.py"]
    if said is None:
        with pytest.raises(ChildFailedError):
            launch.main(argv)
        return
    assert launch.main(argv) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith(f"error: {said}")
    assert len(err) == 1 + lost
    assert shown == ["another line of torchrun"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("steps", [None, (), (4, 12)], ids=["disabled", "none yet", "saved"])
def test_the_launcher_says_what_a_signal_left(
    number: signal.Signals,
    steps: tuple[int, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def torchrun(argv: list[str]) -> None:
        raise SignalException(f"got signal: {number}", number)

    for step in steps or ():
        (tmp_path / f"checkpoint/step-{step}").mkdir(parents=True)
        (tmp_path / f"checkpoint/step-{step}/.metadata").touch()
    monkeypatch.setattr(torch.distributed.run, "main", torchrun)
    argv = ["--nnodes", "1", "--nproc-per-node", "2", "/repo/train.py"]
    argv += ["--job.dump_folder", str(tmp_path)]
    argv += ["--checkpoint.enable", "false" if steps is None else "true"]
    assert launch.main(argv) == 128 + number
    if steps is None:
        rest = "nothing was saved, since checkpoint.enable is false"
    elif steps:
        rest = f"started again, the run resumes from {tmp_path}/checkpoint/step-12"
    else:
        rest = f"there is no checkpoint in {tmp_path}/checkpoint yet"
    assert capsys.readouterr().err == f"ended by {number.name}; {rest}\n"


def test_a_lost_peer_is_known_by_its_error_or_a_cause_of_it() -> None:
    gone = RuntimeError("gathering layers.0 failed: [pair.cc:1] Connection closed by peer [::1]:1")
    assert is_lost_peer(gone)
    outer = RuntimeError("the loop ended")
    outer.__context__ = gone
    assert is_lost_peer(outer)
    bug = KeyError("weight")
    bug.__context__ = gone
    assert not is_lost_peer(bug)
    assert not is_lost_peer(RuntimeError("[buffer.cc:1] Timed out waiting 1000ms for recv"))


def main_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a rank whose training raises `error`."""

    def fail(config: Config) -> None:
        raise error

    fail.__code__ = fail.__code__.replace(co_filename=f"{PACKAGES[0]}x.py")
    monkeypatch.setattr(train, "train", fail)
    monkeypatch.setattr("faulthandler.enable", lambda **_: None)  # standard error is captured
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "debug"])
    return train.main()


def test_a_rank_ends_without_a_traceback_where_it_is_not_the_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert main_with(RuntimeError("saving: Broken pipe. GLHF!\n#1"), monkeypatch) == 1
    assert main_with(ValueError("model.flavor is unknown"), monkeypatch) == 2
    with pytest.raises(KeyError):
        main_with(KeyError("weight"), monkeypatch)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err.splitlines() == [
        "rank 3 ended because it lost another rank: saving: Broken pipe (--debug.traceback true "
        "shows where)",
        "error: model.flavor is unknown",
        "interrupted",
    ]


def test_the_launcher_needs_no_torch_for_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)
    argv = ["--nnodes", "1", "--nproc-per-node", "1", "train.py", "--training.steps"]
    assert launch.main(argv) == 2
    with pytest.raises(ImportError):
        launch.main(argv[:-1])


def test_after_a_mistake_a_rank_ends_at_once() -> None:
    """An orderly exit may abort in a thread that waits for a peer, after the message."""
    code = "import atexit, train; atexit.register(print, 'orderly'); print('told'); train.leave(3)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(train.__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "told\n", "")
