"""Windows of tokens by their place in the stream, and the batches of one rank.

Owns the mapping (step, microbatch, rank, row) -> window. It is the same at any number of ranks and
of loader workers, and its only state is the index of the first window. Next: `dataloader.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from matrixtitan.data.order import WindowOrder
from matrixtitan.data.shards import TokenStream

IGNORE_INDEX = -100
"""The label of a position without a target, which counts for nothing in the loss."""


class Windows:
    """The endless stream of windows of several sources; a window is (seq_len + 1,) int64."""

    def __init__(
        self, streams: Sequence[TokenStream], weights: Sequence[float], seq_len: int, seed: int
    ) -> None:
        self.streams = list(streams)
        self.seq_len = seq_len
        self.order = WindowOrder([stream.num_windows(seq_len) for stream in streams], weights, seed)

    def read(self, index: int) -> Tensor:
        place = self.order.place(index)
        return torch.from_numpy(
            self.streams[place.source].read(place.window * self.seq_len, self.seq_len + 1)
        )


class RankBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of rank `dp_rank`: (tokens, labels), each (local_batch_size, seq_len) int64.

    A round is `num_windows` windows, shared out among the N ranks. With B rows per rank, batch k of
    a round holds its windows k B N + dp_rank B + [0, B). Every rank makes `num_batches` batches of
    a round, which is enough for all windows. Rows beyond the end of the round are padding: token 0,
    and IGNORE_INDEX as label.

    There is one round, from `start_window` on. With `endless` one round follows the other: each is
    then a training step. In a loader with W workers, each worker makes every W-th batch, and the
    loader puts the batches in order.
    """

    def __init__(
        self,
        windows: Windows,
        local_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        *,
        num_windows: int,
        start_window: int = 0,
        endless: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank {dp_rank} is not below dp_world_size {dp_world_size}")
        if start_window < 0:
            raise ValueError(f"start_window {start_window} is negative; the stream begins at 0")
        self.windows = windows
        self.local_batch_size = local_batch_size
        self.start_window = start_window
        self.num_windows = num_windows
        self.endless = endless
        self._offset = dp_rank * local_batch_size
        self._stride = dp_world_size * local_batch_size

    @property
    def num_batches(self) -> int:
        """Number of batches that each rank makes in a round."""
        return -(-self.num_windows // self._stride)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker else (0, 1)
        while self.endless or number < self.num_batches:
            yield self._batch(number)
            number += step

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        round_number, batch_number = divmod(number, self.num_batches)
        start = self.start_window + round_number * self.num_windows
        # in rows of the round
        first = batch_number * self._stride + self._offset
        rows = range(first, min(first + self.local_batch_size, self.num_windows))
        tokens = torch.zeros(self.local_batch_size, self.windows.seq_len, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORE_INDEX)
        for place, row in enumerate(rows):
            window = self.windows.read(start + row)
            tokens[place], labels[place] = window[:-1], window[1:]
        return tokens, labels
