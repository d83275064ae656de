"""What a step of ours sends on a machine that is described by its rates, and how long that takes.

Owns the descriptions of a job and a machine. The price of a single unshard or reduction stands with
its transport, in `plan/transports.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from matrixtitan.plan.cost import unit_shares
from matrixtitan.plan.shard import Plan
from matrixtitan.plan.transports import (
    BusiestBytes,
    Direction,
    transport_bytes,
    transport_seconds,
)
from matrixtitan.predict.memory import Precision


@dataclass(frozen=True)
class Machine:
    """Hosts of `ranks_per_host` ranks: one network link a host, one local link a rank.

    Rates are bytes per second one way, `message_seconds` a message's latency, `memory_bytes` what a
    rank has, `flops_rate` what it sustains in the optimizer, in FLOP/s.
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
    """How the model is trained on how many ranks; `gathered_once` names the units not regathered in
    backward, `transport` what `parallelism.transport` is."""

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
    """Bytes of the busiest rank and link in one step, replicas' all-reduce included, and the time that
    they take if nothing hides them."""

    rank_bytes_at_most: int
    link_bytes_at_most: int
    replica_rank_bytes: int
    seconds: float


def our_traffic(
    transport: str, plan: Plan, precision: Precision, job: Job, machine: Machine
) -> Traffic:
    """Forward and backward of one step: bytes of the busiest rank and link, and the time they take
    unhidden."""
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
    """(shares, direction, how often a step) of everything that a step unshards and reduces."""
    for name, shares in unit_shares(plan, precision.compute_bytes).items():
        gathers = 1 if name in job.gathered_once else 2
        yield shares, "unshard", gathers * job.microbatches
    for shares in unit_shares(plan, precision.reduce_bytes, gradients=True).values():
        yield shares, "reduce", job.microbatches


def replica_bytes(plan: Plan, precision: Precision, job: Job, machine: Machine) -> BusiestBytes:
    """All-reduce of owned gradients over replicas, 2 (R - 1) / R of them: fullest rank, busiest
    link.

    A host's link is shared by the rings of all its ranks.
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
