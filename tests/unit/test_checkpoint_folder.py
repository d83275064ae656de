"""The life of `step-N` folders: complete, interrupted, replaced, deleted; and what a changed configuration means."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from matrixtitan.checkpoint import folder as folders
from matrixtitan.checkpoint.config_changes import changed_keys
from matrixtitan.checkpoint.preemption import Preemption
from matrixtitan.checkpoint.row_segment import RowSegment, local_rows
from matrixtitan.checkpoint.stager import HostStager


def make(folder: Path, name: str, mark: str = "") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / ".metadata").write_text(mark)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_lists_complete_ones_newest_first_and_names_the_others(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-2", "step-11.writing", "step-3.deleting"):
        make(tmp_path, name)
    (tmp_path / "step-12").mkdir()
    (tmp_path / "notes").mkdir()
    complete, incomplete = folders.list_steps(tmp_path)
    assert complete == [10, 9, 2]
    assert incomplete == ["step-11.writing", "step-12", "step-3.deleting"]
    assert folders.list_steps(tmp_path / "nowhere") == ([], [])


def test_publish_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    make(tmp_path, "step-4", "old")
    make(tmp_path, "step-4.writing", "new")
    assert (folders.publish(tmp_path, 4) / ".metadata").read_text() == "new"
    assert names(tmp_path) == ["step-4"]


def test_killed_between_the_two_renames_the_older_one_comes_back(tmp_path: Path) -> None:
    make(tmp_path, "step-4.replaced", "old")
    make(tmp_path, "step-4.writing", "new")
    lines = folders.recover(tmp_path)
    assert (tmp_path / "step-4" / ".metadata").read_text() == "old"
    assert names(tmp_path) == ["step-4"]
    assert len(lines) == 2


def test_killed_after_the_renames_the_newer_one_stays(tmp_path: Path) -> None:
    make(tmp_path, "step-4", "new")
    make(tmp_path, "step-4.replaced", "old")
    folders.recover(tmp_path)
    assert (tmp_path / "step-4" / ".metadata").read_text() == "new"
    assert names(tmp_path) == ["step-4"]


def test_recover_leaves_what_it_does_not_know(tmp_path: Path) -> None:
    make(tmp_path, "step-4")
    make(tmp_path, "backup.writing")
    assert folders.recover(tmp_path) == []
    assert names(tmp_path) == ["backup.writing", "step-4"]


def test_each_changed_key_is_a_line() -> None:
    saved = {"data": {"sources": [{"type": "text"}]}, "training": {"seq_len": 8, "steps": 10}}
    longer = {**saved, "training": {"seq_len": 8, "steps": 20}}
    assert changed_keys(saved, saved) == []
    assert changed_keys(saved, longer) == ["training.steps: 10 -> 20"]


def test_keys_that_came_or_went_are_changes() -> None:
    assert changed_keys({"a": {"b": 1}}, {"a": {"c": 2}}) == ["a.b: 1 -> None", "a.c: None -> 2"]


def test_rows_outside_their_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="do not lie in"):
        RowSegment(torch.zeros(2, 3), (4, 3), 3)
    with pytest.raises(ValueError, match="do not lie in"):
        RowSegment(torch.zeros(2, 2), (4, 3), 0)


def test_a_row_segment_shares_memory_and_does_nothing_else() -> None:
    rows = torch.zeros(2, 3)
    segment = local_rows(rows, (4, 3), 1)
    assert isinstance(segment, RowSegment)
    assert segment.shape == (4, 3)
    segment.rows.fill_(1)
    assert rows.sum() == 6
    with pytest.raises(RuntimeError, match="only describes rows"):
        segment + 1
    assert local_rows(torch.zeros(0, 3), (4, 3), 4) is None
    assert local_rows(rows, (2, 3), 0) is not segment


def test_staged_copies_keep_their_memory_and_their_values() -> None:
    stager = HostStager(pinned=False)
    whole, rows = torch.ones(3), torch.ones(2, 3)
    staged, _ = stager.stage({"whole": whole, "rows": RowSegment(rows, (4, 3), 2)})
    whole.zero_()
    rows.zero_()
    assert staged["whole"].sum() == 3
    segment = staged["rows"]
    assert isinstance(segment, RowSegment)
    assert (segment.rows.sum(), segment.start, tuple(segment.shape)) == (6, 2, (4, 3))
    again, _ = stager.stage({"whole": whole})
    assert again["whole"].data_ptr() == staged["whole"].data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="an error only without CUDA")
def test_pinned_memory_without_cuda_is_a_configuration_error() -> None:
    with pytest.raises(ValueError, match="async_with_pinned_mem"):
        HostStager(pinned=True)


def test_preemption_gives_the_signals_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    preemption = Preemption()
    signal.raise_signal(signal.SIGUSR1)
    assert preemption.received
    preemption.close()
    assert signal.getsignal(signal.SIGUSR1) is before
