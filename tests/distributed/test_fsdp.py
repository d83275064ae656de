"""A sharded model trains as a plain copy of itself: the same losses and weights at 1 to 4 ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from matrixtitan.fsdp import MatrixFSDP, fully_shard
from matrixtitan.fsdp.api import make_transport
from matrixtitan.plan.transport_registry import TRANSPORTS
from tests.lib.distributed import run_distributed
from tests.lib.toy import Toy, batch, gathered_nbytes, make_toy, share, toy_units

STEPS = 3
ROWS = 24


def train_plain(
    model: nn.Module, steps: int = STEPS, lr: float = 0.05, momentum: float = 0.9
) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses = []
    for step in range(steps):
        tokens, labels = batch(step, ROWS)
        loss = model(tokens, labels) / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def collect(sharded: MatrixFSDP) -> dict[str, Tensor]:
    """Full weights put together from all ranks' rows."""
    mine = {
        local.fqn: (local.start, local.tensor.detach().clone())
        for local in sharded.local_parameters()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    rows: dict[str, dict[int, Tensor]] = {}
    for part in everyone:
        for fqn, (start, tensor) in part.items():
            rows.setdefault(fqn, {})[start] = tensor
    return {
        fqn: torch.cat([parts[start] for start in sorted(parts)]) for fqn, parts in rows.items()
    }


def sgd(model: nn.Module, lr: float = 0.05, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def train_sharded(
    model: nn.Module,
    sharded: MatrixFSDP,
    steps: int = STEPS,
    microbatches: int = 1,
    reduce_each: bool = True,
) -> list[float]:
    optimizer = sgd(model)
    losses = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        tokens, labels = (share(t, rank, world) for t in batch(step, ROWS))
        total = torch.zeros(())
        for index, (tok, lab) in enumerate(
            zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True)
        ):
            sharded.set_reduce_gradients(reduce_each or index == microbatches - 1)
            loss = model(tok, lab) / (ROWS * tokens.shape[1])
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def toy_case(options: dict[str, Any]) -> None:
    """Train the toy sharded and plain; compare losses and weights, and find no gathered weights."""
    tied = options.get("tied", False)
    plain_losses, plain_weights = train_plain(make_toy(tied=tied))
    if options.get("meta"):
        with torch.device("meta"):
            model: Toy = make_toy(tied=tied)
    else:
        model = make_toy(tied=tied)
    mesh = None
    if "replicas" in options:
        mesh = dist.init_device_mesh(
            "cpu",
            (options["replicas"], dist.get_world_size() // options["replicas"]),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
    sharded = fully_shard(
        model,
        units=toy_units(tied=tied),
        mesh=mesh,
        tail_patterns=() if tied else ("head.weight",),
        reshard_after_forward=options.get("reshard", "default"),
        prefetch=options.get("prefetch", 1),
        transport=options.get("transport", "grouped"),
        gradient_reduction="sum",
    )
    if options.get("meta"):
        source = dict(make_toy(tied=tied).named_parameters())
        sharded.materialize(
            lambda fqn, shape, start, out: out.copy_(source[fqn].detach()[start : start + len(out)])
        )
    losses = train_sharded(
        model,
        sharded,
        microbatches=options.get("microbatches", 1),
        reduce_each=options.get("reduce_each", True),
    )
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses), atol=5e-6, rtol=0)
    if mesh is None:
        for fqn, weight in collect(sharded).items():
            torch.testing.assert_close(weight, plain_weights[fqn], atol=1e-5, rtol=0, msg=fqn)
    assert gathered_nbytes(sharded) == 0
    assert all(param is not None for param in model.parameters())
    sharded.close()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "meta": {"meta": True},
    "star": {"transport": "star"},
    "ring": {"transport": "ring"},
    "ring, deep": {"transport": "ring", "prefetch": 3},
    "ring, never": {"transport": "ring", "reshard": "never"},
    "ring, always, tied": {"transport": "ring", "reshard": "always", "tied": True},
    "ring, accumulate unreduced": {"transport": "ring", "microbatches": 2, "reduce_each": False},
    "always": {"reshard": "always"},
    "never": {"reshard": "never"},
    "no prefetch": {"prefetch": 0},
    "deep prefetch": {"prefetch": 3},
    "tied": {"tied": True},
    "tied, always": {"tied": True, "reshard": "always"},
    "accumulate": {"microbatches": 2},
    "accumulate unreduced": {"microbatches": 2, "reduce_each": False},
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_plain_training_at_every_world_size(world_size: int) -> None:
    run_distributed(toy_case, world_size, {})


@pytest.mark.parametrize("case", CASES)
def test_matches_plain_training(case: str) -> None:
    """At 3 ranks, where uneven things break."""
    run_distributed(toy_case, 3, CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_matches_plain_training_with_replicas(case: str) -> None:
    run_distributed(toy_case, 4, {**CASES[case], "replicas": 2})


def losses_of_a_run(transport: str, prefetch: int) -> list[float]:
    model = make_toy()
    sharded = fully_shard(
        model,
        units=toy_units(),
        tail_patterns=("head.weight",),
        transport=transport,
        prefetch=prefetch,
        gradient_reduction="sum",
    )
    losses = train_sharded(model, sharded)
    sharded.close()
    return losses


@pytest.mark.parametrize(
    ("transport", "prefetch"), [*((name, 1) for name in sorted(TRANSPORTS)), ("ring", 3)]
)
def test_two_runs_have_the_same_bits(transport: str, prefetch: int) -> None:
    assert run_distributed(losses_of_a_run, 3, transport, prefetch) == run_distributed(
        losses_of_a_run, 3, transport, prefetch
    )


def transport_of_unequal_machines(names: list[str]) -> list[str]:
    """Three ranks on one machine, one on another. The shard group of ranks 2 and 3 spans both."""
    rank = dist.get_rank()
    os.environ["LOCAL_WORLD_SIZE"] = ["3", "3", "3", "1"][rank]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    chosen = []
    for name in names:
        transport = make_transport(name, mesh.get_group("shard"), torch.device("cpu"))
        chosen.append(transport.name)
        transport.close()
    return chosen


def test_ranks_of_unequal_machines_choose_the_same_transport() -> None:
    """They have different counts of ranks on their own machine."""
    chosen = run_distributed(transport_of_unequal_machines, 4, ["auto", "grouped"])
    assert chosen[2] == chosen[3] == ["ring", "grouped"]
