"""Llama 3 in all its sizes: embedding, blocks, output unit.

Owns the flavors' shapes, the rule of initial values and the figures derived from shapes
(parameters, FLOPs). It is built under `torch.device("meta")`: `init_rows` then fills any rows of
any parameter and `init_buffers` the rotary table, or `init_weights` all of it on one device. It
never shards, casts or trains. Read `layers.py` for the block and `output_head.py` for the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from models.initialization import Normal, fill_rows
from models.layers import RopeScaling, TransformerBlock, rope_table
from models.output_head import OutputHead


@dataclass(frozen=True, slots=True)
class LlamaFlavor:
    """A size of Llama: everything that a name like "8B" stands for."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_hidden_dim: int
    tie_embeddings: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = field(default_factory=RopeScaling)
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(f"dim {self.dim} must be an even multiple of n_heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


# 1B is Llama 3.2's; 8B, 70B and 405B are Llama 3.1's; 32B has the proportions of its public
# namesakes; 150M counts a vocabulary of about 50k; debug is for a laptop's cores;
# bench and netlab are what tools/bench.py measures on one machine and on emulated hosts.
LLAMA3_FLAVORS: dict[str, LlamaFlavor] = {
    "debug": LlamaFlavor(128, 4, 4, 2, 384),
    "bench": LlamaFlavor(256, 6, 4, 4, 704),
    "netlab": LlamaFlavor(96, 6, 4, 4, 256),
    "150M": LlamaFlavor(768, 12, 12, 4, 2048),
    "1B": LlamaFlavor(
        2048, 16, 32, 8, 8192, tie_embeddings=True, rope_scaling=RopeScaling(factor=32.0)
    ),
    "8B": LlamaFlavor(4096, 32, 32, 8, 14336),
    "32B": LlamaFlavor(5120, 64, 40, 8, 27648),
    "70B": LlamaFlavor(8192, 80, 64, 8, 28672),
    "405B": LlamaFlavor(16384, 126, 128, 8, 53248),
}


class Llama(nn.Module):
    """A decoder-only transformer, token ids to summed cross-entropy or logits.

    `tail_patterns` are the names of matrices that a matrix optimizer should leave to AdamW.
    """

    tail_patterns: tuple[str, ...]

    def __init__(
        self, flavor: LlamaFlavor, *, vocab_size: int, max_seq_len: int, tie_embeddings: bool
    ) -> None:
        super().__init__()
        if vocab_size < 1 or max_seq_len < 1:
            raise ValueError(
                f"vocab_size and max_seq_len must be positive, got {vocab_size} and {max_seq_len}"
            )
        self.flavor = flavor
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.tie_embeddings = tie_embeddings
        output = () if tie_embeddings else ("head.output.weight",)
        self.tail_patterns = ("tok_embeddings.weight", *output)
        self.tok_embeddings = nn.Embedding(vocab_size, flavor.dim)
        self.layers = nn.ModuleDict(
            {
                str(layer): TransformerBlock(
                    flavor.dim,
                    flavor.n_heads,
                    flavor.n_kv_heads,
                    flavor.ffn_hidden_dim,
                    flavor.norm_eps,
                )
                for layer in range(flavor.n_layers)
            }
        )
        self.head = OutputHead(
            flavor.dim,
            vocab_size,
            flavor.norm_eps,
            tied_to=self.tok_embeddings if tie_embeddings else None,
        )
        self.init_buffers(self.tok_embeddings.weight.device)
        # Counted now: sharding later leaves each rank with its own rows only.
        self._num_parameters = sum(param.numel() for param in self.parameters())

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V); with labels, the SUM of the token losses.

        labels (B, T) int64, where -100 counts as nothing; the sum is a float32 scalar.
        """
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError(
                f"sequences of {tokens.shape[1]} tokens, but the model was built for max_seq_len "
                f"{self.max_seq_len}: raise training.seq_len or cut the sequences"
            )
        hidden = self.tok_embeddings(tokens)  # (B, T, C)
        for block in self.layers.values():
            hidden = block(hidden)
        return self.head(hidden, labels)

    def unit_names(self) -> list[list[str]]:
        """Modules gathered together, in forward order; tied, the embedding goes with the head."""
        blocks = [[f"layers.{layer}"] for layer in self.layers]
        if self.tie_embeddings:
            return [*blocks, ["tok_embeddings", "head"]]
        return [["tok_embeddings"], *blocks, ["head"]]

    @torch.no_grad()
    def init_rows(
        self, fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor, seed: int
    ) -> None:
        """Fill `out` in place with rows [start, start + len(out)) of `fqn`'s initial value.

        A function of (seed, fqn, row) alone, made a block of rows at a time.
        """
        normal = self._initial_distribution(fqn)
        if normal is None:
            out.fill_(1.0)
        else:
            fill_rows(fqn, full_shape, start, out, seed, normal)

    def init_buffers(self, device: torch.device | str) -> None:
        """Recompute the rotary table on `device`: one tensor for all blocks, in no state dict."""
        flavor = self.flavor
        table = rope_table(
            flavor.head_dim,
            self.max_seq_len,
            flavor.rope_theta,
            flavor.rope_scaling,
            torch.device(device),
        )
        for block in self.layers.values():
            assert isinstance(block, TransformerBlock)
            block.attention.register_buffer("rope", table, persistent=False)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter and buffer in place: for a model that is whole on one device."""
        for fqn, param in self.named_parameters():
            self.init_rows(fqn, tuple(param.shape), 0, param, seed)
        self.init_buffers(self.tok_embeddings.weight.device)

    @property
    def head_dim(self) -> int:
        """Rows of wq, wk and wv that make one head."""
        return self.flavor.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied embedding counted once."""
        return self._num_parameters

    def flops_per_token(self, seq_len: int) -> float:
        """Matrix FLOPs of forward and backward per token; recomputation is not counted.

        6 per parameter that multiplies (an embedding only looked up does not), and 12 * layers *
        dim * seq_len for attention's two products, not halved for causality: the convention of PaLM
        (arXiv:2204.02311, appendix B), so that MFU compares.
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.flavor.dim
        attention = 12 * self.flavor.n_layers * self.flavor.dim * seq_len
        return float(6 * (self.num_parameters - looked_up) + attention)

    def _initial_distribution(self, fqn: str) -> Normal | None:
        """None stands for ones.

        Projections into the residual stream shrink with depth, so that it grows evenly. The output
        matrix starts small: with logits near 0 the first loss is ln(vocab_size), and a tied
        embedding must not predict its own token.
        """
        kind = fqn.split(".")[-2] if fqn.endswith(".weight") else ""
        if kind.endswith("norm"):
            return None
        if kind == "tok_embeddings":
            return Normal(0.02) if self.tie_embeddings else Normal(1.0, cutoff=None)
        if kind == "output":
            return Normal(0.25 * self.flavor.dim**-0.5)
        if kind in ("wq", "wk", "wv", "w1"):
            return Normal(0.02)
        if kind in ("wo", "w2", "w3"):
            layer = int(fqn.split(".")[1])
            return Normal(0.02 / math.sqrt(2 * (layer + 1)))
        raise ValueError(f"{fqn} is not a parameter of this model")
