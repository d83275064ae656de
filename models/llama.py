"""Llama 3 in all its sizes: embedding, blocks, output unit.

Owns the flavors' shapes, the rule of initial values and the figures derived from shapes
(parameters, FLOPs). Never shards, casts or trains. Read `base.py` for the contract of each method,
`layers.py` for the block and `output_head.py` for the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models.base import HuggingFace, LanguageModel
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


# 1B is Llama 3.2's; 8B, 70B and 405B are Llama 3.1's. 32B has the proportions of the published
# models of that size. 150M is counted with a vocabulary of about 50k. debug is for a laptop's
# cores. tools/bench.py measures bench on one machine and netlab on emulated hosts.
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


class Llama(LanguageModel):
    """The decoder-only transformer of Llama 3 (arXiv:2407.21783)."""

    flavors = LLAMA3_FLAVORS
    published_vocab_size = 128256

    def __init__(
        self,
        flavor: LlamaFlavor,
        *,
        vocab_size: int,
        max_seq_len: int,
        tie_embeddings: bool | None = None,
    ) -> None:
        super().__init__(
            flavor, vocab_size=vocab_size, max_seq_len=max_seq_len, tie_embeddings=tie_embeddings
        )
        self.flavor = flavor
        self.head_dim = flavor.head_dim
        self.head_patterns = tuple(
            f"layers.*.attention.{name}.weight" for name in ("wq", "wk", "wv")
        )
        output = () if self.tie_embeddings else ("head.output.weight",)
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
            tied_to=self.tok_embeddings if self.tie_embeddings else None,
        )
        self.init_buffers(self.tok_embeddings.weight.device)
        self.num_parameters = sum(param.numel() for param in self.parameters())

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
        """Embedding, each block, head; a tied embedding is in the head's unit."""
        blocks = [[f"layers.{layer}"] for layer in self.layers]
        if self.tie_embeddings:
            return [*blocks, ["tok_embeddings", "head"]]
        return [["tok_embeddings"], *blocks, ["head"]]

    @torch.no_grad()
    def init_rows(
        self, fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor, seed: int
    ) -> None:
        normal = self._initial_distribution(fqn)
        if normal is None:
            out.fill_(1.0)
        else:
            fill_rows(fqn, full_shape, start, out, seed, normal)

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the rotary table on `device`: one tensor for all blocks, in no state dict."""
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

    def flops_per_token(self, seq_len: int) -> float:
        """6 per parameter that multiplies (an untied embedding is only looked up and does not
        count), and 12 * layers * dim * seq_len for attention's two products.

        Attention is not halved for causality: the convention of PaLM (arXiv:2204.02311, appendix
        B), so that MFU can be compared.
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.flavor.dim
        attention = 12 * self.flavor.n_layers * self.flavor.dim * seq_len
        return float(6 * (self.num_parameters - looked_up) + attention)

    @classmethod
    def flavor_from(cls, fields: Mapping[str, Any]) -> LlamaFlavor:
        scaling = fields["rope_scaling"]
        rope = None if scaling is None else RopeScaling(**scaling)
        return LlamaFlavor(**{**fields, "rope_scaling": rope})

    @classmethod
    def huggingface(cls) -> HuggingFace:
        from models import hf_llama  # here, since it imports this file

        return hf_llama

    def _initial_distribution(self, fqn: str) -> Normal | None:
        """Returns None for parameters that start at one (the norms).

        Projections into the residual stream shrink with depth, so that the stream grows evenly.
        The output matrix starts small: with logits near 0 the first loss is ln(vocab_size), and a
        tied embedding must not predict its own token.
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
