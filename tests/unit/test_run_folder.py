"""A run makes its folders at the start. One message names the key of one that cannot be."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest

from matrixtitan.config import Config, JobConfig, MetricsConfig, ProfilingConfig
from matrixtitan.mistakes import is_mistake
from matrixtitan.run_folder import make_run_folder

KEYS = [
    ("metrics", "save_tb_folder", MetricsConfig()),
    ("profiling", "save_traces_folder", ProfilingConfig(enable_profiling=True)),
    ("profiling", "save_memory_snapshot_folder", ProfilingConfig(enable_memory_snapshot=True)),
]


def run_in(folder: Path) -> Config:
    return Config(job=JobConfig(dump_folder=str(folder)))


def test_a_run_makes_the_folders_that_it_will_write_to(tmp_path: Path) -> None:
    make_run_folder(run_in(tmp_path / "new/run"))
    assert [path.name for path in (tmp_path / "new/run").iterdir()] == ["tb"]


@pytest.mark.parametrize(("section", "name", "table"), KEYS)
def test_a_key_that_names_a_file_is_named(
    section: str, name: str, table: MetricsConfig | ProfilingConfig, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    table = dataclasses.replace(table, **{name: "taken"})
    config = dataclasses.replace(run_in(tmp_path), **{section: table})
    with pytest.raises(ValueError, match=rf"^{section}\.{name} cannot be made .* File exists") as e:
        make_run_folder(config)
    assert is_mistake(e.value)
    with pytest.raises(ValueError, match=r"^job\.dump_folder cannot be made .* File exists"):
        make_run_folder(run_in(tmp_path / "taken"))


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "plan.json"])
def test_a_folder_in_the_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    make_run_folder(run_in(tmp_path))
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"^job\.dump_folder holds {name}, .*directory") as e:
        make_run_folder(run_in(tmp_path))
    assert is_mistake(e.value)


def test_a_full_disk_is_found_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(dir: Path) -> BinaryIO:
        return open("/dev/full", "wb")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ValueError, match=r"^job\.dump_folder .* No space left .* free space, or"):
        make_run_folder(run_in(tmp_path))
