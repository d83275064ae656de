"""A plan as rows, table and picture: what they show is what the plan says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from matrixtitan.plan.cost import rank_bytes, rank_flops
from matrixtitan.plan.planner import PlanSettings, make_plan
from matrixtitan.plan.shard import ParamSpec, Plan
from matrixtitan.predict.pictures import (
    DETAILED_ROWS,
    MOST_ROWS,
    plan_picture,
    plan_rows,
    plan_table,
    save_plan_picture,
)

SETTINGS = PlanSettings()


def plan_for(ranks: int, blocks: int = 3) -> Plan:
    specs = [ParamSpec("embedding.weight", (512, 8), "tail", "embedding", 1)]
    for block in range(blocks):
        unit = f"layers.{block}"
        specs += [
            ParamSpec(f"{unit}.norm.weight", (8,), "tail", unit, 1),
            ParamSpec(f"{unit}.w1.weight", (24, 8), "matrix", unit, 24),
            ParamSpec(f"{unit}.w2.weight", (8, 24), "matrix", unit, 8),
        ]
    return make_plan(specs, ranks, SETTINGS)


@pytest.mark.parametrize("ranks", [1, 4, DETAILED_ROWS + 1, MOST_ROWS, MOST_ROWS + 1, 300])
def test_rows_add_up_to_the_plan(ranks: int) -> None:
    plan = plan_for(ranks)
    rows = plan_rows(plan, SETTINGS)
    assert len(rows) <= MOST_ROWS
    spans = [range(row.ranks[0], row.ranks[1] + 1) for row in rows]
    assert [rank for span in spans for rank in span] == list(range(ranks))
    resident = [part.total for part in rank_bytes(plan, SETTINGS)]
    flops = rank_flops(plan, SETTINGS)
    for row, span in zip(rows, spans, strict=True):
        held = sum(piece.bytes for piece in row.pieces) * len(span)
        assert held == pytest.approx(sum(resident[rank] for rank in span))
        assert row.fullest_bytes == max(resident[rank] for rank in span)
        assert row.flops * len(span) == pytest.approx(sum(flops[rank] for rank in span))
        assert row.most_flops == max(flops[rank] for rank in span)


def test_matrices_come_before_what_is_cut() -> None:
    (row, *_) = plan_rows(plan_for(2), SETTINGS)
    kinds = [(piece.role == "tail", piece.cut) for piece in row.pieces]
    assert kinds == sorted(kinds)
    assert kinds[0] == (False, False)
    assert kinds[-1] == (True, True)
    assert row.pieces[-1].name == "embedding.weight"


def test_the_table_names_everything_once() -> None:
    plan = plan_for(4)
    header, _, *lines = plan_table(plan, SETTINGS).splitlines()
    assert header.startswith("10 parameters on 4 ranks; max / mean over ranks: resident bytes 1.")
    assert [int(line.split()[0]) for line in lines] == [0, 1, 2, 3]
    text = " ".join(lines)
    assert all(text.count(name) == 3 for name in (" w1", " w2", " norm"))
    shard = plan.by_fqn["embedding.weight"]
    for rank, line in enumerate(lines):
        segment = shard.segment(rank)
        assert segment is not None
        assert f"embedding: embedding[{segment.start}:{segment.stop}]" in line
    assert plan_table(plan_for(40, blocks=1), SETTINGS).splitlines()[-1].startswith("   39")


@pytest.mark.parametrize("ranks", [1, 4, 70])
def test_every_bar_has_the_bytes_of_its_row(ranks: int) -> None:
    pytest.importorskip("matplotlib")
    plan = plan_for(ranks)
    rows = plan_rows(plan, SETTINGS)
    held, work = plan_picture(plan, SETTINGS).axes
    lengths = [0.0] * len(rows)
    for bar in held.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        assert bar.get_x() == pytest.approx(lengths[row]), "it begins where the one before ends"
        lengths[row] += bar.get_width()
    scale = 1e3  # kB
    assert lengths == pytest.approx([sum(p.bytes for p in row.pieces) / scale for row in rows])
    assert [bar.get_width() * 1e9 for bar in work.patches] == pytest.approx(
        [row.flops for row in rows]
    )
    names = {text.get_text() for text in held.texts}
    assert ({"w1", "w2", "embedding"} <= names) == (ranks <= DETAILED_ROWS)


def test_a_plan_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_plan_picture(Plan(3, ()), SETTINGS, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ValueError, match=r"install the plots extra \(pip install -e '\.\[plots\]'\)"
    ):
        save_plan_picture(plan_for(2), SETTINGS, tmp_path / "plan.png")
    assert plan_table(plan_for(2), SETTINGS)
