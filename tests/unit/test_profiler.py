"""Traces appear at their steps, named by step and rank, and settings that cannot work say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from matrixtitan.config import ProfilingConfig
from matrixtitan.profiler import Profiler

OFF = ProfilingConfig(enable_profiling=False, enable_memory_snapshot=False)
ON = replace(OFF, enable_profiling=True, profile_freq=4, save_traces_folder="traces")


def run(config: ProfilingConfig, folder: Path, steps: int, start_step: int = 0) -> None:
    weight = torch.ones(4, 4)
    with Profiler(config, folder, rank=3, start_step=start_step) as profiler:
        for _ in range(steps):
            weight @ weight
            profiler.step()


def test_off_writes_nothing(tmp_path: Path) -> None:
    run(OFF, tmp_path, steps=8)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_every_profile_freq_steps(tmp_path: Path) -> None:
    run(ON, tmp_path, steps=9)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["step_4", "step_8"]
    trace = json.loads((tmp_path / "traces" / "step_8" / "rank_3.json").read_text())
    assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    run(ON, tmp_path, steps=4, start_step=100)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step_104"]


def test_too_frequent_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"profiling\.profile_freq is 3.*at least 4"):
        Profiler(replace(ON, profile_freq=3), tmp_path, rank=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_memory_snapshot_needs_cuda(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"enable_memory_snapshot .* no CUDA device"):
        Profiler(replace(OFF, enable_memory_snapshot=True), tmp_path, rank=0)
