"""`fully_shard(model)` alone on models of Hugging Face: they train as their plain copies do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.fsdp import fully_shard
from tests.lib.distributed import run_distributed
from tests.unit.test_fsdp_units import transformers_model

NAMES = (
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
)


def build(name: str) -> Any:
    torch.manual_seed(0)
    # eval: without dropout, which would differ between ranks
    return transformers_model(name).eval()


def train(model: Any, share: slice) -> list[float]:
    # not Adam, which would hide gradients of a wrong scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    tokens = torch.randint(3, 64, (4, 10), generator=torch.Generator().manual_seed(0))[share]
    for _ in range(3):
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = 4 // world_size
    for name in NAMES:
        plain = train(build(name), slice(None))
        model = build(name)
        sharded = fully_shard(model)
        mine = torch.tensor(train(model, slice(rank * rows, (rank + 1) * rows)))
        dist.all_reduce(mine)
        torch.testing.assert_close(mine / world_size, torch.tensor(plain), atol=1e-5, rtol=0)
        assert plain[-1] < plain[0]
        sharded.close()


def test_trains_like_its_unsharded_copy() -> None:
    run_distributed(compare, 2, timeout=150)
