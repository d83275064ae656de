"""Shard and replica degrees: the recommendation, and the trainer's warning."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from matrixtitan import parallelize
from matrixtitan.config import load_config
from matrixtitan.plan.cost import rank_bytes, rank_flops
from matrixtitan.plan.planner import PlanSettings, make_plan
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.predict.degrees import (
    CLOSE,
    Balance,
    Candidate,
    Recommendation,
    _choose,
    balance_of,
    degree_flags,
    recommend,
    shard_degrees,
    uneven_warning,
)
from matrixtitan.predict.memory import Precision
from matrixtitan.predict.traffic import Job, Machine
from matrixtitan.tools import plan as plan_tool
from models import build_model
from tests.lib.shapes import LLAMA_8B, LLAMA_405B, llama_specs

SETTINGS = PlanSettings()
EIGHT = [ParamSpec(f"m{i}", (64, 64), "matrix", f"u{i}", 64) for i in range(8)]
"""Eight equal matrices: 8 ranks are used to the full, and more are idle."""


def _recommended(
    specs: list[ParamSpec], world_size: int, settings: PlanSettings = SETTINGS, **machine: Any
) -> Recommendation:
    job = Job(world_size)
    plan = make_plan(specs, world_size, settings)
    return recommend(specs, plan, settings, Precision(), job, Machine(**machine))


def test_degrees_fill_hosts_or_divide_one() -> None:
    assert shard_degrees(48, 8) == [48, 24, 16, 8, 4, 2, 1]
    assert shard_degrees(12, 8) == [12, 4, 2, 1]
    assert shard_degrees(1, 8) == [1]


def test_equal_matrices_by_hand() -> None:
    """16 ranks: 8 x 2 has the same fullest rank as 16 x 1, and no idle rank."""
    found = _recommended(EIGHT, 16, ranks_per_host=1)
    # weight, gradient and momentum
    matrix = 64 * 64 * 4 * 3
    assert [c.balance[:3] + c.balance[4:] for c in found.candidates] == [
        (16, 1, matrix, 8),
        (8, 2, matrix, 0),
        (4, 4, 2 * matrix, 0),
        (2, 8, 4 * matrix, 0),
        (1, 16, 8 * matrix, 0),
    ]
    assert [c.balance.max_over_mean for c in found.candidates] == [2, 1, 1, 1, 1]
    assert found.least_memory.balance.shards == 8
    assert found.even is not None and found.even.balance.shards == 8
    for candidate in found.candidates:
        assert candidate.step_seconds == candidate.traffic_seconds + candidate.optimizer_seconds


def test_a_step_that_is_faster_with_more_memory_is_a_second_recommendation() -> None:
    """Hosts of 8 ranks: a group inside a host gathers in no time, but a slow optimizer needs more
    ranks."""
    specs = llama_specs(**LLAMA_8B)
    fast = _recommended(specs, 64, flops_rate=1e18)
    assert fast.least_memory.balance.shards == 64
    assert fast.fastest is not None and fast.fastest.balance[:2] == (8, 8)
    slow = _recommended(specs, 64, flops_rate=1e12)
    assert slow.fastest is slow.least_memory
    assert slow.least_memory.balance.shards == 64


@pytest.mark.parametrize(
    ("figures", "least", "fastest"),
    [
        ({8: (100, 10.0, 4), 4: (101, 10.1, 0)}, 4, 4),  # equal in both: the one without idle ranks
        ({8: (100, 10.0, 4), 4: (101, 10.3, 0)}, 8, 8),
        ({8: (100, 10.0, 0), 4: (103, 9.9, 0)}, 8, 8),
        ({8: (100, 10.0, 4), 4: (103, 9.0, 0), 2: (300, 8.9, 0)}, 8, 4),  # as fast, a third as full
    ],
)
def test_figures_within_two_percent_are_equal(
    figures: dict[int, tuple[int, float, int]], least: int, fastest: int
) -> None:
    """(bytes of the fullest rank, seconds, idle ranks) by shards."""
    candidates = [
        Candidate(Balance(shards, 8 // shards, held, 1.0, idle), held, True, 0, seconds, 0.0)
        for shards, (held, seconds, idle) in figures.items()
    ]
    assert [picked.balance.shards for picked in _choose(candidates)] == [least, fastest]


def test_what_does_not_fit_is_not_recommended() -> None:
    """The test above chooses 8 x 8 for speed; its fullest rank needs over 17 GB."""
    specs = llama_specs(**LLAMA_8B)
    found = _recommended(specs, 64, flops_rate=1e18, memory_bytes=15e9)
    assert {c.balance.shards: c.fits for c in found.candidates} == {
        64: True,
        32: True,
        16: True,
        8: False,
    }
    assert found.fastest is not None and found.fastest.balance.shards == 64
    assert found.skipped == [4, 2, 1]
    nowhere = _recommended(specs, 64, memory_bytes=1e9)
    assert nowhere.fastest is None and nowhere.even is None
    assert nowhere.least_memory.balance.shards == 64


def test_an_egress_cap_that_a_degree_cannot_meet_is_told() -> None:
    """Three matrices of one unit on two ranks: one rank has two, which is 4/3 of an even share."""
    specs = [ParamSpec(f"m{i}", (64, 64), "matrix", "u", 64) for i in range(3)]
    found = _recommended(specs, 4, PlanSettings(egress_cap=1.0), ranks_per_host=1)
    assert [candidate.balance.shards for candidate in found.candidates] == [4, 1]
    assert list(found.refused) == [2]
    assert found.refused[2].startswith("egress_cap 1.0 cannot be met")


def test_405b_on_4096_ranks() -> None:
    specs = llama_specs(**LLAMA_405B)
    warning = uneven_warning(specs, make_plan(specs, 4096, spread_units=False), SETTINGS, 4096, 8)
    assert warning is not None
    assert warning.startswith("3214 of 4096 ranks own no matrix, and the fullest rank holds 8.8 ti")
    assert degree_flags(512, 8) in warning
    assert warning.count("10.47 GB") == 2  # the fullest rank, now and then


@pytest.mark.parametrize(("ranks", "healthy"), [(1, True), (8, True), (16, False), (24, False)])
def test_only_uneven_plans_are_warned_of(ranks: int, healthy: bool) -> None:
    warning = uneven_warning(EIGHT, make_plan(EIGHT, ranks), SETTINGS, ranks, 1)
    assert (warning is None) == healthy
    if warning is not None:
        assert degree_flags(8, ranks // 8) in warning
        assert warning.count(" MB") == 2 and "0.00" not in warning


def test_a_fullest_rank_above_the_mean_is_warned_of_without_idle_ranks() -> None:
    specs = [ParamSpec("big", (640, 64), "matrix", "u", 640), EIGHT[0]]
    warning = uneven_warning(specs, make_plan(specs, 2), SETTINGS, 2, 1)
    assert warning is not None and warning.startswith("0 of 2 ranks own no matrix, and the fullest")
    assert degree_flags(1, 2) in warning


def test_a_model_without_matrices_is_even() -> None:
    specs = [ParamSpec("t", (64, 4), "tail", "u", 1)]
    assert uneven_warning(specs, make_plan(specs, 4), SETTINGS, 4, 1) is None


@pytest.mark.parametrize("world_size", [3, 64, 256])
def test_balance_does_not_need_units_spread(world_size: int) -> None:
    specs = llama_specs(**LLAMA_8B)
    spread, unspread = (
        make_plan(specs, world_size, spread_units=spread) for spread in (True, False)
    )
    assert sorted(rank_flops(spread, SETTINGS)) == pytest.approx(
        sorted(rank_flops(unspread, SETTINGS)), rel=1e-3
    )
    most = [max(part.total for part in rank_bytes(p, SETTINGS)) for p in (spread, unspread)]
    assert most[0] == pytest.approx(most[1], rel=1e-3)
    assert (
        balance_of(spread, SETTINGS, world_size)[4] == balance_of(unspread, SETTINGS, world_size)[4]
    )


@pytest.mark.parametrize(("ranks", "warned"), [(64, True), (4, False)])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_trainer_warns_on_rank_0(
    ranks: int, warned: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(["--config", "debug"])
    with torch.device("meta"):
        model = build_model("llama3", "debug", vocab_size=4096, max_seq_len=128)
    mesh: Any = SimpleNamespace(ndim=1, size=lambda axis=None: ranks, get_rank=lambda: rank)
    monkeypatch.setattr(
        parallelize,
        "fully_shard",
        lambda *args, **keys: SimpleNamespace(model=model, close=None, plan=None),
    )
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    parallelize.logger.addHandler(handler)
    try:
        parallelize.parallelize(model, config, mesh, torch.device("cpu"))
    finally:
        parallelize.logger.removeHandler(handler)
    assert len(records) == (warned and rank == 0)
    assert all("ranks own no matrix" in text and "\n" not in text for text in records)


def test_the_tool_ends_with_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", "debug", "--world-size", "64", "--gpus-per-node", "1"]
    assert plan_tool.main([*argv, "--json"]) == 0
    degrees = json.loads(capsys.readouterr().out)["degrees"]
    best = {row["shards"]: row for row in degrees["candidates"]}[degrees["least_memory"]]
    least = min(row["fullest_bytes"] for row in degrees["candidates"])
    assert best["fullest_bytes"] <= CLOSE * least
    assert plan_tool.main(argv) == 0
    printed = capsys.readouterr().out
    flags = degree_flags(best["shards"], best["replicas"])
    assert f"data_parallel_shard_degree = {best['shards']}\n" in printed
    assert flags in printed
    assert "this job" in printed
    # the recommended keys are keys of the config
    config = load_config(["--config", "debug", *flags.split()])
    assert config.parallelism.data_parallel_shard_degree == best["shards"]
