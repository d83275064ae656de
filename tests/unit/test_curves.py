"""metrics.jsonl is read as written: after resumes, killed runs, and with inf and nan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from matrixtitan.curves import CurveWriter, read_curves


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, start_step: int, *points: tuple[int, float]) -> None:
    writer = CurveWriter(path, start_step)
    for step, loss in points:
        writer.write(step, {"loss/train": loss})
    writer.close()


def test_lines_are_json_and_there_at_once(path: Path) -> None:
    writer = CurveWriter(path, 0)
    writer.write(1, {"loss/train": 8.25, "time/data_slowest_rank": 3})
    writer.write(1, {"loss/validation": 8.5})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"run_start": 0},
        {"step": 1, "loss/train": 8.25, "time/data_slowest_rank": 3},
        {"step": 1, "loss/validation": 8.5},
    ]
    writer.close()
    assert read_curves(path) == {
        "loss/train": [(1, 8.25)],
        "time/data_slowest_rank": [(1, 3.0)],
        "loss/validation": [(1, 8.5)],
    }


def test_a_resumed_run_makes_later_steps_void(path: Path) -> None:
    write(path, 0, (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0))
    write(
        path, 2, (4, 2.0)
    )  # the checkpoint was at step 2, and this attempt logs every second step
    assert read_curves(path) == {"loss/train": [(1, 1.0), (2, 1.0), (4, 2.0)]}
    write(path, 0, (1, 3.0), (1, 4.0))  # anew in the same folder
    assert read_curves(path) == {"loss/train": [(1, 4.0)]}
    write(path, 0)
    assert read_curves(path) == {}


def test_numbers_that_are_not_finite_are_strings(path: Path) -> None:
    write(path, 0, (1, math.nan), (2, math.inf), (3, -math.inf))

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    lines = path.read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [entry["loss/train"] for entry in found[1:]] == ["NaN", "Infinity", "-Infinity"]
    (_, first), *rest = read_curves(path)["loss/train"]
    assert math.isnan(first)
    assert rest == [(2, math.inf), (3, -math.inf)]


def test_a_line_that_a_killed_run_left_is_dropped(path: Path) -> None:
    write(path, 0, (1, 1.0))
    with path.open("a") as file:
        file.write('{"step": 2, "loss/tr')
    assert read_curves(path) == {"loss/train": [(1, 1.0)]}
    write(path, 1, (2, 2.0))
    assert read_curves(path) == {"loss/train": [(1, 1.0), (2, 2.0)]}


@pytest.mark.parametrize("line", ["step 1", "[]", '{"loss/train": 1}', '{"step": 1, "loss": null}'])
def test_another_line_is_named(line: str, path: Path) -> None:
    write(path, 0, (1, 1.0))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3 "):
        read_curves(path)
