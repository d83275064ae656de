"""What the trainer calls: the training batches from any place on, and the held-out batches.

Turns the config's sources into streams, and checks their sizes. The state of the loader is one
number, the index of the next window of the stream. The global batch of step s (from 1) is windows
[(s - 1) G, s G), G being training.global_batch_size, at any number of ranks, microbatches and
workers. Calls no collective. Next: `dataset.py`.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from matrixtitan.config import Config, DataConfig, DataSource
from matrixtitan.data.dataset import RankBatches, Windows
from matrixtitan.data.prepare import TextSource, cached_shards
from matrixtitan.data.shards import Split, TokenStream, read_header
from matrixtitan.data.sources import SOURCE_TYPES, find_files
from matrixtitan.data.tokenizer import Tokenizer
from matrixtitan.log import get_logger
from matrixtitan.ranks import split_batch

logger = get_logger()

# to be raised when the same data and settings would give another stream
_ORDER_VERSION = 1
_PREFETCH_BATCHES = 4  # per worker


class SourceStreams(NamedTuple):
    """The two streams of a source; `key` is its name in the config."""

    key: str
    weight: float
    train: TokenStream
    validation: TokenStream


def open_sources(data: DataConfig, tokenizer: Tokenizer) -> list[SourceStreams]:
    """The streams of every source, tokenised here unless data.cache_dir has them already.

    Any number of processes may call this at once.
    """
    data.require("data.")
    return [
        _open_source(f"data.sources[{number}]", source, data, tokenizer)
        for number, source in enumerate(data.sources)
    ]


def _open_source(
    key: str, source: DataSource, data: DataConfig, tokenizer: Tokenizer
) -> SourceStreams:
    if SOURCE_TYPES[source.type].records is None:
        paths = find_files("shards", source.path, key)
        logger.info("%s: %s files", key, f"{len(paths):,}")
    else:
        paths = cached_shards(
            TextSource(source.type, source.path, source.field, key),
            tokenizer,
            Path(data.cache_dir),
            validation_fraction=data.validation_fraction,
            on_bad_record=data.on_bad_record,
        )
    by_split: dict[Split, list[Path]] = {"train": [], "validation": []}
    for path in paths:
        by_split[read_header(path).split].append(path)
    streams = {
        split: TokenStream(chosen, tokenizer.fingerprint) for split, chosen in by_split.items()
    }
    return SourceStreams(key, source.weight, streams["train"], streams["validation"])


def build_dataloader(
    config: Config,
    sources: Sequence[SourceStreams],
    dp_rank: int,
    dp_world_size: int,
    start_window: int = 0,
) -> StatefulDataLoader:
    """Endless batches (tokens, labels) of rank `dp_rank`, from `start_window` on.

    Both are (local batch size, seq_len) int64. To resume, build a new loader from the index of the
    next window. ValueError for a source that is so small that a global batch would repeat some of
    it, and where the ranks cannot share a global batch.
    """
    training = config.training
    split = split_batch(training, dp_world_size)
    for source in sources:
        _check_not_empty(source, training.seq_len)
    windows = Windows(
        [source.train for source in sources],
        [source.weight for source in sources],
        training.seq_len,
        _seed(config),
    )
    _check_sizes(sources, windows, training.global_batch_size)
    if dp_rank == 0:
        _describe(sources, windows, training.steps * training.global_batch_size)
    batches = RankBatches(
        windows,
        split.local_batch_size,
        dp_rank,
        dp_world_size,
        num_windows=training.global_batch_size,
        start_window=start_window,
        endless=True,
    )
    return _prefetching(batches, config)


def _prefetching(batches: RankBatches, config: Config) -> StatefulDataLoader:
    workers = config.data.num_workers
    with warnings.catch_warnings():
        # torchdata makes torch warn
        warnings.filterwarnings("ignore", message=".*set_vital")
        return StatefulDataLoader(
            batches,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=_PREFETCH_BATCHES if workers else None,
            worker_init_fn=_outlive_preemption if config.checkpoint.enable else None,
            pin_memory=torch.cuda.is_available(),
            # a generator of its own, so that the loader draws nothing from training's
            generator=torch.Generator(),
            # never: the state is the window index, which the trainer counts
            snapshot_every_n_steps=1 << 30,
        )


def _outlive_preemption(worker: int) -> None:
    """In a worker: ignore the first SIGTERM; the second ends it.

    torchrun and Slurm send SIGTERM to whole process groups. The rank then goes on to the end of its
    step and saves (`checkpoint/preemption.py`), and needs its workers until it ends.
    """

    def end_at_the_next(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, end_at_the_next)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def build_validation_loader(
    config: Config, sources: Sequence[SourceStreams], dp_rank: int, dp_world_size: int
) -> RankBatches:
    """The held-out batches of rank `dp_rank`. Iterate them anew for each validation.

    They are the first validation.steps * training.global_batch_size windows of the held-out stream
    (all of it for -1). The windows are the same at every validation, world size and batch size, and
    no window comes twice. Each rank makes `num_batches` batches. Over all ranks `num_windows` rows
    have labels: sum losses and counts of labels over the ranks for the mean per token. ValueError
    if nothing is held out.
    """
    training, validation = config.training, config.validation
    validation.require("validation.")
    usable = [source for source in sources if source.validation.num_windows(training.seq_len)]
    if not usable:
        raise ValueError(
            f"validation.enable: not one window of {training.seq_len} tokens is held out ("
            + ", ".join(
                f"{s.key}: {len(s.validation)} tokens, {s.validation.num_documents} documents"
                for s in sources
            )
            + "). Raise data.validation_fraction (shards: prepare them with one), give the "
            "text as more documents, or turn validation off"
        )
    if dp_rank == 0 and len(usable) < len(sources):
        missing = [source.key for source in sources if source not in usable]
        logger.warning(
            "validation: nothing is held out of %s; the loss is of the other sources",
            ", ".join(missing),
        )
    windows = Windows(
        [source.validation for source in usable],
        [source.weight for source in usable],
        training.seq_len,
        _seed(config),
    )
    available = windows.order.first_repeat()
    wanted = available if validation.steps == -1 else validation.steps * training.global_batch_size
    if dp_rank == 0 and wanted > available:
        logger.info(
            "validation: %d windows are held out, fewer than the %d wanted; all are used",
            available,
            wanted,
        )
    return RankBatches(
        windows,
        validation.local_batch_size
        or training.local_batch_size
        or split_batch(training, dp_world_size).local_batch_size,
        dp_rank,
        dp_world_size,
        num_windows=min(wanted, available),
    )


def stream_fingerprint(
    config: Config, tokenizer: Tokenizer, sources: Sequence[SourceStreams]
) -> dict[str, Any]:
    """What decides which window has which index, as JSON values. A resume is exact if it is equal.

    Sources count by content: moving the files, or another cache, changes nothing.
    """
    return {
        "order_version": _ORDER_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "seq_len": config.training.seq_len,
        "seed": _seed(config),
        "weights": [source.weight for source in sources],
        "contents": [source.train.content for source in sources],
    }


def _seed(config: Config) -> int:
    return config.debug.seed if config.data.seed is None else config.data.seed


def _check_not_empty(source: SourceStreams, seq_len: int) -> None:
    if source.train.num_windows(seq_len) == 0:
        raise ValueError(
            f"{source.key} has {len(source.train)} training tokens, fewer than one window of "
            f"{seq_len + 1}: give it more text or lower training.seq_len"
        )


def _check_sizes(
    sources: Sequence[SourceStreams], windows: Windows, global_batch_size: int
) -> None:
    order = windows.order
    for source, size, most in zip(
        sources, order.sizes, order.most_in(global_batch_size), strict=True
    ):
        if size < most:
            raise ValueError(
                f"{source.key} has {size} windows of {windows.seq_len} tokens, fewer than the "
                f"{most} that one global batch takes from it, which would repeat: give it more "
                "text or a smaller weight, or lower training.global_batch_size or "
                "training.seq_len"
            )


def _describe(sources: Sequence[SourceStreams], windows: Windows, wanted: int) -> None:
    """Log the sizes, and how often the run reads each source, so that nothing repeats unnoticed."""
    order = windows.order
    for number, (source, size) in enumerate(zip(sources, order.sizes, strict=True)):
        share = order.turns[number] / sum(order.turns)
        logger.info(
            "%s: %s tokens in %s windows, %.1f%% of the stream; the whole run reads it %.2f times",
            source.key,
            f"{len(source.train):,}",
            f"{size:,}",
            100 * share,
            wanted * share / size,
        )
