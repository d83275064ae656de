"""tools/lab/figures.py: the committed figures show what the code says today."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from figures import COMMITTED, FIGURES, Label, main, read_labels, spans

pytest.importorskip("matplotlib")


def test_the_committed_figures_are_current(tmp_path: Path) -> None:
    """The data is compared. The pictures' bytes depend on the version of matplotlib."""
    assert main(["--output", str(tmp_path)]) == 0
    for name, figure in FIGURES.items():
        drawn = json.loads((tmp_path / f"{name}.json").read_text())
        committed = json.loads((COMMITTED / f"{name}.json").read_text())
        assert drawn == committed, f"draw it again: python tools/lab/figures.py {name}"
        for folder in (tmp_path, COMMITTED):
            assert (folder / f"{name}.{figure.suffix}").stat().st_size > 10_000


def test_the_same_data_gives_the_same_file(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        assert main(["traffic", "--output", str(tmp_path / folder)]) == 0
    first, second = ((tmp_path / folder / "traffic.svg").read_bytes() for folder in ("a", "b"))
    assert first == second


def test_a_trace_becomes_bars(tmp_path: Path) -> None:
    """Two units; the second is kept between forward and backward."""
    events = [  # name, start, duration in microseconds
        ("matrix_fsdp::unshard a", 1000, 100),
        ("matrix_fsdp::unshard b", 1100, 100),
        ("matrix_fsdp::unshard_wait a", 1200, 300),
        ("matrix_fsdp::unshard_wait b", 2000, 500),
        ("matrix_fsdp::reduce b", 4000, 100),
        ("matrix_fsdp::reduce a", 4500, 100),
        ("matrix_fsdp::reduce_wait b", 4600, 400),
        ("matrix_fsdp::reduce_wait a", 5000, 1000),
        ("optimizer::step", 6000, 2000),
    ]
    trace = tmp_path / "rank_0.json"
    others: list[dict[str, object]] = [{"name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 1}]
    entries = others + [
        {"name": name, "cat": "user_annotation", "ts": ts, "dur": dur} for name, ts, dur in events
    ]
    trace.write_text(json.dumps({"traceEvents": entries[::-1]}))
    labels = read_labels(trace)
    assert labels[2] == Label("unshard_wait", "a", 0.2, 0.5)
    assert {(span.unit, span.kind, span.start, span.stop) for span in spans(labels)} == {
        ("a", "gathered", 0.0, 1.0),
        ("b", "gathered", 0.1, 3.0),
        ("a", "unshard", 0.0, 0.5),
        ("b", "unshard", 0.1, 1.5),
        ("a", "compute", 0.5, 1.0),
        ("b", "compute", 1.5, 3.0),
        ("a", "compute", 3.1, 3.5),
        ("b", "reduce", 3.0, 4.0),
        ("a", "reduce", 3.5, 5.0),
        ("optimizer", "optimizer", 5.0, 7.0),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timeline"], "holds no trace step_*/rank_0.json: train with --profiling"),
        (["owners"], "--run belongs to one of the figures timeline"),
        ([], "--run belongs to one of the figures timeline"),
    ],
)
def test_a_wrong_run_ends_with_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--output", str(tmp_path / "out")]
    assert main([*arguments, "--run", str(tmp_path), *out]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_without_matplotlib_it_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "tools/lab/figures.py: matplotlib is missing; install the plots extra "
        "(pip install -e '.[plots]')\n"
    )
    assert not (tmp_path / "out").exists()


def test_the_architecture_page_names_files_and_figures_that_exist() -> None:
    page = COMMITTED.parent / "architecture.md"
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert {"figures/owners.svg", "figures/timeline.svg", "figures/traffic.svg"} <= set(links)
    assert [link for link in links if not (page.parent / link).exists()] == []
    root = COMMITTED.parents[1]
    named = re.findall(r"`((?:plan|rules|predict|fsdp|optim|strategies)/[\w./]*)`", text)
    assert len(named) > 10
    assert [name for name in named if not (root / "matrixtitan" / name).exists()] == []
