"""A small model, its units and its batches, for tests of the runtime."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matrixtitan.fsdp import MatrixFSDP


class Block(nn.Module):
    """Two matrices, a norm with bias, and a residual."""

    def __init__(self, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    """Embedding, `depth` blocks, norm and head.

    Tokens (B, T) int64 give logits (B, T, V), or, with labels (B, T), the summed loss.
    """

    def __init__(self, vocab: int = 24, dim: int = 8, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
        )


def toy_units(depth: int = 3, tied: bool = False) -> list[list[str]]:
    blocks = [[f"blocks.{i}"] for i in range(depth)]
    return [*blocks, ["embed", "norm", "head"]] if tied else [["embed"], *blocks, ["norm", "head"]]


def make_toy(seed: int = 0, **kwargs: int | bool) -> Toy:
    torch.manual_seed(seed)
    return Toy(**kwargs)  # type: ignore[arg-type]


def batch(step: int, rows: int = 24, length: int = 5, vocab: int = 24) -> tuple[Tensor, Tensor]:
    """The whole global batch of a step: tokens and labels, (rows, length) int64."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gathered_nbytes(sharded: MatrixFSDP) -> int:
    """Bytes of transient weights alive on this rank now."""
    return sum(unit.transient_nbytes for unit in sharded.units)


def share(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """Rank's rows of a batch; the rows must divide evenly."""
    return tensor.chunk(world_size)[rank]
