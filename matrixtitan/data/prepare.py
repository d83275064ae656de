"""Text to token shards: on all cores, once, with a cache.

Owns tokenising a source into shards (training and held-out documents apart) and the cache of
shards. Runs no collective: of the processes that want the same shards, one takes a file lock and
makes them, and the others wait for the lock. If that process dies, the system frees the lock. Next:
`shards.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from matrixtitan.data.shards import SPLITS, ShardWriter, Split, dtype_for
from matrixtitan.data.sources import (
    SOURCE_TYPES,
    BadRecord,
    Record,
    find_files,
    no_text,
    read_records,
    stdlib_folder,
    text_of,
)
from matrixtitan.data.tokenizer import Tokenizer
from matrixtitan.log import get_logger
from matrixtitan.progress import ProgressBar

logger = get_logger()

OnBadRecord = Literal["error", "skip"]

SHARD_TOKENS = 1 << 30
_TASK_BYTES = 1 << 20
# to be raised when the same text would give other shards
_CACHE_VERSION = 3
# bad records that are logged with their message; the others are only counted
_NAMED_SKIPS = 5


@dataclass(frozen=True)
class TextSource:
    """Text to tokenise. `kind` is a key of SOURCE_TYPES, `key` the source's name in messages."""

    kind: str
    path: Sequence[str] = ()
    field: str = "text"
    key: str = "data.sources[0]"


@dataclass
class Counts:
    """What was tokenised; `documents` and `tokens` are pairs (training, held-out).

    The `skipped` bad records and the `empty` texts count in neither.
    """

    documents: tuple[int, int]
    tokens: tuple[int, int]
    skipped: int
    empty: int = 0

    def __str__(self) -> str:
        documents, tokens, held_out = sum(self.documents), sum(self.tokens), self.tokens[1]
        text = f"{documents:,} documents, {tokens:,} tokens, {held_out:,} of them held out"
        if self.skipped:
            text += f", {self.skipped:,} bad records skipped in all"
        if self.empty:
            text += f", {self.empty:,} empty texts left out"
        return text


class _Encoded(NamedTuple):
    """The tokens of a task, and where in them documents begin.

    The tokens before the first start belong to the last document of the task before.
    """

    tokens: np.ndarray
    starts: list[int]
    skipped: list[str]
    num_empty: int
    num_bytes: int


def split_of(document: int, validation_fraction: float) -> Split:
    """Every (1 / fraction)-th document is held out, whatever is in it."""
    held_out = math.floor((document + 1) * validation_fraction) > math.floor(
        document * validation_fraction
    )
    return "validation" if held_out else "train"


def tokenize(
    source: TextSource,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float,
    on_bad_record: OnBadRecord = "error",
    shard_tokens: int = SHARD_TOKENS,
    num_threads: int | None = None,
) -> Counts:
    """Write the shards of `source` into the existing `folder`, as `<split>-<number>.bin`.

    Each document is BOS, its tokens, EOS. If the tokenizer's BOS and EOS are the same, one mark
    stands between documents. The result does not depend on the number of threads.

    ValueError, naming file and line, at the first bad record, unless bad records are to be skipped.
    Of the standard library, files that are not UTF-8 are always skipped. Empty texts are left out
    and counted. They are no documents, so the share of held-out documents is that of the others.
    ValueError if no text is left.
    """
    files = find_files(source.kind, source.path, source.key)
    logger.info("%s: tokenising %s files", source.key, f"{len(files):,}")
    skip = on_bad_record == "skip" or SOURCE_TYPES[source.kind].skips_bad_records
    dtype = dtype_for(tokenizer.n_words)
    writers = {
        split: ShardWriter(folder, split, tokenizer.fingerprint, dtype, shard_tokens)
        for split in SPLITS
    }
    progress = _Progress(source.key, files)

    def encode(records: list[Record | BadRecord]) -> _Encoded:
        return _encode(source, tokenizer, records, dtype, skip)

    num_documents = skipped = empty = 0
    split: Split = "train"
    tasks = _tasks(read_records(source.kind, files, source.field))
    for encoded in _in_order(encode, tasks, num_threads or len(os.sched_getaffinity(0))):
        # The first piece belongs to the last document of the task before, and to its split.
        parts: dict[Split, list[np.ndarray]] = {name: [] for name in SPLITS}
        documents = dict.fromkeys(SPLITS, 0)
        for number, piece in enumerate(np.split(encoded.tokens, encoded.starts)):
            if number:
                split = split_of(num_documents, validation_fraction)
                num_documents += 1
                documents[split] += 1
            parts[split].append(piece)
        for name, writer in writers.items():
            if parts[name]:
                writer.append(np.concatenate(parts[name]), documents[name])
        for message in encoded.skipped:
            skipped += 1
            if skipped <= _NAMED_SKIPS:
                logger.warning("%s: skipped: %s", source.key, message)
        empty += encoded.num_empty
        progress.advance(encoded.num_bytes, sum(writer.num_tokens for writer in writers.values()))
    progress.close()
    for writer in writers.values():
        writer.close()
    if skipped:
        logger.warning("%s: %d bad records skipped in all", source.key, skipped)
    if not num_documents:
        raise ValueError(no_text(source.key, files, empty, skipped))
    train, validation = writers["train"], writers["validation"]
    return Counts(
        (train.num_documents, validation.num_documents),
        (train.num_tokens, validation.num_tokens),
        skipped,
        empty,
    )


def _tasks(records: Iterable[Record | BadRecord]) -> Iterator[list[Record | BadRecord]]:
    """Records in lots that are large enough for a task."""
    lot: list[Record | BadRecord] = []
    num_bytes = 0
    for record in records:
        lot.append(record)
        num_bytes += len(record.raw) if isinstance(record, Record) else 0
        if num_bytes >= _TASK_BYTES:
            yield lot
            lot, num_bytes = [], 0
    if lot:
        yield lot


def _in_order(
    encode: Callable[[list[Record | BadRecord]], _Encoded],
    tasks: Iterable[list[Record | BadRecord]],
    num_threads: int,
) -> Iterator[_Encoded]:
    """The results of `encode` for every task, in order; a bounded number of tasks is in flight."""
    pending: deque[Future[_Encoded]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for task in tasks:
                pending.append(pool.submit(encode, task))
                if len(pending) > 2 * num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _encode(
    source: TextSource,
    tokenizer: Tokenizer,
    records: Sequence[Record | BadRecord],
    dtype: np.dtype,
    skip: bool,
) -> _Encoded:
    parts = [np.empty(0, dtype)]
    starts: list[int] = []
    skipped: list[str] = []
    bos = np.array([tokenizer.bos_id], dtype)
    eos = np.array([tokenizer.eos_id] if tokenizer.eos_id != tokenizer.bos_id else [], dtype)
    num_tokens = num_empty = num_bytes = 0
    for record in records:
        try:
            if isinstance(record, BadRecord):
                raise record
            num_bytes += len(record.raw)
            text = text_of(source.kind, record, source.field)
            if not text and record.begins and record.ends:
                num_empty += 1
                continue
            tokens = tokenizer.encode_array(text).astype(dtype)
        except BadRecord as error:
            if not skip:
                raise ValueError(
                    f"{source.key}: {error}. To leave such records out: data.on_bad_record = "
                    '"skip" (of prepare_data: --on-bad-record skip)'
                ) from None
            skipped.append(str(error))
            if isinstance(record, BadRecord) or (record.begins and record.ends):
                continue
            # a piece of a longer document, which keeps its marks
            tokens = np.empty(0, dtype)
        if record.begins:
            starts.append(num_tokens)
        marked = [bos] * record.begins + [tokens] + [eos] * record.ends
        num_tokens += sum(map(len, marked))
        parts += marked
    return _Encoded(np.concatenate(parts), starts, skipped, num_empty, num_bytes)


# --- the cache ------------------------------------------------------------------------------------


def cached_shards(
    source: TextSource,
    tokenizer: Tokenizer,
    cache_dir: Path,
    *,
    validation_fraction: float,
    on_bad_record: OnBadRecord = "error",
) -> list[Path]:
    """The shards of `source`: made by the first call for these files and this tokenizer.

    Later calls find them. Any number of processes may call this at once. ValueError for bad records
    and for a cache that cannot be written.
    """
    cache_dir = cache_dir.expanduser()
    files = find_files(source.kind, source.path, source.key)
    name = _cache_name(source, files, tokenizer, validation_fraction, on_bad_record)
    ready = cache_dir / name
    if not ready.is_dir():
        with _lock(cache_dir, name, source.key):
            # another process may have made the shards while this one waited
            if not ready.is_dir():
                _fill_cache(source, tokenizer, ready, validation_fraction, on_bad_record)
    counts = Counts(**json.loads((ready / "counts.json").read_text()))
    logger.info("%s: %s files, %s; kept in %s", source.key, f"{len(files):,}", counts, ready)
    return sorted(ready.glob("*.bin"))


def _fill_cache(
    source: TextSource,
    tokenizer: Tokenizer,
    ready: Path,
    validation_fraction: float,
    on_bad_record: OnBadRecord,
) -> None:
    """Make the cache entry `ready`, under its lock. It gets its name when all shards are in it.

    What an interrupted process left is removed first.
    """
    building = ready.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir()
        counts = tokenize(
            source,
            tokenizer,
            building,
            validation_fraction=validation_fraction,
            on_bad_record=on_bad_record,
        )
        (building / "counts.json").write_text(json.dumps(asdict(counts)))
        building.rename(ready)
    # of writing; a file that cannot be read is a bad record
    except OSError as error:
        raise ValueError(
            f"data.cache_dir: cannot write in {ready.parent} ({error}); free space, or set it to "
            "another folder"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _cache_name(
    source: TextSource,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    validation_fraction: float,
    on_bad_record: OnBadRecord,
) -> str:
    """32 hex digits, from all that the shards depend on; files count by path, size and time of
    change.
    """
    digest = hashlib.sha256()
    settings = (
        _CACHE_VERSION,
        source.kind,
        source.field,
        tokenizer.fingerprint,
        validation_fraction,
        on_bad_record,
    )
    digest.update(repr(settings).encode())
    if source.kind == "python_stdlib":
        # alike on all machines with this interpreter, whenever it was installed
        digest.update(platform.python_version().encode())
        files_below = (
            (str(file.relative_to(stdlib_folder())), file.stat().st_size, 0) for file in files
        )
    else:
        files_below = ((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    for entry in files_below:
        digest.update(repr(entry).encode())
    return digest.hexdigest()[:32]


@contextmanager
def _lock(cache_dir: Path, name: str, key: str) -> Iterator[None]:
    """Hold the file lock of a cache entry.

    The system frees it if this process dies, so nobody waits for a dead process.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        file = (cache_dir / f"{name}.lock").open("w")
    except OSError as error:
        raise ValueError(
            f"data.cache_dir: cannot write in {cache_dir} ({error}); set it to a folder that can be"
        ) from None
    with file:
        started, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and time.monotonic() - started > 5:
                    logger.info("%s: waiting for the process that tokenises it", key)
                    told = True
                time.sleep(0.05)
            except OSError as error:
                raise ValueError(
                    f"data.cache_dir: {cache_dir} has no file locks ({error}); set it to a folder "
                    "on a local disk"
                ) from None
        yield


class _Progress:
    """Progress on a source: bytes and tokens, with a bar if the total of bytes is known."""

    def __init__(self, label: str, files: Sequence[Path]) -> None:
        self._label = label
        plain = all(file.suffix != ".gz" for file in files)
        # unknown where files must be unpacked
        self._total = sum(file.stat().st_size for file in files) if plain else None
        self._done = 0
        self._started = time.monotonic()
        self._bar = ProgressBar(line_seconds=15.0)

    def advance(self, num_bytes: int, num_tokens: int) -> None:
        self._done += num_bytes
        rate = self._done / (time.monotonic() - self._started)
        self._bar.update(
            f"tokenising {self._label}: {self._done / 1e6:,.0f} MB, {num_tokens:,} tokens, "
            f"{rate / 1e6:.1f} MB/s",
            self._done / self._total if self._total else None,
        )

    def close(self) -> None:
        self._bar.clear()
