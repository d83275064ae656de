"""Every tool starts in each way that the docs name, installed or not, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from matrixtitan.__main__ import TOOLS, main

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in TOOLS.glob("[a-z]*.py"))
LAB = sorted(
    path.name for path in (ROOT / "tools" / "lab").glob("*.py") if "__main__" in path.read_text()
)


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**without, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_there_are_tools() -> None:
    assert {"convert_checkpoint", "launch", "plan", "sweep"} <= set(NAMES)
    assert {"bench.py", "bench_muon.py", "ns_table.py"} <= set(LAB)


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_tool_by_its_path(name: str, tmp_path: Path) -> None:
    done = run(str(ROOT / "tools" / f"{name}.py"), "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"usage: matrixtitan {name} " in done.stdout
    assert os.access(ROOT / "tools" / f"{name}.py", os.X_OK)


@pytest.mark.parametrize("name", LAB)
def test_help_of_a_lab_script(name: str) -> None:
    done = run(f"tools/lab/{name}", "--help", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_list_of_tools_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    show = "import sys; from matrixtitan.__main__ import main; main(['--help'])"
    done = run("-c", f"{show}; print([m for m in sys.modules if m in ('torch', 'argparse')])")
    *listed, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert [line.split()[0] for line in listed[2:]] == NAMES
    assert all(line.endswith(".") for line in listed[2:])
    assert all(len(line) <= 100 for line in listed)
    assert main(["paln"]) == 2
    assert capsys.readouterr().err.startswith("matrixtitan: no tool 'paln'; choose from convert_")


def test_a_reader_that_is_gone_is_no_error() -> None:
    """As in `matrixtitan plan ... | head -1`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "matrixtitan", "--help"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_console_entry_is_this_main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"matrixtitan": f"{main.__module__}:{main.__name__}"}


def test_a_tool_started_by_its_path_is_that_of_its_clone(tmp_path: Path) -> None:
    """Neither of the folder that it is started in, nor of the environment."""
    other = tmp_path / "matrixtitan" / "__init__.py"
    other.parent.mkdir()
    other.write_text("raise SystemExit('another clone')")
    plan = str(ROOT / "tools" / "plan.py")
    for place in ({"cwd": tmp_path}, {"PYTHONPATH": str(tmp_path)}):
        assert run(plan, "--help", **place).returncode == 0  # type: ignore[arg-type]


WITHOUT_INSTALL = f"""
import sys
sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]  # an editable install adds it
sys.path.insert(0, {str(ROOT / "tools/lab")!r})
import bench_muon
"""
"""Starts a lab script where this clone is not installed, whether the environment has it or not."""


@pytest.mark.parametrize("path", ["", "other"])
def test_a_lab_script_measures_its_own_clone_only(path: str, tmp_path: Path) -> None:
    if path:
        (tmp_path / "matrixtitan.py").touch()
    done = run("-c", WITHOUT_INSTALL, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"error: this environment has the matrixtitan of {tmp_path}"
        if path
        else "error: this environment has no matrixtitan"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (("convert_checkpoint", "nowhere", "out", "--to", "huggingface"), "safetensors"),
        (("convert_checkpoint", "nowhere", "out", "--to", "huggingface"), "tokenizers"),
        (("train_tokenizer", "--path", "nowhere", "--output", "out"), "tokenizers"),
    ],
)
def test_a_tool_without_its_extra_names_it_first(
    arguments: tuple[str, ...], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("matrixtitan.tools.train_tokenizer.init_logger", lambda: None)
    with pytest.raises(SystemExit, match=f"^error: {module} is missing; install the tools extra"):
        main(arguments)


def test_a_hugging_face_folder_is_not_opened_without_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SystemExit, match="install the tools extra"):
        main(["generate", "--checkpoint", str(tmp_path)])


def test_extras_are_those_of_the_project() -> None:
    from matrixtitan.extras import EXTRA_OF

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for module, extra in EXTRA_OF.items():
        assert any(line.startswith(module) for line in project["optional-dependencies"][extra])


@pytest.mark.parametrize(("option", "value"), [("--rounds", "0"), ("--flavor", "150m")])
def test_wrong_arguments_of_bench_muon(option: str, value: str) -> None:
    done = run("tools/lab/bench_muon.py", option, value, PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert option in done.stderr.splitlines()[-1]
