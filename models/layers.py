"""The transformer block of Llama 3: rotary positions, grouped-query attention, SwiGLU.

Owns the layers' arithmetic, as plain nn.Module with one matrix per parameter. Never draws initial
values (see `initialization.py`) and knows nothing of devices, sharding or losses. Read
`output_head.py` next, then `llama.py`.

Rotary layout: elements 2i and 2i + 1 of a head are rotated as a pair, as in Meta's own checkpoints.
Hugging Face pairs elements i and i + head_dim / 2 instead, so `hf_llama.py` permutes the rows of Q
and K in both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretch of the slow rotations, for contexts longer than in the first training.

    Wavelengths above `original_max_seq_len / low_freq_factor` tokens are stretched by `factor`.
    Wavelengths under `original_max_seq_len / high_freq_factor` are kept, and the wavelengths in
    between are interpolated (arXiv:2407.21783, section 3.4.2).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per token of each pair, (head_dim / 2,) float32 on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / theta**exponent  # (D/2,)
    if scaling is None:
        return frequencies
    # Rotations within the original context.
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rope_table(
    head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Cosines and sines of every position, (max_seq_len, 2, head_dim / 2) float32.

    Computed on the CPU and then moved, so that it is bitwise identical on every device.
    """
    if device.type == "meta":
        return torch.empty(max_seq_len, 2, head_dim // 2, dtype=torch.float32, device=device)
    positions = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rope_frequencies(head_dim, theta, scaling))
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs of x (B, T, H, D) by their positions' angles; table (T, 2, D/2) float32.

    Computed in float32, returned in x's dtype.
    """
    pairs = x.float().unflatten(-1, (-1, 2))  # (B, T, H, D/2, 2)
    even, odd = pairs.unbind(-1)
    cos, sin = table.unsqueeze(1).unbind(2)  # (T, 1, D/2)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention: `n_heads` query heads share `n_kv_heads` key and value heads.

    `rope` is a non-persistent buffer and not an argument of forward, because wrappers that cast a
    module's inputs to a compute dtype would round the angles. All blocks of a model share one
    tensor.
    """

    rope: Tensor  # (max_seq_len, 2, head_dim / 2) float32

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.grouped = n_kv_heads != n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        table = self.rope[: x.shape[1]]
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # (B, T, KV, D)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        q, k = apply_rope(q, table), apply_rope(k, table)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.grouped,
        )  # (B, H, T, D)
        return self.wo(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward, each added to the residual stream.

    A block does not know its index: torch.compile would otherwise make a graph for each block
    instead of one for all.
    """

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, ffn_hidden_dim: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.feed_forward = FeedForward(dim, ffn_hidden_dim)
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))
