"""The order of windows, for any size, weights and seed."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixtitan.data.dataset import IGNORE_INDEX, RankBatches, Windows
from matrixtitan.data.order import MIXTURE_PERIOD, WindowOrder, make_key, permute
from matrixtitan.data.prepare import split_of
from matrixtitan.data.shards import TokenStream

seeds = st.integers(0, 2**63)
sizes = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@given(size=st.integers(1, 700), key=seeds)
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@given(size=st.integers(1, 2**60), key=seeds, data=st.data())
def test_permute_stays_inside_and_apart(size: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 1))
    second = data.draw(st.integers(0, size - 1))
    images = permute(first, size, key), permute(second, size, key)
    assert all(0 <= image < size for image in images)
    assert (images[0] == images[1]) == (first == second)


class Numbers(TokenStream):
    """The stream of tokens 0, 1, 2, ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(4, 200),
    world_size=st.integers(1, 4),
    local_batch_size=st.integers(1, 3),
    global_batch_size=st.integers(1, 12),
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=seeds,
)
def test_every_token_is_predicted_once_an_epoch_however_often_a_run_resumes(
    tokens: int,
    world_size: int,
    local_batch_size: int,
    global_batch_size: int,
    steps: list[int],
    seed: int,
) -> None:
    """Counted over ranks, by its number: what follows a window's last token is the next one's
    first.
    """
    windows = Windows([Numbers(tokens)], [1.0], seq_len=3, seed=seed)
    size, start = windows.order.sizes[0], 0
    predicted: list[int] = []
    for count in steps:  # from one resume to the next
        ranks = [
            RankBatches(
                windows,
                local_batch_size,
                rank,
                world_size,
                num_windows=global_batch_size,
                start_window=start,
                endless=True,
            )
            for rank in range(world_size)
        ]
        batches = [iter(rank) for rank in ranks]
        for _, rank_batches in itertools.product(range(count * ranks[0].num_batches), batches):
            labels = next(rank_batches)[1].flatten()
            predicted += labels[labels != IGNORE_INDEX].tolist()
        start += count * global_batch_size
    for first in range(0, len(predicted), 3 * size):
        epoch = predicted[first : first + 3 * size]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < 3 * size or sorted(epoch) == list(range(1, 3 * size + 1))


def test_permute_looks_random() -> None:
    """Over 2,000 keys each index of 5 lands everywhere about equally often.

    Few neighbours stay neighbours.
    """
    for index in range(5):
        counts = Counter(permute(index, 5, make_key(key)) for key in range(2000))
        assert all(330 < counts[image] < 470 for image in range(5)), (
            counts
        )  # 400 expected, 18 deviation
    shuffled = [permute(index, 10_000, make_key(7)) for index in range(10_000)]
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(shuffled))
    assert neighbours < 12  # 2 expected


def test_permute_refuses_an_index_outside() -> None:
    with pytest.raises(IndexError, match="range"):
        permute(5, 5, 0)


@settings(deadline=None)  # a mixture's table takes 30 ms to make
@given(sizes=sizes, seed=seeds, data=st.data())
def test_each_epoch_of_each_source_is_a_new_shuffle(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    order = WindowOrder(sizes, weights, seed)
    seen: dict[tuple[int, int], list[int]] = {}
    for index in range(400):
        place = order.place(index)
        seen.setdefault((place.source, place.epoch), []).append(place.window)
    for (source, epoch), windows in seen.items():
        assert len(set(windows)) == len(windows)
        if (source, epoch + 1) in seen:  # a finished epoch
            assert sorted(windows) == list(range(sizes[source]))
    repeat = order.first_repeat()
    if repeat < 400:
        assert order.place(repeat).epoch == 1
        assert all(order.place(index).epoch == 0 for index in range(repeat))


@settings(deadline=None, max_examples=20)
@given(weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4), start=st.integers(0, 30_000))
def test_shares_hold_over_any_stretch(weights: list[float], start: int) -> None:
    order = WindowOrder([1_000_000] * len(weights), weights, seed=1)
    count = 500
    got = Counter(order.place(index).source for index in range(start, start + count))
    for source, weight in enumerate(weights):
        expected = count * weight / sum(weights)
        assert abs(got[source] - expected) <= len(weights) + count / MIXTURE_PERIOD
    most = order.most_in(count)
    assert all(got[source] <= most[source] for source in range(len(weights)))


@given(fraction=st.floats(0, 1), count=st.integers(1, 500))
def test_held_out_share_of_documents(fraction: float, count: int) -> None:
    held_out = sum(split_of(document, fraction) == "validation" for document in range(count))
    assert abs(held_out - count * fraction) <= 1


def test_epochs_and_seeds_differ() -> None:
    def windows(seed: int, epoch: int) -> list[int]:
        order = WindowOrder([100], [1.0], seed)
        return [order.place(100 * epoch + index).window for index in range(100)]

    orders = [windows(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_a_weight_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.sources\[1\]: weight 1e-06"):
        WindowOrder([10, 10], [1.0, 1e-6], seed=0)
