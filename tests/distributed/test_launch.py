"""run_train.sh with real gloo processes, on one machine or two: every way to end ends all of them.

The interpreter that runs the tests is the active environment, so nothing is installed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "MATRIXTITAN_TEST_RUN"
LAUNCH_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("NPROC", "NNODES", "NODE_RANK", "MAX_RESTARTS", "MATRIXTITAN_PYTHON"),
)

CONFIG = f"""
[job]
dump_folder = "out"

[data]
sources = [{{ type = "text", path = "{ROOT}/matrixtitan/*.py" }}]
cache_dir = "cache"

[training]
global_batch_size = 4
local_batch_size = 1
seq_len = 32
steps = 2
mixed_precision_param = "float32"

[lr_scheduler]
warmup_steps = 1

[metrics]
log_freq = 1
enable_tensorboard = false
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


class Runs:
    """Starts run_train.sh in a folder of its own and finds every process that came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{MARK}={uuid.uuid4()}"
        self.logs: dict[subprocess.Popen[bytes], Path] = {}
        (folder / "tiny.toml").write_text(CONFIG)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "TORCHELASTIC_")) and name not in LAUNCH_VARIABLES
        }
        name, value = self.mark.split("=")
        mine = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            name: value,
        }
        log = self.folder / f"log{len(self.logs)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(ROOT / "run_train.sh"), "--config", "tiny", *arguments],
                cwd=self.folder,
                env={**inherited, **mine, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.logs[process] = log
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return self.logs[process].read_text()

    def wait_for(self, process: subprocess.Popen[bytes], text: str) -> None:
        deadline = time.monotonic() + 90
        while text not in self.log(process):
            assert process.poll() is None, self.log(process)
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.log(process)}"
            time.sleep(0.05)

    def finish(self, process: subprocess.Popen[bytes], timeout: float) -> int:
        """The exit code. Fails, with the log and every rank's stack, after `timeout` seconds."""
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            for pid, environ in self.alive().items():
                if "RANK" in environ:
                    os.kill(pid, signal.SIGABRT)
            self.none_left(within=5)
            pytest.fail(f"still running after {timeout} s:\n{self.log(process)}")

    def alive(self) -> dict[int, dict[str, str]]:
        """pid -> environment of every process that descends from a start."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # ended meanwhile, or somebody else's
                continue
            if self.mark in entries:
                pairs = (entry.partition("=") for entry in entries)
                found[int(folder.name)] = {name: value for name, _, value in pairs}
        return found

    def none_left(self, within: float) -> bool:
        deadline = time.monotonic() + within
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    for pid in runs.alive():
        os.kill(pid, signal.SIGKILL)
    for process in runs.logs:
        process.wait(10)


def test_trains_on_two_processes_in_the_folder_of_the_caller(runs: Runs) -> None:
    process = runs.start("--training.steps", "2")
    assert runs.finish(process, 150) == 0, runs.log(process)
    assert "2 ranks" in runs.log(process)
    assert "step 2/2" in runs.log(process)
    assert runs.log(process).count("transport: ") == 1
    assert (runs.folder / "out/config.toml").is_file()


@pytest.mark.parametrize("to", ["group", "launcher"])
def test_ctrl_c_ends_all_ranks_promptly(runs: Runs, to: str) -> None:
    """A terminal signals the whole foreground group, a job manager only the process it started."""
    process = runs.start("--training.steps", "1000000")
    runs.wait_for(process, "step 2/")
    assert len(runs.alive()) >= 3
    send = os.killpg if to == "group" else os.kill
    send(process.pid, signal.SIGINT)
    assert runs.finish(process, 20) == 130  # torchrun would kill a rank that hangs after 30
    said = runs.log(process).rpartition("tokens/s")[2].splitlines()[1:]
    assert [line for line in said if line != "interrupted"] == [
        "ended by SIGINT; nothing was saved, since checkpoint.enable is false"
    ]
    assert said.count("interrupted") <= 1
    assert runs.none_left(within=2), runs.alive().keys()


def test_a_rank_that_dies_ends_the_job_with_an_error(runs: Runs) -> None:
    process = runs.start("--training.steps", "1000000")
    runs.wait_for(process, "step 2/")
    os.kill(pid := _rank(runs, process, "1"), signal.SIGKILL)
    assert runs.finish(process, 30) == 1
    log = runs.log(process)
    assert log.endswith(f"error: rank 1 (pid {pid}) was ended by SIGKILL\n")
    assert "Traceback" not in log
    # a loader's worker looks every 5 seconds whether the process that it reads for is alive
    assert runs.none_left(within=10), runs.alive().keys()


def test_a_second_run_does_not_write_where_the_first_still_does(runs: Runs) -> None:
    """Here ranks outlive their launcher, which had no time to end them."""
    saves = ("--checkpoint.enable", "true", "--checkpoint.interval", "1")
    first = runs.start("--training.steps", "1000000", *saves)
    runs.wait_for(first, "step 2/")
    os.kill(first.pid, signal.SIGKILL)
    second = runs.start(*saves)
    assert runs.finish(second, 150) != 0
    assert "another run is writing to out/checkpoint" in runs.log(second)
    for pid in runs.alive():
        os.kill(pid, signal.SIGKILL)
    assert runs.none_left(within=10)
    third = runs.start("--training.steps", "3", *saves)
    assert runs.finish(third, 150) == 0, runs.log(third)
    assert "loaded out/checkpoint/step-" in runs.log(third)


def test_two_machines_of_two_processes_train_together(runs: Runs) -> None:
    together = {
        "NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    machines = [
        runs.start(NODE_RANK="0", **together),
        runs.start(SLURM_NODEID="1", **together),
    ]
    for machine in machines:
        assert runs.finish(machine, 150) == 0, "\n".join(map(runs.log, machines))
    assert "4 ranks" in runs.log(machines[0])
    assert "step 2/2" in runs.log(machines[0])


def test_a_config_mistake_is_answered_without_torchrun(runs: Runs) -> None:
    process = runs.start("--training.step", "3")
    assert runs.finish(process, 30) == 2
    assert "did you mean training.steps" in runs.log(process)
    assert "torch" not in runs.log(process)


def test_a_mistake_that_only_a_rank_sees_is_told_once_and_not_tried_again(runs: Runs) -> None:
    process = runs.start("--job.dump_folder", "tiny.toml/out", MAX_RESTARTS="2")
    assert runs.finish(process, 150) == 2
    (line,) = runs.log(process).splitlines()  # nothing of torchrun, whichever rank told it
    assert line.startswith("error: ")
    assert "job.dump_folder cannot be made or written: " in line
    assert "'tiny.toml/out'" in line


def test_a_bug_ends_with_its_traceback_and_torchruns_report(runs: Runs) -> None:
    """An exception that a library raises, on rank 0 alone, stands for a bug."""
    (runs.folder / "out").mkdir()
    (runs.folder / "out/plan.json").symlink_to("/dev/full")
    process = runs.start()
    assert runs.finish(process, 150) == 1
    log, cause, last = runs.log(process).partition("Root Cause")
    assert cause, log
    assert "Traceback" in log
    assert "OSError: " in last
    assert "error: " not in log.splitlines()


def test_the_debug_config_trains_as_it_stands_where_ranks_do_not_divide_its_batch(
    runs: Runs,
) -> None:
    small = ("--data.sources", f'[{{type = "text", path = "{ROOT}/matrixtitan/*.py"}}]')
    short = ("--training.steps", "2", "--training.seq_len", "32", "--validation.enable", "false")
    process = runs.start("--config", "debug", *small, *short, NPROC="3")
    assert runs.finish(process, 150) == 0, runs.log(process)
    assert "16 sequences of 32 tokens and 2 rows of padding" in runs.log(process)
    assert "step 2/2" in runs.log(process)


def _rank(runs: Runs, launcher: subprocess.Popen[bytes], rank: str) -> int:
    """The pid of a rank on this machine. A loader's worker has the rank's environment, but another
    parent.
    """
    for pid, environ in runs.alive().items():
        parent = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1]
        if environ.get("RANK") == rank and int(parent) == launcher.pid:
            return pid
    raise AssertionError(f"no rank {rank} among {runs.alive().keys()}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
