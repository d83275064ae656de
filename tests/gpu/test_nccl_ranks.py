"""Several NCCL ranks, all on one GPU: transports, streams, strategies and layouts against the CPU.

NCCL_HOSTID makes NCCL take two ranks for two hosts, which it connects by sockets. This is slow, but
its collectives, streams and coalescing are the ones of a cluster.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from matrixtitan.fsdp import MixedPrecisionPolicy, fully_shard
from matrixtitan.fsdp.streams import Channel
from tests.distributed.test_transports import SIZES, move
from tests.lib.distributed import run_distributed
from tests.lib.strategies import STRATEGIES, Run, make_config
from tests.lib.toy import batch, gathered_nbytes, make_toy, share, toy_units

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TIMEOUT = 120
STEPS = 8
SLEEP_CYCLES = 40_000_000  # about 20 ms


def run_nccl(fn, world_size, *args):  # type: ignore[no-untyped-def]
    return run_distributed(fn, world_size, *args, timeout=TIMEOUT, on_gpu=True)


# --- transports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["grouped", "star"])
def test_moves_every_piece(name: str, sizes: str, dtype: torch.dtype) -> None:
    run_nccl(move, 3, name, [SIZES[sizes]] * 3, dtype, "cuda")


# --- losses ---------------------------------------------------------------------------------------


def strategy_losses(strategy: str, replicate: int, device: str) -> list[float]:
    run = Run(make_config(strategy, ns_dtype="float32"), replicate=replicate, device=device)
    losses, _ = run.train(STEPS, microbatches=2)
    run.close()
    return losses


@pytest.fixture(scope="module")
def cpu_losses() -> list[float]:
    return run_distributed(strategy_losses, 1, "ddp", 1, "cpu")[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_agree_with_the_cpu(strategy: str, cpu_losses: list[float]) -> None:
    if strategy == "fsdp2_all_to_all_stock":
        pytest.skip("tuned transports are for gloo: on NCCL it is the same as without the suffix")
    for losses in run_nccl(strategy_losses, 2, strategy, 1, "cuda"):
        assert losses == pytest.approx(cpu_losses, abs=5e-5, rel=0)


@pytest.mark.parametrize(("world_size", "replicate"), [(3, 1), (4, 2)])
def test_layouts_agree_with_the_cpu(
    world_size: int, replicate: int, cpu_losses: list[float]
) -> None:
    for losses in run_nccl(strategy_losses, world_size, "matrix_fsdp", replicate, "cuda"):
        assert losses == pytest.approx(cpu_losses, abs=5e-5, rel=0)


# --- streams --------------------------------------------------------------------------------------


def toy_losses(
    delayed: str, transport: str, compiled: bool, dtype: torch.dtype | None, prefetch: int
) -> Tensor:
    """Losses of a sharded toy; with `delayed` one side of every exchange is held up on the GPU."""
    model = make_toy(dim=64).cuda()
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
    if delayed == "communication":
        submit = Channel.submit

        def late(self, issue, what):  # type: ignore[no-untyped-def]
            def slow():  # type: ignore[no-untyped-def]
                torch.cuda._sleep(SLEEP_CYCLES)
                return issue()

            return submit(self, slow, what)

        Channel.submit = late  # type: ignore[method-assign]
    if delayed == "compute":
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(SLEEP_CYCLES))
            block.register_full_backward_hook(lambda *_: torch.cuda._sleep(SLEEP_CYCLES))
    sharded = fully_shard(
        model,
        units=toy_units(),
        tail_patterns=("head.weight",),
        transport=transport,
        prefetch=prefetch,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        gradient_reduction="sum",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for step in range(STEPS):
        tokens, labels = batch(step)
        mine = [share(t, dist.get_rank(), dist.get_world_size()).cuda() for t in (tokens, labels)]
        loss = model(*mine) / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float()
        dist.all_reduce(total)
        values.append(total.cpu())
    assert gathered_nbytes(sharded) == 0
    sharded.close()
    return torch.stack(values)


@pytest.fixture(scope="module")
def plain_losses() -> Tensor:
    model = make_toy(dim=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for step in range(STEPS):
        tokens, labels = batch(step)
        loss = model(tokens, labels) / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach())
    return torch.stack(values)


@pytest.mark.parametrize("delayed", ["nothing", "communication", "compute"])
@pytest.mark.parametrize("transport", ["grouped", "star"])
def test_whoever_is_late_is_waited_for(transport: str, delayed: str, plain_losses: Tensor) -> None:
    for losses in run_nccl(toy_losses, 2, delayed, transport, False, None, 1):
        torch.testing.assert_close(losses, plain_losses, atol=1e-4, rtol=0)


def test_compiled_blocks_in_bfloat16_with_deep_prefetch(plain_losses: Tensor) -> None:
    for losses in run_nccl(toy_losses, 2, "nothing", "auto", True, torch.bfloat16, 2):
        torch.testing.assert_close(losses, plain_losses, atol=5e-2, rtol=0)


def traced_streams(folder: str) -> tuple[list[int], list[int]]:
    """Streams of NCCL's kernels and of the matrix products, from a profile of two steps."""
    model = make_toy(dim=512).cuda()
    fully_shard(model, units=toy_units(), tail_patterns=("head.weight",))
    tokens, labels = (
        share(t, dist.get_rank(), dist.get_world_size()).cuda() for t in batch(0, length=64)
    )
    model(tokens, labels).backward()  # connects
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(2):
            model(tokens, labels).backward()
        torch.cuda.synchronize()
    path = Path(folder) / f"trace{dist.get_rank()}.json"
    trace.export_chrome_trace(str(path))
    kernels = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    communication = {e["args"]["stream"] for e in kernels if "nccl" in e["name"].lower()}
    compute = {e["args"]["stream"] for e in kernels if "gemm" in e["name"].lower()}
    return sorted(communication), sorted(compute)


def test_communication_and_compute_have_streams_of_their_own(tmp_path: Path) -> None:
    for communication, compute in run_nccl(traced_streams, 2, str(tmp_path)):
        assert communication
        assert compute
        assert not set(communication) & set(compute)
