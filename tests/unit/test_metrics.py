"""The log line, the curves and the clock on one process. test_trainer.py has several ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from matrixtitan.config import MetricsConfig
from matrixtitan.curves import read_curves
from matrixtitan.log import get_logger
from matrixtitan.metrics import (
    PEAK_FLOPS,
    Metrics,
    OverRanks,
    PhaseTimer,
    StepReport,
    memory_figures,
    peak_flops,
)
from matrixtitan.plan.planner import PlanSettings, make_plan
from matrixtitan.plan.shard import ParamSpec
from tests.unit.test_progress import Terminal

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
    ],
)
def test_peak_flops_by_device_name(name: str, flops: float) -> None:
    assert peak_flops(name) == flops


@pytest.mark.parametrize(
    "name", ["cpu", "NVIDIA A1000", "Tesla T4", "NVIDIA GeForce RTX 4090000", ""]
)
def test_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_every_table_entry_is_found_by_its_own_name() -> None:
    assert {name: peak_flops(f"NVIDIA {name} 80GB") for name, _ in PEAK_FLOPS} == dict(PEAK_FLOPS)


def test_phase_timer_adds_up_and_starts_anew() -> None:
    timer = PhaseTimer(CPU)
    for _ in range(2):
        with timer.phase("data"):
            time.sleep(0.01)
    with timer.phase("optimizer"):
        pass
    taken = timer.take()
    assert 20 <= taken["data"] < 500
    assert 0 <= taken["optimizer"] < 10
    assert timer.take() == {}


def test_phase_that_raises_is_not_counted() -> None:
    timer = PhaseTimer(CPU)
    with pytest.raises(ValueError, match="inside"), timer.phase("data"):
        raise ValueError("inside")
    assert timer.take() == {}


def test_over_ranks_names_the_slowest() -> None:
    assert OverRanks.of([1.0, 4.0, 4.0, 3.0]) == OverRanks(mean=3.0, max=4.0, slowest_rank=1)


def test_memory_of_a_cpu_process_is_its_peak() -> None:
    before = memory_figures(CPU)["memory/max_rss_gib"]
    block = torch.ones(2**27, dtype=torch.uint8)  # 1/8 GiB, written to
    after = memory_figures(CPU)["memory/max_rss_gib"]
    del block
    assert 0.01 < before <= after < 1000
    assert memory_figures(CPU)["memory/max_rss_gib"] >= after


def report(**changes: object) -> StepReport:
    fields: dict[str, object] = {
        "step": 10,
        "loss": 7.1234567,
        "grad_norm": 0.5,
        "learning_rates": {"matrix": 0.02, "tail": 0.003},
        "tokens_per_second": 12345.6,
        "mfu": None,
        "phases": {"data": OverRanks(1.0, 2.0, 3)},
        "memory": {"memory/max_rss_gib": 0.5},
    }
    return StepReport(**{**fields, **changes})  # type: ignore[arg-type]


def test_curves_have_their_fixed_names() -> None:
    assert report(mfu=0.4).scalars() == {
        "loss/train": 7.1234567,
        "grad_norm": 0.5,
        "lr/matrix": 0.02,
        "lr/tail": 0.003,
        "throughput/tokens_per_second": 12345.6,
        "throughput/mfu": 0.4,
        "memory/max_rss_gib": 0.5,
        "time/data_ms": 1.0,
        "time/data_ms_max": 2.0,
        "time/data_slowest_rank": 3,
    }


def test_log_line_leaves_out_what_is_not_known() -> None:
    line = report().line(200)
    assert line.startswith(
        "step 10/200 | loss 7.123457 | grad_norm 0.500000 | lr matrix 2.000e-02 tail 3.000e-03"
    )
    assert "12,346 tokens/s" in line
    assert "data 1.0 ms (max 2.0, rank 3)" in line
    assert "mfu" not in line
    assert "skipped" not in line


def test_log_line_has_mfu_skips_and_the_allocator() -> None:
    memory = {
        "memory/max_active_gib": 1.5,
        "memory/max_reserved_gib": 2.0,
        "memory/alloc_retries": 3.0,
    }
    line = report(mfu=0.412, skipped_steps=2, memory=memory).line(200)
    assert "mfu 41.2%" in line
    assert "2 steps skipped" in line
    assert "memory 1.50 GiB active, 2.00 GiB reserved, 3 retries" in line


def metrics(folder: Path, start_step: int, rank: int = 0, **config: bool) -> Metrics:
    return Metrics(
        MetricsConfig(**config),
        folder,
        device=CPU,
        rank=rank,
        world_size=1,
        flops_per_token=1.0,
        total_steps=10,
        start_step=start_step,
    )


def test_a_resumed_run_continues_the_curves_and_drops_what_was_lost(tmp_path: Path) -> None:
    first = metrics(tmp_path, start_step=0)
    for step in range(1, 6):
        first.log_validation(step, loss=1.0, tokens=8)
    first.close()
    resumed = metrics(
        tmp_path, start_step=3
    )  # the newest checkpoint was at step 3; steps 4 and 5 run again
    for step in range(4, 7):
        resumed.log_validation(step, loss=2.0, tokens=8)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss/validation")]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert read_curves(tmp_path / "metrics.jsonl") == {"loss/validation": found}


def test_curves_are_written_without_tensorboard(tmp_path: Path) -> None:
    alone = metrics(tmp_path, start_step=0, enable_tensorboard=False)
    alone.log_validation(1, loss=1.0, tokens=8)
    assert read_curves(tmp_path / "metrics.jsonl") == {"loss/validation": [(1, 1.0)]}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    alone.close()


def test_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    writer = metrics(tmp_path, start_step=0)
    writer.log_text("config", "[training]\nsteps = 3")
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    [training]\n    steps = 3"


@pytest.mark.parametrize("with_matplotlib", [True, False])
def test_the_plan_is_shown_as_table_and_picture(
    with_matplotlib: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if with_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    spec = ParamSpec("layers.0.wq.weight", (64, 64), "matrix", "layers.0", 64)
    monkeypatch.setattr(get_logger(), "propagate", True)
    with caplog.at_level("INFO"):
        writer = metrics(tmp_path, start_step=0)
        writer.log_plan(make_plan([spec], 2), PlanSettings())
        writer.close()
    left_out = [r.message for r in caplog.records if "without its picture" in r.message]
    assert len(left_out) == (0 if with_matplotlib else 1)
    assert all("install the plots extra" in message for message in left_out)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    text = events.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "layers.0: wq" in text
    assert events.Tags()["images"] == (["plan"] if with_matplotlib else [])


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    other = metrics(tmp_path, start_step=0, rank=1)
    other.progress(1)
    other.log_validation(1, loss=1.0, tokens=8)
    other.log_text("config", "text")
    other.close()
    assert list(tmp_path.iterdir()) == []
    assert terminal.getvalue() == ""


def test_the_bar_shows_steps_and_what_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    first = metrics(tmp_path, start_step=0)
    first.progress(5)
    assert terminal.getvalue().endswith("--] 5/10 ")
    first.close()
    assert terminal.getvalue().endswith("\r\x1b[K")
