"""run_train.sh and tools/setup_env.sh with a stand-in for Python: nothing is installed or run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Answers the scripts' calls of an interpreter. `-m venv [--clear] .venv` copies it to .venv/bin,
# and `-m pip` writes a line to the log.
FAKE_PYTHON = """#!/usr/bin/env bash
here="$(dirname "${BASH_SOURCE[0]}")"
case "$1 ${2:-}" in
  "-c "*device_count*) echo "${FAKE_GPUS:-0}" ;;
  "-c "*) [[ "$2" != *find_spec* ]] && [ -z "${FAKE_OLD:-}" ] || exit 1 ;;
  "-m venv")
    shift 2
    [ "$1" != --clear ] || { rm -rf .venv; echo cleared >>"$FAKE_LOG"; shift; }
    mkdir -p "$1/bin"; cp "${BASH_SOURCE[0]}" "$1/bin/python" ;;
  "-m pip")
    [[ "$*" != *--editable* ]] || { echo editable >>"$FAKE_LOG"; exit; }
    touch .venv/half; echo "pip ${!#}" >>"$FAKE_LOG"; sleep "${FAKE_SLEEP:-0}"; rm .venv/half ;;
  *launch.py*) shift; printf '%s\\n' "OMP=${OMP_NUM_THREADS:-}" "$@" ;;
  *train.py*) echo "train.py ${*:2}" ;;
  *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


FIRST = ["cleared", "pip requirements.lock", "editable"]
"""What a first set-up does."""


class Launch:
    """A copy of the launch scripts in a folder of its own, with the stand-in as the interpreter."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy of the repo"
        (self.root / "tools").mkdir(parents=True)
        for name in (
            "run_train.sh",
            "tools/setup_env.sh",
            "requirements.lock",
            "requirements-dev.lock",
            "pyproject.toml",
        ):
            shutil.copy(ROOT / name, self.root / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.fake = self.bin / "fake-python"
        self.fake.write_text(FAKE_PYTHON)
        self.fake.chmod(0o755)
        self.log = folder / "log"
        self.log.touch()
        self.cwd = folder
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "FAKE_LOG": str(self.log),
            "MATRIXTITAN_PYTHON": str(self.fake),
        }
        for name in ("python", "python3"):  # an active environment without torch
            self.put_on_path(name, "#!/bin/sh\nexit 1\n")
        self.put_on_path("nvidia-smi", "#!/bin/sh\nexit 9\n")  # and no GPU

    def put_on_path(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "run_train.sh"), *arguments],
            cwd=self.cwd,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def arguments_of_torchrun(self, *arguments: str, **environment: str) -> list[str]:
        result = self.run(*arguments, **environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    def installs(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_for_install(self) -> None:
        deadline = time.monotonic() + 20
        while "pip requirements.lock" not in self.installs():
            assert time.monotonic() < deadline, "the set-up never reached pip"
            time.sleep(0.02)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def test_first_use_sets_up_once(launch: Launch) -> None:
    assert launch.run("--print-config").returncode == 0
    assert launch.run("--print-config").returncode == 0
    assert launch.installs() == FIRST


def test_two_first_uses_at_once_set_up_once(launch: Launch) -> None:
    first = launch.start("--print-config", FAKE_SLEEP="1")
    launch.wait_for_install()
    second = launch.start("--print-config")
    _, second_log = second.communicate(timeout=30)
    first.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "waiting for another process" in second_log
    assert launch.installs() == FIRST


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_an_interrupted_set_up_starts_clean(launch: Launch, number: signal.Signals) -> None:
    process = launch.start("--print-config", FAKE_SLEEP="30")
    launch.wait_for_install()
    os.killpg(process.pid, number)
    process.communicate(timeout=10)
    assert process.returncode != 0
    assert (launch.root / ".venv/half").exists()  # left by the interrupted set-up
    assert launch.run("--print-config").returncode == 0
    assert launch.installs() == ["cleared", "pip requirements.lock", *FIRST]
    assert not (launch.root / ".venv/half").exists()


def test_a_changed_lock_file_is_installed_over_what_is_there(launch: Launch) -> None:
    launch.run("--print-config")
    with (launch.root / "requirements.lock").open("a") as file:
        file.write("another-package==1\n")
    assert launch.run("--print-config").returncode == 0
    assert launch.installs() == [*FIRST, "pip requirements.lock", "editable"]


def test_an_environment_of_before_gets_the_package_and_is_not_built_again(launch: Launch) -> None:
    launch.run("--print-config")
    stamp = launch.root / ".venv/installed"
    stamp.write_text("".join(stamp.read_text().splitlines(keepends=True)[:-1]))
    (launch.root / "pyproject.toml").write_text("another version")
    for _ in range(2):
        assert launch.run("--print-config").returncode == 0
    assert launch.installs() == [*FIRST, "editable"]


def test_a_clone_that_was_moved_is_installed_again(launch: Launch) -> None:
    launch.run("--print-config")
    launch.root = launch.root.rename(launch.root.with_name("moved"))
    for _ in range(2):
        assert launch.run("--print-config").returncode == 0
    assert launch.installs() == [*FIRST, "editable"]


def test_an_active_environment_with_torch_is_used(launch: Launch) -> None:
    (launch.bin / "python").write_text(
        FAKE_PYTHON.replace('"-c "*) ', '"-c "* | "- "*) exit 0 ;;\n  "-") ')
    )
    del launch.environment["MATRIXTITAN_PYTHON"]
    assert launch.run("--print-config").stdout == "train.py --print-config\n"
    assert launch.installs() == []
    assert launch.run("--print-config", MATRIXTITAN_PYTHON=str(launch.fake)).returncode == 0
    assert launch.installs() == FIRST


def test_no_python_says_which_is_needed(launch: Launch) -> None:
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        shutil.copy(launch.fake, launch.bin / name)
    del launch.environment["MATRIXTITAN_PYTHON"]
    result = launch.run("--print-config", FAKE_OLD="1")
    assert result.returncode == 2
    assert "no Python 3.11 or newer" in result.stderr
    assert "MATRIXTITAN_PYTHON" in result.stderr


def test_a_wrong_interpreter_is_named(launch: Launch) -> None:
    result = launch.run("--print-config", MATRIXTITAN_PYTHON="/no/such/python")
    assert result.returncode == 2
    assert "/no/such/python" in result.stderr


@pytest.mark.parametrize("option", ["--help", "-h", "--print-config"])
def test_questions_need_no_torchrun(launch: Launch, option: str) -> None:
    assert (
        launch.run("--training.steps", "3", option).stdout
        == f"train.py --training.steps 3 {option}\n"
    )


def test_one_machine_without_gpu_runs_two_processes(launch: Launch) -> None:
    arguments = launch.arguments_of_torchrun("--job.description", "two words")
    assert arguments[0] == "OMP=1"
    assert _value(arguments, "--nproc-per-node") == "2"
    assert _value(arguments, "--nnodes") == "1"
    assert _value(arguments, "--rdzv-endpoint").endswith(":0")
    # a host name that does not resolve would hang the rendezvous
    assert _value(arguments, "--local-addr") == "127.0.0.1"
    assert arguments[-3:] == [f"{launch.root}/train.py", "--job.description", "two words"]


def test_nproc_and_restarts_are_passed_on(launch: Launch) -> None:
    arguments = launch.arguments_of_torchrun(NPROC="3", MAX_RESTARTS="1", OMP_NUM_THREADS="4")
    assert arguments[0] == "OMP=4"
    assert _value(arguments, "--nproc-per-node") == "3"
    assert _value(arguments, "--max-restarts") == "1"


@pytest.mark.parametrize(
    "environment",
    [
        {"NNODES": "2", "NODE_RANK": "1"},
        {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
        {"SLURM_NNODES": "9", "SLURM_NODEID": "7", "NNODES": "2", "NODE_RANK": "1"},
    ],
    ids=["by hand", "slurm", "by hand inside slurm"],
)
def test_several_machines(launch: Launch, environment: dict[str, str]) -> None:
    arguments = launch.arguments_of_torchrun(MASTER_ADDR="host-a", **environment)
    assert _value(arguments, "--nnodes") == "2"
    assert _value(arguments, "--node-rank") == "1"
    assert _value(arguments, "--master-addr") == "host-a"
    assert _value(arguments, "--master-port") == "29500"


def test_slurm_names_the_first_machine(launch: Launch) -> None:
    launch.put_on_path(
        "scontrol", '#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"\n'
    )
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[3-4]"}
    assert _value(launch.arguments_of_torchrun(**slurm), "--master-addr") == "n3"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"NNODES": "2", "MASTER_ADDR": "host-a"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        ({"NNODES": "two"}, "NNODES"),
        ({"NPROC": "0"}, "NPROC"),
        ({"NPROC": "1025"}, "NPROC is '1025'; it must be a number of processes, from 1 to 1024"),
        ({"NPROC": "9" * 20}, "from 1 to 1024"),
        ({"NNODES": "9" * 20}, "from 1 to 100000"),
        ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS"),
        ({"MAX_RESTARTS": "9" * 20}, "from 0 to 1000000"),
        ({"NNODES": "2", "MASTER_ADDR": "host-a", "NODE_RANK": "2"}, "from 0 to 1"),
        ({"NNODES": "2", "MASTER_ADDR": "host-a", "NODE_RANK": "b"}, "NODE_RANK is 'b'"),
        # 2^64 + 1, which arithmetic of 64 bits takes for 1
        (
            {"NNODES": "2", "MASTER_ADDR": "host-a", "NODE_RANK": "18446744073709551617"},
            "from 0 to 1",
        ),
        (
            {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "0", "MASTER_PORT": "70000"},
            "MASTER_PORT is '70000'",
        ),
        ({"SLURM_LOCALID": "1"}, "--ntasks-per-node=1"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    launch: Launch, environment: dict[str, str], named: str
) -> None:
    result = launch.run(**environment)
    assert result.returncode == 2
    assert named in result.stderr


def test_more_processes_than_gpus(launch: Launch) -> None:
    launch.put_on_path("nvidia-smi", "#!/bin/sh\n")
    result = launch.run(NPROC="3", FAKE_GPUS="2")
    assert result.returncode == 2
    assert "NPROC is 3, but this machine has 2 GPUs" in result.stderr
    assert launch.run(NPROC="2", FAKE_GPUS="2").returncode == 0


def test_lock_files_are_exact_and_the_one_with_the_tools_includes_the_other() -> None:
    for name in ("requirements.lock", "requirements-dev.lock"):
        lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
        pins = [line for line in lines if line and not line.startswith(("#", "-r "))]
        assert len(pins) > 10
        assert all("==" in pin for pin in pins)
    assert "-r requirements.lock" in lines


def _value(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]
