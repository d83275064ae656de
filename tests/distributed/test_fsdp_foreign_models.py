"""`fully_shard` on modules that we did not write: they train as their unsharded copies do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrixtitan.fsdp import fully_shard
from tests.lib.distributed import run_distributed

STEPS = 4


def hugging_face_llama(checkpointing: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


LLAMA_UNITS = [
    ["model.embed_tokens"],
    *[[f"model.layers.{i}"] for i in range(3)],
    ["model.norm", "lm_head"],
]


def llama_loss(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def transformer_encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(32), enable_nested_tensor=False)


ENCODER_UNITS = [[f"layers.{i}"] for i in range(3)]


def encoder_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    x = torch.sin(tokens.unsqueeze(-1) * torch.arange(1, 33))
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
    return (model(x, mask=mask, is_causal=True) * torch.cos(x)).mean()


def train(model: nn.Module, loss_of: Callable[[Any, Tensor], Tensor], share: slice) -> list[float]:
    # not Adam, which would hide gradients of a wrong scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    tokens = torch.randint(0, 64, (12, 10), generator=torch.Generator().manual_seed(0))[share]
    for _ in range(STEPS):
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(name: str, replicas: int) -> None:
    build, units, loss_of, tails = CASES[name]
    plain = train(build(), loss_of, slice(None))
    model = build()
    mesh = dist.init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )
    fully_shard(model, units=units, mesh=mesh, tail_patterns=tails, gradient_reduction="mean")
    rank, rows = dist.get_rank(), 12 // dist.get_world_size()
    mine = torch.tensor(train(model, loss_of, slice(rank * rows, (rank + 1) * rows)))
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / dist.get_world_size(), torch.tensor(plain), atol=1e-5, rtol=0)
    assert plain[-1] < plain[0]


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    units: list[list[str]]
    loss: Callable[[Any, Tensor], Tensor]
    tail_patterns: tuple[str, ...]


def plain_llama() -> nn.Module:
    return hugging_face_llama(checkpointing=False)


def checkpointed_llama() -> nn.Module:
    return hugging_face_llama(checkpointing=True)


CASES = {
    "Hugging Face Llama": Case(plain_llama, LLAMA_UNITS, llama_loss, ("lm_head.weight",)),
    "the same, checkpointed": Case(
        checkpointed_llama, LLAMA_UNITS, llama_loss, ("lm_head.weight",)
    ),
    "nn.TransformerEncoder": Case(transformer_encoder, ENCODER_UNITS, encoder_loss, ()),
}


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("name", CASES)
def test_trains_like_its_unsharded_copy(name: str, world_size: int, replicas: int) -> None:
    run_distributed(compare, world_size, name, replicas, timeout=150)
