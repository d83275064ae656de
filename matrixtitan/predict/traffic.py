"""What a step of matrix_fsdp sends on a machine described by its rates, and how long that takes.

Owns the descriptions of a job and a machine, and the sum over a step. The price of one unshard or
reduction stands with its transport. Next: `plan/transport_registry.py`, which has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from matrixtitan.plan.cost import unit_shares
from matrixtitan.plan.shard import Plan
from matrixtitan.plan.transport_registry import (
    BusiestBytes,
    Direction,
    transport_bytes,
    transport_seconds,
)
from matrixtitan.predict.memory import Precision


@dataclass(frozen=True)
class Machine:
    """Hosts of `ranks_per_host` ranks, with one network link per host and one local link per rank.

    `link_rate` (of the network link) and `local_rate` are in bytes per second, one way.
    `message_seconds` is the latency of a message. `memory_bytes` is the memory of a rank, and
    `flops_rate` the FLOP/s that a rank sustains in the optimizer.
    """

    ranks_per_host: int = 8
    link_rate: float = 25e9
    local_rate: float = inf
    message_seconds: float = 0.0
    backend: str = "nccl"
    memory_bytes: float = 80e9
    flops_rate: float = 150e12


@dataclass(frozen=True)
class Job:
    """How the model is trained, and on how many ranks.

    `gathered_once` names the units that are not gathered again in backward. `keep_all`: no unit is
    freed between forward and backward. `prefetch`: units gathered ahead. `transport` is
    `parallelism.transport`.
    """

    world_size: int
    replicas: int = 1
    gathered_once: Collection[str] = ()
    keep_all: bool = False
    prefetch: int = 1
    microbatches: int = 1
    transport: str = "auto"

    def __post_init__(self) -> None:
        if min(self.world_size, self.replicas) < 1 or self.world_size % self.replicas:
            raise ValueError(
                f"{self.replicas} replicas do not divide a world size of {self.world_size}: "
                "each replica is a shard group of world size / replicas ranks"
            )

    @property
    def shard_ranks(self) -> int:
        return self.world_size // self.replicas


class Traffic(NamedTuple):
    """Bytes of the busiest rank and link in one step, and the time that they take with no overlap.

    The all-reduce over replicas is included; `replica_rank_bytes` is its part of a rank's bytes.
    """

    rank_bytes_at_most: int
    link_bytes_at_most: int
    replica_rank_bytes: int
    seconds: float


def our_traffic(
    transport: str, plan: Plan, precision: Precision, job: Job, machine: Machine
) -> Traffic:
    """The traffic of one step's forward and backward by the transport of that name.

    The busiest rank and link may differ from message to message, so the sums of bytes are upper
    limits.
    """
    rank = link = 0
    seconds = 0.0
    for shares, direction, times in _messages(plan, precision, job):
        sent = transport_bytes(
            transport,
            shares,
            machine.ranks_per_host,
            direction=direction,
            backend=machine.backend,
        )
        rank, link = rank + times * sent.rank, link + times * sent.link
        seconds += times * seconds_of(transport, shares, direction, machine)
    replicas = replica_bytes(plan, precision, job, machine)
    seconds += max(replicas.link / machine.link_rate, replicas.rank / machine.local_rate)
    return Traffic(rank + replicas.rank, link + replicas.link, replicas.rank, seconds)


def _messages(
    plan: Plan, precision: Precision, job: Job
) -> Iterator[tuple[list[int], Direction, int]]:
    """(shares, direction, times a step) of each unshard and each reduction of a step."""
    for name, shares in unit_shares(plan, precision.compute_bytes).items():
        gathers = 1 if name in job.gathered_once else 2
        yield shares, "unshard", gathers * job.microbatches
    for shares in unit_shares(plan, precision.reduce_bytes, gradients=True).values():
        yield shares, "reduce", job.microbatches


def replica_bytes(plan: Plan, precision: Precision, job: Job, machine: Machine) -> BusiestBytes:
    """Bytes of the all-reduce of owned gradients over R replicas: 2 (R - 1) / R of a rank's own.

    The rank is the one that owns most. A host's link is shared by the rings of all its ranks.
    """
    gradients = unit_shares(plan, precision.reduce_bytes, gradients=True).values()
    owned = max((sum(ranks) for ranks in zip(*gradients, strict=True)), default=0)
    sent = 2 * (job.replicas - 1) * owned // job.replicas
    several = job.world_size > machine.ranks_per_host
    rings = min(job.shard_ranks, machine.ranks_per_host)
    return BusiestBytes(sent, sent * rings if several else 0)


def seconds_of(
    transport: str, shares: Sequence[int], direction: Direction, machine: Machine
) -> float:
    """Predicted seconds of one unshard or reduction on `machine`."""
    return transport_seconds(
        transport,
        shares,
        machine.link_rate,
        direction=direction,
        backend=machine.backend,
        ranks_per_host=machine.ranks_per_host,
        local_bytes_per_second=machine.local_rate,
        message_seconds=machine.message_seconds,
    )
