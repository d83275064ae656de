"""The sweep's table, its grouping by seed, and its refusal to mix sweeps. No training."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from matrixtitan.curves import CurveWriter
from matrixtitan.tools.sweep import (
    Result,
    by_settings,
    check_same_sweep,
    load_results,
    main,
    parse_axis,
    plot,
    run,
    run_folder,
    table,
)


def result(lr: str, seed: str, loss: float) -> Result:
    settings = {"optimizer.lr": lr, "debug.seed": seed}
    return Result(settings, [(1, 8.0), (2, loss)], optimizer_ms=5.0, seconds=10.0)


RESULTS = [
    result("0.1", "0", 4.0),
    result("0.2", "0", 3.0),
    result("0.1", "1", 5.0),
    result("0.2", "1", 3.5),
]


def test_seeds_are_averaged_and_the_best_comes_first() -> None:
    groups = by_settings(RESULTS)
    assert [settings for settings, _ in groups] == [
        {"optimizer.lr": "0.2"},
        {"optimizer.lr": "0.1"},
    ]
    first = table(RESULTS).splitlines()[2]
    assert first == "| 0.2 | 2 | 3.2500 | 3.0000 to 3.5000 | 5.0 | 10 |"


def test_results_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert load_results(path) == []
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in RESULTS))
    assert table(load_results(path)) == table(RESULTS)


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(RESULTS, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_without_matplotlib_the_plot_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot(RESULTS, tmp_path / "curves.png")
    assert "curves.png is left out: matplotlib is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sweeps_that_share_other_settings_do_not_mix(tmp_path: Path) -> None:
    check_same_sweep(tmp_path / "sweep.json", {"nproc": 1})
    check_same_sweep(tmp_path / "sweep.json", {"nproc": 1})
    with pytest.raises(ValueError, match="another --out"):
        check_same_sweep(tmp_path / "sweep.json", {"nproc": 2})


@pytest.mark.parametrize("text", ["optimizer.lr", "=1", "optimizer.lr="])
def test_an_axis_needs_a_key_and_values(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"section\.key"):
        parse_axis(text)
    assert parse_axis("optimizer.lr=1,2") == ("optimizer.lr", ["1", "2"])


def test_commas_within_brackets_do_not_part_values() -> None:
    lists = '[{pattern="a", lr=1}, {pattern="b"}]'
    assert parse_axis(f"optimizer.groups=[],{lists}") == ("optimizer.groups", ["[]", lists])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "optimizer.lr=1,2,1"], "has a value twice"),
        (["--config", "debug,debug"], "has a value twice"),
        (["--grid", "optimizer.lr=1", "--grid", "optimizer.lr=2"], "a key has two --grid"),
        (["--grid", "optimizer.lr=1,2", "--optimizer.lr", "3"], "--optimizer.lr is given for all"),
        (["--grid", "optimizer.lr=1,2", "--optimizer.lr=3"], "--optimizer.lr=3 is given for all"),
        (["--jobs", "0"], "--nproc and --jobs must be at least 1"),
        (["--nproc", "-1"], "--nproc and --jobs must be at least 1"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_value_that_is_a_key_is_no_second_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--out", str(tmp_path), "--job.description", "config"]
    made = Result({"config": "debug"}, [(1, 8.0)], optimizer_ms=5.0, seconds=10.0)
    monkeypatch.setattr("matrixtitan.tools.sweep.run", lambda *_: made)
    monkeypatch.setattr("matrixtitan.tools.sweep.plot", lambda *_: None)
    main(arguments)
    assert [r.settings for r in load_results(tmp_path / "results.jsonl")] == [made.settings]


def test_runs_have_folders_of_their_own(tmp_path: Path) -> None:
    values = ["a/b", "a-b", "[1, 2]", "[1,2]", "../x", "[" * 300, "[" * 301]
    settings = [{"config": value, "debug.seed": "0"} for value in values]
    settings += [{f"{section}.enable": "true"} for section in ("compile", "checkpoint")]
    folders = [run_folder(tmp_path, one) for one in settings]
    assert len(set(folders)) == len(settings)
    for folder in folders:
        folder.mkdir(parents=True)
        assert folder.parent == tmp_path / "runs"


def test_a_runs_figures_are_those_of_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last attempt in its folder. The first step's time is left out: it loads libraries."""

    def train(command: list[str], **_: Any) -> CompletedProcess[str]:
        folder = Path(command[command.index("--job.dump_folder") + 1])
        for loss in (9.0, 4.0):
            writer = CurveWriter(folder / "metrics.jsonl", 0)
            for step in (1, 2, 3):
                writer.write(step, {"time/optimizer_ms": 30.0 / step})
            writer.write(3, {"loss/validation": loss})
            writer.close()
        return CompletedProcess(command, 0)

    monkeypatch.setattr("matrixtitan.tools.sweep.subprocess.run", train)
    found = run({"config": "debug"}, [], 1, tmp_path / "run")
    assert (found.validation, found.optimizer_ms) == ([(3, 4.0)], 12.5)


def test_a_failed_run_keeps_its_log_and_paths_are_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[training]\nsteps = -3\n")
    folder = run_folder(tmp_path, {"config": "mine.toml"})
    with pytest.raises(RuntimeError, match=r"log\.txt ends with\n(.*\n)*.*training\.steps is -3"):
        run({"config": "mine.toml"}, [], 1, folder)
    assert "training.steps is -3" in (folder / "log.txt").read_text()
