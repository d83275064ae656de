"""The part of a run that a Checkpointer sees: cut parameters and optimizer state, and a config.

Every value is a function of the key and the row, so a test knows what a load should give under any
cut.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from matrixtitan.config import CheckpointConfig, Config, JobConfig
from matrixtitan.optim.build import StateTensor
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.shard import Plan

# name, full shape, role; "b" and "stack" are cut by rows, the others are whole on one rank
PARAMS = {
    "layers.0.w": ((6, 4), "matrix"),
    "layers.1.w": ((5, 3), "matrix"),
    "stack": ((4, 3, 2), "matrix"),
    "embedding": ((11, 3), "tail"),
    "norm": ((7,), "tail"),
}


def run_config(folder: str, **keys: Any) -> Config:
    """A run whose dump folder is `folder`; `keys` are the checkpoint section's."""
    settings = {"enable": True, "interval": 2, "keep_latest_k": 0, **keys}
    return Config(job=JobConfig(dump_folder=folder), checkpoint=CheckpointConfig(**settings))


def expected(
    key: str, full_shape: tuple[int, ...], start: int, rows: int, offset: float = 0.0
) -> Tensor:
    """Rows [start, start + rows) of the value that `key` has after `offset`."""
    seed = zlib.crc32(key.encode()) % 1000
    size = 1
    for dim in full_shape:
        size *= dim
    whole = torch.arange(size, dtype=torch.float32).reshape(full_shape) + seed + offset
    return whole[start : start + rows].clone()


def cut(rows: int, rank: int, world_size: int, bias: int = 0) -> tuple[int, int]:
    """Uneven cuts: [start, stop) of `rank`; `bias` moves them, some ranks get nothing."""
    edges = [min(rows, (rank_ * (rows + bias)) // world_size) for rank_ in range(world_size)] + [
        rows
    ]
    return edges[rank], edges[rank + 1]


class FakeRun:
    """Parameters and optimizer state of one rank: whole matrices by turns, the rest by rows."""

    plan: Plan | None = None

    def __init__(self, rank: int, world_size: int, *, bias: int = 0, filled: bool = True) -> None:
        self.params: list[LocalParam] = []
        self.states: list[StateTensor] = []
        for number, (fqn, (shape, role)) in enumerate(PARAMS.items()):
            start, stop = cut(shape[0], rank, world_size, bias)
            if role == "matrix" and len(shape) == 2:
                start, stop = (0, shape[0]) if number % world_size == rank else (0, 0)
            tensor = torch.nn.Parameter(torch.zeros(stop - start, *shape[1:]))
            self.params.append(LocalParam(fqn, tensor, shape, role, 1, start))  # type: ignore[arg-type]
            if stop > start:
                self.states.append(
                    StateTensor(fqn, "momentum", torch.zeros_like(tensor).detach(), True)
                )
                self.states.append(StateTensor(fqn, "step", torch.tensor(0.0), False))
                if fqn == "layers.0.w":
                    self.states.append(StateTensor(fqn, "factor", torch.zeros(4, 4), False))
                if fqn == "stack":
                    self.states.append(
                        StateTensor(fqn, "factors", torch.zeros(stop - start, 3, 3), True)
                    )
        if filled:
            self.fill(0.0)

    def local_parameters(self) -> list[LocalParam]:
        return self.params

    def stepped_parameters(self) -> list[LocalParam]:
        return self.params

    def allocate_state(self) -> None:
        """All state is there from the start."""

    def state_tensors(self) -> list[StateTensor]:
        return self.states

    @torch.no_grad()
    def fill(self, offset: float) -> None:
        for tensor, value in self._values(offset):
            tensor.copy_(value)

    def check(self, offset: float) -> None:
        """AssertionError unless every local value is what `fill(offset)` would have written."""
        for tensor, value in self._values(offset):
            assert torch.equal(tensor, value), (tensor, value)

    def _values(self, offset: float) -> list[tuple[Tensor, Tensor]]:
        by_fqn = {param.fqn: param for param in self.params}
        pairs = []
        for param in self.params:
            value = expected(
                param.fqn, param.full_shape, param.start, param.tensor.shape[0], offset
            )
            pairs.append((param.tensor.detach(), value))
        for state in self.states:
            key = f"{state.fqn}.{state.name}"
            if state.per_row:
                param = by_fqn[state.fqn]
                full = (param.full_shape[0], *state.tensor.shape[1:])
                pairs.append(
                    (state.tensor, expected(key, full, param.start, state.tensor.shape[0], offset))
                )
            else:
                shape = tuple(state.tensor.shape)
                value = expected(key, (1, *shape), 0, 1, offset)[0]
                pairs.append((state.tensor, value))
        return pairs
