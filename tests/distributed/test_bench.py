"""The bench runs every strategy, writes its files, and reduces figures over ranks correctly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import bench
import bench_report
import performance_tables
from bench_measure import STRATEGY_KEYS, Measurements
from tests.unit.test_netlab import NETLAB, needs_network

BENCH = Path(bench.__file__)
ROOT = BENCH.parents[2]
SMALL = ["--model.flavor", "netlab", "--training.seq_len", "16", "--training.local_batch_size", "1"]
TIMES = ("fwd_bwd_ms", "optimizer_ms", "step_ms")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{BENCH.parent}"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def report_of(folder: Path, *arguments: str) -> dict[str, Any]:
    done = run(str(BENCH), "--output", str(folder), *arguments, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "bench.md").read_text() in done.stdout
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    report: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return report


def test_every_strategy_in_one_run(tmp_path: Path) -> None:
    names = [*STRATEGY_KEYS, "fsdp2_gather_once_stock"]
    report = report_of(
        tmp_path, "--nproc", "2", "--steps", "1", "--warmup", "1", "--strategies", ",".join(names)
    )
    assert (report["world_size"], report["ns_steps"], report["backend"]) == (2, 5, "gloo")
    assert report["model"]["flavor"] == "netlab"
    assert report["fsdp2_transports"] == "tuned"
    assert list(report["strategies"]) == names
    ddp = report["strategies"]["ddp"]
    for name, entry in report["strategies"].items():
        assert entry["losses"] == pytest.approx(ddp["losses"], rel=0, abs=5e-5), name
        assert (
            len(entry["losses"]) == 1 + 1 + 2 + 1 + 1
        )  # warm-up, phases, free steps, counted, traced
        for key in TIMES:
            low, high = entry[f"{key}_quartiles"]
            assert 0 < low <= entry[key] <= high
        assert entry["fwd_bwd_communication_ms"] > 0
        assert entry["resident_bytes_max"] < entry["peak_memory_bytes"]
        assert set(entry["collectives"]["optimizer"]) == {"calls", "logical_bytes", "calls_by_op"}
        assert report["ratios"][name]["step_ms"] == pytest.approx(
            entry["step_ms"] / report["strategies"]["matrix_fsdp"]["step_ms"]
        )
    collectives = {name: entry["collectives"] for name, entry in report["strategies"].items()}
    assert collectives["matrix_fsdp"]["optimizer"]["calls_by_op"] == {"allreduce_": 1}
    assert set(collectives["fsdp2_all_to_all"]["optimizer"]["calls_by_op"]) == {
        "alltoall_base_",
        "allreduce_",
    }
    sharded = collectives["fsdp2_gather_each"]["fwd_bwd"]["logical_bytes"]
    assert collectives["matrix_fsdp"]["fwd_bwd"]["logical_bytes"] == pytest.approx(
        sharded, rel=0.02
    )
    parameters = 4 * report["model"]["parameters"]
    tail = 4 * (report["model"]["parameters"] - matrix_elements())
    resident = {name: entry["resident_bytes_max"] for name, entry in report["strategies"].items()}
    # weights and gradients, Muon's momentum, AdamW's two moments
    assert resident["ddp"] == pytest.approx(3 * parameters + tail, rel=0.01)
    assert resident["zero1_owner"] == pytest.approx(
        2 * parameters + 2 * tail + 4 * matrix_elements() / 2, rel=0.02
    )
    assert resident["matrix_fsdp"] <= 1.02 * resident["fsdp2_all_to_all"]


def matrix_elements() -> int:
    """Of the netlab flavor: six blocks with four square and three feed-forward projections each."""
    return 6 * (4 * 96 * 96 + 3 * 96 * 256)


def test_one_process_runs_what_has_meaning(tmp_path: Path) -> None:
    """On a GPU's recipe, whose blocks are compiled and whose tokenizer and data are not here."""
    compiled = "false" if shutil.which("g++") is None else "true"
    report = report_of(
        tmp_path, "--steps", "1", "--warmup", "1", "--strategies", "matrix_fsdp,ddp",
        "--config", "llama_1b", "--compile.enable", compiled, "--training.global_batch_size", "1",
        "--training.mixed_precision_param", "float32",
    )  # fmt: skip
    assert report["world_size"] == 1
    assert all(entry["optimizer_ms"] > 0 for entry in report["strategies"].values())


@needs_network
def test_under_netlab_wire_bytes_are_those_of_each_link(tmp_path: Path) -> None:
    done = run(
        str(NETLAB), "--nodes", "2", "--rate", "1gbit", "--",
        sys.executable, str(BENCH), "--output", str(tmp_path), "--steps", "1", "--warmup", "1",
        "--strategies", "matrix_fsdp,fsdp2_all_to_all", *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["link_rate"] == "1gbit"
    assert "FLOPs per byte" in (tmp_path / "bench.md").read_text()
    for entry in report["strategies"].values():
        logical = sum(phase["logical_bytes"] for phase in entry["collectives"].values())
        assert (
            logical < entry["wire_bytes_per_step"] < 1.1 * logical
        )  # headers and acknowledgements


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "fsdp3"], "fsdp2_all_to_all"),
        (["--strategies", "ddp_stock"], "_stock"),
        (["--config", "no_such_config"], "no such file"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_wrong_arguments_stop_before_any_rank_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = bench.main(["--nproc", "2", *arguments])
    except SystemExit as stopped:  # argparse's own way
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_rank_that_fails_ends_the_bench(tmp_path: Path) -> None:
    wrong = ["--strategies", "fsdp2_all_to_all", "--optimizer.name", "soap"]
    done = run(str(BENCH), "--nproc", "2", "--output", str(tmp_path), *wrong, *SMALL)
    assert done.returncode == 1
    assert "optimizer.name soap needs whole matrices" in done.stderr


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 256 - 9)]
)
def test_the_first_failure_ends_the_other_ranks_and_is_returned(
    end: str, status: int, tmp_path: Path
) -> None:
    """In a process of its own: a launcher sets signal handlers. Rank 0 would not end by itself."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        f"import os, sys, time\nif sys.argv[1] == os.environ['RANK']: {end}\ntime.sleep(1000)\n"
    )
    start = f"import bench; bench.__file__ = {str(rank)!r}; sys.exit(bench.launch(2, ['1']))"
    began = time.monotonic()
    done = run("-c", f"import sys; {start}")
    assert done.returncode == status, done.stderr
    assert "bench: rank 1 failed" in done.stderr
    assert time.monotonic() - began < 100


def test_without_matplotlib_the_picture_alone_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report: dict[str, Any] = {
        "model": {"flavor": "debug", "parameters": 1, "flops_per_token": 1.0},
        **{"world_size": 1, "backend": "gloo", "link_rate": None, "ns_steps": 5, "sequences": 1},
        **{"seq_len": 1, "fsdp2_transports": "tuned", "device": "CPU", "peak_flops": None},
        **{"matmul_flops_per_rank": 1.0, "command": "bench"},
    }
    bench.add_strategies(report, [{"ddp": measurements(1)}], shared_interface=False)
    (tmp_path / "bench.png").write_text("of an earlier run")
    bench_report.write(report, tmp_path)
    assert "bench.png is left out: matplotlib is missing" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]
    assert bench.main(["--strategies", "fsdp3"]) == 2
    assert "fsdp2_all_to_all" in capsys.readouterr().err, "it goes as far as with matplotlib"


def measurements(scale: float) -> Measurements:
    return Measurements(
        fwd_bwd_ms=[10 * scale, 30],
        optimizer_ms=[1, 2, 3, 4],
        step_ms=[5],
        communication_ms={"fwd_bwd": [1 * scale], "optimizer": []},
        losses=[0.5, 0.25],
        resident_bytes=int(100 * scale),
        peak_memory_bytes=200,
        optimizer_transient_bytes=50,
        calls={"fwd_bwd": 3, "optimizer": 1},
        calls_by_op={"fwd_bwd": {"send": 3}, "optimizer": {"allreduce_": 1}},
        logical_bytes={"fwd_bwd": 8 * scale, "optimizer": 8},
        wire_bytes={"fwd_bwd": int(10 * scale), "optimizer": 6},
    )


def test_figures_over_ranks() -> None:
    entry = bench_report.summarize([measurements(1), measurements(2)], shared_interface=False)
    assert entry["losses"] == [1.0, 0.5], "shares add up"
    assert bench_report._row("ddp", entry).count("|") == len(bench_report.COLUMNS) + 1
    assert entry["fwd_bwd_ms"] == 25, "the median of the slowest rank's 20 and 30"
    assert entry["optimizer_ms_quartiles"] == [1.75, 3.25]
    assert entry["step_ms_quartiles"] == [5, 5]
    assert entry["resident_bytes_max"] == 200
    assert entry["collectives"]["fwd_bwd"] == {
        "calls": 3,
        "logical_bytes": 12,
        "calls_by_op": {"send": 3},
    }
    assert entry["wire_bytes"] == {"fwd_bwd": 15, "optimizer": 6}
    assert entry["fwd_bwd_communication_ms"] == 2
    assert "optimizer_communication_ms" not in entry
    shared = bench_report.summarize([measurements(1), measurements(1)], shared_interface=True)
    assert shared["wire_bytes"] == {"fwd_bwd": 5, "optimizer": 3}, "one counter, of both ranks"
    without = measurements(1)
    without.wire_bytes = None
    assert bench_report.summarize([without], shared_interface=True)["wire_bytes_per_step"] is None


def test_ratios_need_ours() -> None:
    entry = bench_report.summarize([measurements(1)], shared_interface=False)
    assert bench_report.ratios({"ddp": entry}) == {}
    assert bench_report.ratios({"matrix_fsdp": entry, "ddp": entry})["ddp"]["step_ms"] == 1.0


def test_link_rates_are_tc_s() -> None:
    assert bench_report.link_bytes_per_second("10mbit") == 1.25e6
    assert bench_report.link_bytes_per_second("2.5gbit") == 312.5e6
    with pytest.raises(ValueError, match="10mbps"):
        bench_report.link_bytes_per_second("10mbps")


def test_every_table_of_the_document_has_its_place() -> None:
    for name in performance_tables.commands():
        document = performance_tables.document_of(name).read_text()
        changed = performance_tables.insert(document, name, f"| {name} |")
        assert f"<!-- table {name} -->\n| {name} |\n<!-- end {name} -->" in changed
    with pytest.raises(ValueError, match="cpu-3"):
        performance_tables.insert(document, "cpu-3", "| |")
