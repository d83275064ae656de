"""The life of `step-N` folders: complete, interrupted, replaced, deleted; changes of the config."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from matrixtitan.checkpoint import folder as folders
from matrixtitan.checkpoint.config_changes import changed_keys
from matrixtitan.checkpoint.preemption import Preemption
from matrixtitan.checkpoint.stager import HostStager
from matrixtitan.fsdp.row_segment import RowSegment, local_rows


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
    published = folders.publish(tmp_path, 4, tmp_path / "step-4.writing")
    assert (published / ".metadata").read_text() == "new"
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


def test_what_cannot_be_deleted_at_start_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("step-4", "step-4.replaced", "step-2.deleting", "step-6.writing"):
        make(tmp_path, name)
    (tmp_path / ".probe-dir").mkdir()
    monkeypatch.setattr(shutil, "rmtree", busy)
    assert folders.recover(tmp_path) == []
    assert "Device or resource busy" in caplog.text
    for name in ("step-2.deleting", "step-4.deleting", "step-6.deleting", ".probe-dir"):
        assert f"could not delete {tmp_path / name}" in caplog.text
    assert folders.list_steps(tmp_path)[0] == [4]
    monkeypatch.undo()  # the files are closed now: the next start deletes them
    (tmp_path / ".probe-dir").rmdir()
    folders.recover(tmp_path)
    assert names(tmp_path) == ["step-4"]


def busy(path: Path, ignore_errors: bool = False) -> None:
    """A stand-in for shutil.rmtree where another process holds a file open on NFS."""
    if not ignore_errors:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))


def test_what_cannot_be_deleted_does_not_keep_the_rest_of_it(tmp_path: Path) -> None:
    """The large files of a checkpoint are freed even if one file of it stays."""
    path = make(tmp_path, "step-2")
    (path / "a").mkdir()
    (path / "large").write_text("large")
    rmdir = os.rmdir

    def refuse(name: str | Path, **where: int) -> None:
        if Path(name).name == "a":
            raise OSError(errno.ENOTEMPTY, "a .nfs file", str(name))
        rmdir(name, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        assert not folders.discard(path)
    assert names(tmp_path / "step-2.deleting") == ["a"]


def test_a_link_among_what_is_left_is_unlinked_and_never_followed(tmp_path: Path) -> None:
    kept = make(tmp_path, "elsewhere", "kept")
    folder = tmp_path / "checkpoint"
    make(folder, "step-4")
    for name in ("step-2.deleting", "step-6.writing", "step-4.replaced"):
        (folder / name).symlink_to(kept)
    (folder / "step-8.deleting").symlink_to("nowhere")
    (folder / "step-3.writing").write_text("a file")
    assert len(folders.recover(folder)) == 5
    assert names(folder) == ["step-4"]
    assert (kept / ".metadata").read_text() == "kept"


def test_a_probe_that_a_killed_start_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".probe-0123").write_text("")
    folders.recover(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("movable", [True, False])
def test_a_save_takes_another_folder_where_an_earlier_ones_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, movable: bool
) -> None:
    make(tmp_path, "step-4", "old")
    left = [make(tmp_path, f"step-4.{state}", "left") for state in ("writing", "replaced")]
    left.append(make(tmp_path, "step-4.deleting", "left"))
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path in left:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return rename(path, target)

    monkeypatch.setattr(shutil, "rmtree", busy)
    if not movable:
        monkeypatch.setattr(Path, "rename", refuse)
    written = folders.make_writing_folder(tmp_path, 4)
    assert names(written) == []
    (written / ".metadata").write_text("new")
    published = folders.publish(tmp_path, 4, written)
    assert (published / ".metadata").read_text() == "new"
    marks = {path.name: (path / ".metadata").read_text() for path in tmp_path.iterdir()}
    assert sorted(marks.values()) == ["left", "left", "left", "new", "old"]
    assert folders.list_steps(tmp_path)[0] == [4]
    monkeypatch.undo()
    folders.recover(tmp_path)
    assert names(tmp_path) == ["step-4"]
    assert (published / ".metadata").read_text() == "new"


def test_a_checkpoint_kept_elsewhere_behind_a_link_is_replaced_and_pruned_as_a_link(
    tmp_path: Path,
) -> None:
    kept = make(tmp_path, "elsewhere", "kept")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for step in (2, 4):
        (folder / f"step-{step}").symlink_to(kept)
    (folder / "step-6").symlink_to("nowhere")
    assert folders.list_steps(folder) == ([4, 2], ["step-6"])
    written = folders.make_writing_folder(folder, 4)
    (written / ".metadata").write_text("new")
    folders.publish(folder, 4, written)
    assert folders.discard(folder / "step-2")
    written = folders.make_writing_folder(folder, 6)
    folders.publish(folder, 6, written)
    assert names(folder) == ["step-4", "step-6"]
    assert not (folder / "step-4").is_symlink()
    assert (kept / ".metadata").read_text() == "kept"


def test_of_two_that_were_replaced_the_newer_comes_back(tmp_path: Path) -> None:
    make(tmp_path, "step-4.replaced", "could not be deleted then")
    make(tmp_path, "step-4.replaced-2", "newer")
    folders.recover(tmp_path)
    assert names(tmp_path) == ["step-4"]
    assert (tmp_path / "step-4" / ".metadata").read_text() == "newer"


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


def test_a_row_segment_of_no_rows_writes_and_reads_nothing() -> None:
    segment = RowSegment(torch.zeros(0, 3), (4, 3), 0)
    assert segment.__create_write_items__("weight", segment) == []
    assert segment.__create_chunk_list__() == []
