"""The CUDA path of the runtime: streams, NCCL, bfloat16. One process per GPU; skipped without."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from matrixtitan.fsdp import MixedPrecisionPolicy, fully_shard
from matrixtitan.plan.transport_registry import REDUCTIONS_IN_FLIGHT
from tests.lib.toy import batch, gathered_nbytes, make_toy, toy_units

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def nccl() -> Iterator[None]:
    """A process group of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl",
            init_method=f"file://{os.path.join(folder, 'store')}",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", 0),
        )
        yield
        dist.destroy_process_group()


def losses(
    device: str, shard: bool, compile_blocks: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    model = make_toy().to(device)
    if compile_blocks:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
    if shard:
        fully_shard(
            model,
            units=toy_units(),
            tail_patterns=("head.weight",),
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for step in range(8):
        tokens, labels = (tensor.to(device) for tensor in batch(step))
        loss = model(tokens, labels) / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach().float().cpu())
    return torch.stack(values)


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_one_gpu_matches_the_cpu(nccl: None, compile_blocks: bool) -> None:
    torch.testing.assert_close(
        losses("cuda", shard=True, compile_blocks=compile_blocks),
        losses("cpu", shard=False),
        atol=1e-3,
        rtol=0,
    )


def test_bfloat16_is_near_float32(nccl: None) -> None:
    torch.testing.assert_close(
        losses("cuda", shard=True, dtype=torch.bfloat16),
        losses("cpu", shard=False),
        atol=5e-2,
        rtol=0,
    )


def test_transient_memory_is_freed(nccl: None) -> None:
    model = make_toy(dim=512).to("cuda")
    sharded = fully_shard(
        model, units=toy_units(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    assert sharded._schedule.max_reductions == REDUCTIONS_IN_FLIGHT["nccl"]
    tokens, labels = (tensor.cuda() for tensor in batch(0))
    model(tokens, labels).backward()
    assert gathered_nbytes(sharded) == 0
