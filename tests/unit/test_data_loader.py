"""The loader: the same global batches in any layout, exact resume, sizes, mixtures, validation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import re
import resource
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from matrixtitan.config import Config, DataSource, TrainingConfig, ValidationConfig
from matrixtitan.data.dataloader import (
    build_dataloader,
    build_validation_loader,
    open_sources,
    stream_fingerprint,
)
from matrixtitan.data.dataset import IGNORE_INDEX, RankBatches
from matrixtitan.data.prepare import TextSource, tokenize
from matrixtitan.data.shards import ShardWriter, TokenStream, dtype_for
from matrixtitan.data.sources import SOURCE_TYPES, Record, SourceType
from matrixtitan.data.tokenizer import Tokenizer, load_tokenizer
from matrixtitan.ranks import split_batch
from tests.lib.corpus import byte_tokenizer, data_config, texts, write_jsonl

Batch = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora of different letters, and a cache that the module's tests share."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "lower.jsonl", texts(60))
    write_jsonl(folder / "upper.jsonl", [text.upper() for text in texts(90, seed=1)])
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return byte_tokenizer(folder)


@pytest.fixture(scope="module")
def lower(folder: Path) -> DataSource:
    return DataSource("jsonl", (str(folder / "lower.jsonl"),))


@pytest.fixture(scope="module")
def upper(folder: Path) -> DataSource:
    return DataSource("jsonl", (str(folder / "upper.jsonl"),), weight=3.0)


def training_batches(
    config: Config, tokenizer: Tokenizer, *place: int
) -> StatefulDataLoader[Batch]:
    return build_dataloader(config, open_sources(config.data, tokenizer), *place)


def validation_batches(config: Config, tokenizer: Tokenizer, *place: int) -> RankBatches:
    return build_validation_loader(config, open_sources(config.data, tokenizer), *place)


def fingerprint_of(config: Config, tokenizer: Tokenizer) -> dict[str, object]:
    return stream_fingerprint(config, tokenizer, open_sources(config.data, tokenizer))


def rows(batches: Iterable[Batch]) -> list[tuple[int, ...]]:
    """Every window as a tuple of its tokens and its last label."""
    return [
        (*tokens.tolist(), label[-1].item())
        for batch in batches
        for tokens, label in zip(*batch, strict=True)
    ]


def global_batches(
    config: Config, tokenizer: Tokenizer, world_size: int, steps: int, start_window: int = 0
) -> list[list[tuple[int, ...]]]:
    """The windows of each step, in the order of the stream, from all ranks and without padding."""
    count = split_batch(config.training, world_size).microbatches
    loaders = [
        iter(training_batches(config, tokenizer, rank, world_size, start_window))
        for rank in range(world_size)
    ]
    return [
        labelled(next(loader) for _ in range(count) for loader in loaders) for _ in range(steps)
    ]


def with_workers(config: Config, num_workers: int) -> Config:
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, num_workers=num_workers)
    )


def with_local_batch(config: Config, local_batch_size: int) -> Config:
    training = dataclasses.replace(config.training, local_batch_size=local_batch_size)
    return dataclasses.replace(config, training=training)


# --- batches --------------------------------------------------------------------------------------


def test_shapes_and_labels_are_the_next_tokens(
    folder: Path, tokenizer: Tokenizer, lower: DataSource
) -> None:
    config = data_config(folder, lower, local_batch_size=3)
    tokens, labels = next(iter(training_batches(config, tokenizer, 0, 2)))
    assert tokens.shape == labels.shape == (3, 16)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_each_token_is_predicted_once_an_epoch(
    folder: Path, tokenizer: Tokenizer, lower: DataSource
) -> None:
    config = data_config(folder, lower)
    (source,) = open_sources(config.data, tokenizer)
    size = source.train.num_windows(16)
    stream = source.train.read(0, len(source.train)).tolist()
    windows = rows(itertools.islice(training_batches(config, tokenizer, 0, 1), size))
    expected = [tuple(stream[16 * number : 16 * number + 17]) for number in range(size)]
    assert sorted(windows) == sorted(expected)
    assert windows != expected  # shuffled
    again = rows(itertools.islice(training_batches(config, tokenizer, 0, 1, size), size))
    assert sorted(again) == sorted(expected)
    assert again != windows  # anew


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("local_batch_size", [1, 3])
def test_global_batches_are_the_same_at_any_world_size(
    folder: Path,
    tokenizer: Tokenizer,
    lower: DataSource,
    upper: DataSource,
    world_size: int,
    local_batch_size: int,
) -> None:
    config = data_config(folder, lower, upper, global_batch_size=36)
    expected = global_batches(config, tokenizer, 1, steps=12)
    got = global_batches(
        with_local_batch(config, local_batch_size), tokenizer, world_size, steps=12
    )
    assert got == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 8, 40])
@pytest.mark.parametrize("limit", [1, 4, 8192])
def test_automatic_batches_are_the_same_at_any_world_size(
    folder: Path,
    tokenizer: Tokenizer,
    lower: DataSource,
    world_size: int,
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The windows of step s are [(s - 1) G, s G), whatever is padding.

    So a run can go on at any number of ranks.
    """
    monkeypatch.setattr("matrixtitan.ranks.AUTOMATIC_TOKENS", limit * 16)
    config = data_config(folder, lower, global_batch_size=16)
    expected = global_batches(config, tokenizer, 1, steps=5)
    automatic = with_local_batch(config, 0)
    got = global_batches(automatic, tokenizer, world_size, steps=2)
    got += global_batches(automatic, tokenizer, 3, steps=3, start_window=2 * 16)
    assert got == expected


@pytest.mark.parametrize("local_batch_size", [0, 2])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(
    folder: Path, tokenizer: Tokenizer, lower: DataSource, num_workers: int, local_batch_size: int
) -> None:
    config = data_config(folder, lower, global_batch_size=20, local_batch_size=local_batch_size)
    expected = global_batches(config, tokenizer, 2, steps=5)
    assert global_batches(with_workers(config, num_workers), tokenizer, 2, steps=5) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_twice_in_a_row_and_at_another_world_size(
    folder: Path, tokenizer: Tokenizer, lower: DataSource, upper: DataSource, num_workers: int
) -> None:
    config = data_config(folder, lower, upper)
    expected = global_batches(config, tokenizer, 1, steps=9)
    worked = with_workers(config, num_workers)
    got = global_batches(worked, tokenizer, 2, steps=2)
    got += global_batches(worked, tokenizer, 3, steps=3, start_window=2 * 12)
    got += global_batches(worked, tokenizer, 1, steps=4, start_window=5 * 12)
    assert got == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_past_the_end_of_an_epoch_reads_every_window_once_an_epoch(
    folder: Path, tokenizer: Tokenizer, lower: DataSource, num_workers: int, world_size: int
) -> None:
    """A run that stops before the end of the first epoch resumes to past the end of the second."""
    config = with_workers(data_config(folder, lower), num_workers)
    (source,) = open_sources(config.data, tokenizer)
    size = source.train.num_windows(16)
    stopped_at = size // 12
    assert size % 12, "an epoch must end inside a global batch"
    steps = global_batches(config, tokenizer, world_size, stopped_at)
    steps += global_batches(config, tokenizer, world_size, stopped_at + 2, stopped_at * 12)
    assert steps == global_batches(config, tokenizer, world_size, 2 * stopped_at + 2)
    windows = list(itertools.chain.from_iterable(steps))
    stream = source.train.read(0, size * 16 + 1).tolist()
    expected = sorted(tuple(stream[16 * number : 16 * number + 17]) for number in range(size))
    assert sorted(windows[:size]) == sorted(windows[size : 2 * size]) == expected


def test_resume_at_a_far_index_reads_only_its_own_tokens(
    folder: Path, tokenizer: Tokenizer, lower: DataSource
) -> None:
    """A window of a later epoch is found without reading the epochs before."""
    config = data_config(folder, lower)
    windows = training_batches(config, tokenizer, 0, 1, 10**15).dataset.windows
    reads = []
    read = windows.streams[0].read
    windows.streams[0].read = lambda start, count: reads.append(count) or read(start, count)
    loader = training_batches(config, tokenizer, 0, 1, 10**15)
    loader.dataset.windows = windows
    next(iter(loader))
    assert reads == [17]


def test_loader_leaves_the_global_random_state_alone(
    folder: Path, tokenizer: Tokenizer, lower: DataSource
) -> None:
    config = data_config(folder, lower, num_workers=1)
    before = torch.get_rng_state()
    next(iter(training_batches(config, tokenizer, 0, 1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_pickles_without_its_tokens(
    folder: Path, tokenizer: Tokenizer, lower: DataSource
) -> None:
    (source,) = open_sources(data_config(folder, lower).data, tokenizer)
    pickled = pickle.dumps(source.train)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).read(5, 20).tolist() == source.train.read(5, 20).tolist()


# --- sources --------------------------------------------------------------------------------------


def test_two_sources_in_their_shares(
    folder: Path, tokenizer: Tokenizer, lower: DataSource, upper: DataSource
) -> None:
    config = data_config(folder, lower, upper)
    for step in global_batches(config, tokenizer, 2, steps=10):
        kinds = Counter(any(chr(token).isupper() for token in row if token < 256) for row in step)
        assert kinds == {True: 9, False: 3}  # weights 3 to 1 of 12


def test_seed_orders_the_data(folder: Path, tokenizer: Tokenizer, lower: DataSource) -> None:
    def first(**options: int) -> list[list[tuple[int, ...]]]:
        return global_batches(data_config(folder, lower, **options), tokenizer, 1, steps=1)

    assert first(seed=1) == first(seed=1)
    assert first(seed=1) != first(seed=2)
    config = data_config(folder, lower, seed=1)
    own = dataclasses.replace(config, data=dataclasses.replace(config.data, seed=2))
    assert global_batches(own, tokenizer, 1, steps=1) == first(seed=2)


def test_prepared_shards_give_the_same_batches(
    folder: Path, tokenizer: Tokenizer, lower: DataSource, tmp_path: Path
) -> None:
    tokenize(
        TextSource("jsonl", lower.path),
        tokenizer,
        tmp_path,
        validation_fraction=0.1,
        shard_tokens=500,
    )
    from_text = data_config(folder, lower)
    from_shards = data_config(folder, DataSource("shards", (str(tmp_path),)))
    batches = [global_batches(config, tokenizer, 1, steps=3) for config in (from_text, from_shards)]
    assert batches[0] == batches[1]
    validations = [
        rows(validation_batches(config, tokenizer, 0, 1)) for config in (from_text, from_shards)
    ]
    assert validations[0] == validations[1]
    with pytest.raises(ValueError, match="was made by another tokenizer"):
        training_batches(from_shards, load_tokenizer(""), 0, 1)


def test_too_little_data(
    folder: Path, tokenizer: Tokenizer, lower: DataSource, upper: DataSource
) -> None:
    (source,) = open_sources(data_config(folder, lower).data, tokenizer)
    size = source.train.num_windows(16)
    training_batches(data_config(folder, lower, global_batch_size=size), tokenizer, 0, 1)
    with pytest.raises(
        ValueError, match=rf"data\.sources\[0\] has {size} windows .* fewer than the {size + 1}"
    ):
        training_batches(data_config(folder, lower, global_batch_size=size + 1), tokenizer, 0, 1)
    with pytest.raises(ValueError, match=r"data\.sources\[1\] has \d+ windows"):
        training_batches(data_config(folder, lower, upper, global_batch_size=400), tokenizer, 0, 1)
    with pytest.raises(
        ValueError,
        match=r"data\.sources\[0\] has \d+ training tokens, fewer than one window of",
    ):
        training_batches(data_config(folder, lower, seq_len=100_000), tokenizer, 0, 1)


def test_a_new_source_type_is_one_entry(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(path: Path, file: BinaryIO, field: str) -> Iterator[Record]:
        for number, line in enumerate(file, start=1):
            yield Record(path, number, line.split(b",")[int(field)])

    (tmp_path / "table.csv").write_text("1,first text,x\n2,second text,y\n")
    (tmp_path / "other.txt").write_text("not of this type")
    source = DataSource("csv", (str(tmp_path),), field="1")
    config = dataclasses.replace(data_config(folder, source).data, validation_fraction=0.0)
    with pytest.raises(ValueError, match=r"data\.sources\[0\]\.type is 'csv'; choose "):
        open_sources(config, tokenizer)
    csv = SourceType("", rows, suffixes=(".csv",), takes_field=True)
    monkeypatch.setitem(SOURCE_TYPES, "csv", csv)
    (opened,) = open_sources(config, tokenizer)
    text = tokenizer.decode(opened.train.read(0, len(opened.train)).tolist())
    assert re.findall(r"\w+ text", text) == ["first text", "second text"]


def test_bad_weight_and_no_source(folder: Path, tokenizer: Tokenizer, lower: DataSource) -> None:
    with pytest.raises(ValueError, match=r"data\.sources\[0\]\.weight is 0\.0; it must be posit"):
        training_batches(
            data_config(folder, dataclasses.replace(lower, weight=0.0)), tokenizer, 0, 1
        )
    with pytest.raises(ValueError, match=r"data\.sources is empty"):
        training_batches(data_config(folder), tokenizer, 0, 1)


def test_the_log_tells_how_often_the_data_is_read(
    folder: Path, tokenizer: Tokenizer, lower: DataSource, caplog: pytest.LogCaptureFixture
) -> None:
    config = data_config(folder, lower)
    size = open_sources(config.data, tokenizer)[0].train.num_windows(16)
    with caplog.at_level(logging.INFO, "matrixtitan"):
        training_batches(config, tokenizer, 0, 1)
    assert f"the whole run reads it {120 / size:.2f} times" in caplog.text


@pytest.mark.parametrize(("global_batch_size", "nearest"), [(13, "12 or 18"), (5, "6")])
def test_uneven_global_batch_names_the_nearest(global_batch_size: int, nearest: str) -> None:
    training = TrainingConfig(global_batch_size=global_batch_size, local_batch_size=2)
    with pytest.raises(ValueError, match=f"size to 0, .* or the global batch to {nearest}$"):
        split_batch(training, 3)
    assert split_batch(dataclasses.replace(training, global_batch_size=18), 3) == (2, 3, 0)
    with pytest.raises(ValueError, match=r"^training\.global_batch_size is 0; it is required"):
        split_batch(dataclasses.replace(training, global_batch_size=0), 3)


@pytest.mark.parametrize(
    ("total", "seq_len", "world_size", "expected"),
    [
        (16, 256, 1, (16, 1, 0)),
        (16, 256, 2, (8, 1, 0)),
        (16, 256, 3, (6, 1, 2)),
        (16, 256, 5, (4, 1, 4)),
        (16, 256, 32, (1, 1, 16)),
        (48, 1024, 2, (8, 3, 0)),
        (17, 4096, 4, (2, 3, 7)),
        (5, 100_000, 2, (1, 3, 1)),  # one sequence is over the limit
    ],
)
def test_automatic_batch_size(
    total: int, seq_len: int, world_size: int, expected: tuple[int, int, int]
) -> None:
    training = TrainingConfig(global_batch_size=total, seq_len=seq_len, local_batch_size=0)
    assert split_batch(training, world_size) == expected


def test_stream_fingerprint_follows_what_orders_the_data(
    folder: Path, tokenizer: Tokenizer, lower: DataSource, upper: DataSource, tmp_path: Path
) -> None:
    config = data_config(folder, lower, upper)
    fingerprint = fingerprint_of(config, tokenizer)
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    moved = DataSource("jsonl", (str(write_jsonl(tmp_path / "moved.jsonl", texts(60))),))
    same = [
        with_local_batch(with_workers(config, 2), 3),
        data_config(tmp_path / "other_cache", moved, upper),  # by content, not by name
    ]
    changed = [
        data_config(folder, upper, lower),
        data_config(folder, lower, dataclasses.replace(upper, weight=2.0)),
        data_config(folder, lower, upper, seed=1),
        data_config(folder, lower, upper, seq_len=8),
        data_config(folder, lower, upper, validation_fraction=0.2),
    ]
    assert all(fingerprint_of(other, tokenizer) == fingerprint for other in same)
    assert all(fingerprint_of(other, tokenizer) != fingerprint for other in changed)


# --- validation -----------------------------------------------------------------------------------


def labelled(batches: Iterable[Batch]) -> list[tuple[int, ...]]:
    """The windows that count. The labels of a row are all ignored, or none of them."""
    kept = []
    for tokens, labels in batches:
        ignored = (labels == IGNORE_INDEX).all(dim=1)
        assert torch.equal(ignored, (labels == IGNORE_INDEX).any(dim=1))
        kept += rows([(tokens[~ignored], labels[~ignored])])
    return kept


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("local_batch_size", [None, 1, 2])
@pytest.mark.parametrize("steps", [1, -1])
def test_validation_reads_the_same_windows_at_any_world_size(
    folder: Path,
    tokenizer: Tokenizer,
    lower: DataSource,
    world_size: int,
    local_batch_size: int | None,
    steps: int,
) -> None:
    def loaders(world_size: int, local_batch_size: int | None) -> list:
        validation = ValidationConfig(enable=True, steps=steps, local_batch_size=local_batch_size)
        config = data_config(
            folder, lower, global_batch_size=7, local_batch_size=0, validation=validation
        )
        return [
            validation_batches(config, tokenizer, rank, world_size) for rank in range(world_size)
        ]

    expected = labelled(loaders(1, 1)[0])
    ranks = loaders(world_size, local_batch_size)
    batches = [list(loader) for loader in ranks]
    assert {len(rank) for rank in batches} == {ranks[0].num_batches}
    in_order = [rank[number] for number in range(ranks[0].num_batches) for rank in batches]
    assert labelled(in_order) == expected
    assert len(expected) == len(set(expected)) == ranks[0].num_windows
    assert rows(ranks[0]) == rows(batches[0])  # every validation again


def test_validation_sizes(folder: Path, tokenizer: Tokenizer, lower: DataSource) -> None:
    (source,) = open_sources(data_config(folder, lower).data, tokenizer)
    available = source.validation.num_windows(16)
    assert 7 < available < 7000

    def num_windows(steps: int) -> int | None:
        validation = ValidationConfig(enable=True, steps=steps)
        config = data_config(folder, lower, global_batch_size=7, validation=validation)
        return validation_batches(config, tokenizer, 0, 2).num_windows

    assert num_windows(1) == 7
    assert num_windows(-1) == num_windows(1000) == available
    with pytest.raises(ValueError, match=r"validation\.steps is 0"):
        num_windows(0)


def test_validation_documents_are_not_trained_on(
    folder: Path, tokenizer: Tokenizer, lower: DataSource
) -> None:
    (source,) = open_sources(data_config(folder, lower).data, tokenizer)
    train = tokenizer.decode(source.train.read(0, len(source.train)).tolist())
    held_out = tokenizer.decode(source.validation.read(0, len(source.validation)).tolist())
    assert source.validation.num_documents == 6
    for number in range(60):
        start = f"<|begin_of_text|>{number}:"
        assert (start in held_out, start in train) == (number % 10 == 9, number % 10 != 9)


def test_validation_without_held_out_data(
    folder: Path,
    tokenizer: Tokenizer,
    lower: DataSource,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        ValueError, match=r"not one window .*\(data\.sources\[0\]: 0 tokens, 0 documents"
    ):
        validation_batches(data_config(folder, lower, validation_fraction=0.0), tokenizer, 0, 1)
    tokenize(TextSource("jsonl", lower.path), tokenizer, tmp_path, validation_fraction=0.0)
    config = data_config(folder, lower, DataSource("shards", (str(tmp_path),)))
    assert validation_batches(config, tokenizer, 0, 1).num_windows
    assert "nothing is held out of data.sources[1]" in caplog.text


# --- many shards ----------------------------------------------------------------------------------


def _read_with_few_descriptors(config: Config, folder: Path, steps: int, queue: Queue) -> None:
    """In a process of its own: an epoch's windows, without and with a loader worker."""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        tokenizer = byte_tokenizer(folder)
        for num_workers in (0, 1):
            loader = iter(training_batches(with_workers(config, num_workers), tokenizer, 0, 1))
            queue.put(sorted(rows(next(loader) for _ in range(steps))))
    except BaseException:
        queue.put(traceback.format_exc())


def test_more_shards_than_file_handles(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 prepared folders under `ulimit -n 256`: a worker, or none, reads every window."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # seconds, for 600 files
    documents = [[number % 256, number // 256] * 8 for number in range(600)]
    for number, document in enumerate(documents):
        part = tmp_path / f"part-{number:03d}"
        part.mkdir()
        writer = ShardWriter(
            part, "train", tokenizer.fingerprint, dtype_for(tokenizer.n_words), 100
        )
        writer.append(np.array(document), 1)
        writer.close()
    source = DataSource("shards", (str(tmp_path),))
    config = data_config(folder, source, global_batch_size=1, seq_len=16)
    stream = list(itertools.chain(*documents))
    windows = [tuple(stream[start : start + 17]) for start in range(0, len(stream) - 16, 16)]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    arguments = (config, folder, len(windows), queue)
    process = context.Process(target=_read_with_few_descriptors, args=arguments)
    process.start()
    try:
        for _ in range(2):
            assert queue.get(timeout=60) == sorted(windows)
        process.join(10)
    finally:
        process.kill()
        process.join()


def test_closed_streams_leave_no_memory_map(tokenizer: Tokenizer, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", tokenizer.fingerprint, dtype_for(258), 100)
    writer.append(np.arange(50), 1)
    writer.close()
    path = tmp_path / "train-00000.bin"
    stream = TokenStream([path], tokenizer.fingerprint)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert stream.read(3, 2).tolist() == [3, 4]
    del stream
    assert str(path) not in Path("/proc/self/maps").read_text()
