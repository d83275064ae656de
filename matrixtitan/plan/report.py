"""A plan put into figures: balance, bytes by kind, traffic and times of every strategy and
transport.

Owns the JSON of `tools/plan.py`. All of it follows from shapes, world size and the machine's rates:
nothing is run and nothing measured. Formulas are in `cost.py` and `memory.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from matrixtitan.plan.cost import (
    STRATEGIES,
    CostSettings,
    Direction,
    LinkBytes,
    Strategy,
    Transport,
    choose_transport,
    max_over_mean,
    rank_bytes,
    rank_flops,
    strategy_bytes,
    transport_bytes,
    transport_seconds,
    unit_shares,
    unit_sizes,
)
from matrixtitan.plan.memory import Precision, memory_table, peak
from matrixtitan.plan.shard import ParamSpec, Plan

TRANSPORTS: tuple[Transport, ...] = ("grouped", "ring", "star")


@dataclass(frozen=True)
class Machine:
    """Hosts of `ranks_per_host` ranks: one network link a host, one local link a rank.

    Rates are bytes per second one way, `message_seconds` a message's latency, `memory_bytes` what a
    rank has.
    """

    ranks_per_host: int = 8
    link_rate: float = 25e9
    local_rate: float = inf
    message_seconds: float = 0.0
    backend: str = "nccl"
    memory_bytes: float = 80e9


@dataclass(frozen=True)
class Job:
    """How the model is trained on how many ranks; `gathered_once` names the units not regathered in
    backward."""

    world_size: int
    replicas: int = 1
    gathered_once: Collection[str] = ()
    keep_all: bool = False
    prefetch: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.replicas) < 1 or self.world_size % self.replicas:
            raise ValueError(
                f"{self.replicas} replicas do not divide a world size of {self.world_size}: "
                "each replica is a shard group of world size / replicas ranks"
            )

    @property
    def shard_ranks(self) -> int:
        return self.world_size // self.replicas


def report(
    specs: Sequence[ParamSpec],
    plan: Plan,
    settings: CostSettings,
    precision: Precision,
    job: Job,
    machine: Machine,
) -> dict[str, Any]:
    """Everything that `tools/plan.py --json` writes; `plan` is over one shard group of the job."""
    resident, flops = rank_bytes(plan, settings), rank_flops(plan, settings)
    memory = memory_table(
        specs,
        plan,
        settings,
        precision,
        world_size=job.world_size,
        backend=machine.backend,
        prefetch=job.prefetch,
        keep_all=job.keep_all,
    )
    return {
        "world_size": job.world_size,
        "replicas": job.replicas,
        "shard_ranks": job.shard_ranks,
        "ranks_per_host": machine.ranks_per_host,
        "backend": machine.backend,
        "link_gbit": machine.link_rate * 8 / 1e9,
        "matrix_optimizer": settings.matrix_optimizer,
        "ns_steps": settings.ns_steps,
        "digest": plan.digest,
        "balance": {
            "resident_bytes": max_over_mean([part.total for part in resident]),
            "optimizer_flops": max_over_mean(flops),
        },
        "ranks": [
            {"rank": rank, **part._asdict(), "total": part.total, "optimizer_flops": flops[rank]}
            for rank, part in enumerate(resident)
        ],
        "owners": plan.to_json()["shards"],
        "units": _units(plan, precision, machine),
        "transports": {
            name: _our_traffic(name, plan, precision, job, machine) for name in TRANSPORTS
        },
        "strategies": {
            name: _strategy(name, specs, plan, precision, job, machine) for name in STRATEGIES
        },
        "memory": {
            name: {
                "terms": [term._asdict() for term in terms],
                "peak_bytes": peak(terms),
                "fits": peak(terms) <= machine.memory_bytes,
            }
            for name, terms in memory.items()
        },
    }


def _units(plan: Plan, precision: Precision, machine: Machine) -> list[dict[str, Any]]:
    """Each unit's size, shares and predicted unshards, beside an even all-gather."""
    rows = []
    for name, shares in unit_shares(plan, precision.compute_bytes).items():
        rows.append(
            {
                "name": name,
                "bytes": sum(shares),
                "min_share": min(shares),
                "max_share": max(shares),
                "owners": sum(1 for share in shares if share),
                "auto": choose_transport(len(shares), machine.backend, machine.ranks_per_host),
                "unshard_seconds": {
                    transport: _seconds(transport, shares, "unshard", machine)
                    for transport in (*TRANSPORTS, "all_gather")
                },
            }
        )
    return rows


def _our_traffic(
    transport: Transport, plan: Plan, precision: Precision, job: Job, machine: Machine
) -> dict[str, Any]:
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
        seconds += times * _seconds(transport, shares, direction, machine)
    replicas = _replica_bytes(plan, precision, job, machine)
    seconds += max(replicas.link / machine.link_rate, replicas.rank / machine.local_rate)
    return {
        "rank_bytes_at_most": rank + replicas.rank,
        "link_bytes_at_most": link + replicas.link,
        "replica_rank_bytes": replicas.rank,
        "seconds": seconds,
    }


def _messages(
    plan: Plan, precision: Precision, job: Job
) -> Iterator[tuple[list[int], Direction, int]]:
    """(shares, direction, how often a step) of everything that a step unshards and reduces."""
    for name, shares in unit_shares(plan, precision.compute_bytes).items():
        gathers = 1 if name in job.gathered_once else 2
        yield shares, "unshard", gathers * job.microbatches
    for shares in unit_shares(plan, precision.reduce_bytes, gradients=True).values():
        yield shares, "reduce", job.microbatches


def _replica_bytes(plan: Plan, precision: Precision, job: Job, machine: Machine) -> LinkBytes:
    """All-reduce of owned gradients over replicas, 2 (R - 1) / R of them: fullest rank, busiest
    link.

    A host's link is shared by the rings of all its ranks.
    """
    gradients = unit_shares(plan, precision.reduce_bytes, gradients=True).values()
    owned = max((sum(ranks) for ranks in zip(*gradients, strict=True)), default=0)
    sent = 2 * (job.replicas - 1) * owned // job.replicas
    several = job.world_size > machine.ranks_per_host
    rings = min(job.shard_ranks, machine.ranks_per_host)
    return LinkBytes(sent, sent * rings if several else 0)


def _strategy(
    name: Strategy,
    specs: Sequence[ParamSpec],
    plan: Plan,
    precision: Precision,
    job: Job,
    machine: Machine,
) -> dict[str, Any]:
    """Logical bytes that a rank sends in a step (the mean), bytes of a link, and the time of both
    phases."""
    ranks = job.world_size if name in ("zero1_owner", "ddp") else job.shard_ranks
    padding = ranks if name.startswith("fsdp2") else 1
    sent = strategy_bytes(
        name,
        unit_sizes(specs, job.gathered_once, padding),
        ranks,
        param_bytes=precision.compute_bytes,
        grad_bytes=precision.reduce_bytes,
        update_bytes=precision.update_bytes,
        stored_bytes=precision.bytes_of(precision.stored),
        microbatches=job.microbatches,
    )
    across = ranks > machine.ranks_per_host
    optimizer_link = sent.optimizer if across else 0
    if (
        name == "fsdp2_all_to_all" and across
    ):  # no ring: what leaves a host is what all its ranks send
        away = (ranks - machine.ranks_per_host) / (ranks - 1)
        optimizer_link = round(sent.optimizer * machine.ranks_per_host * away)
    figures = {
        "forward_backward": LinkBytes(
            sent.forward_backward, sent.forward_backward if across else 0
        ),
        "optimizer": LinkBytes(sent.optimizer, optimizer_link),
    }
    if job.replicas > 1 and name not in ("zero1_owner", "ddp"):
        replicas = _replica_bytes(plan, precision, job, machine)
        figures["replicas"] = replicas
    return {
        phase: {
            "rank_bytes": bytes_sent.rank,
            "link_bytes": bytes_sent.link,
            "seconds": max(
                bytes_sent.link / machine.link_rate, bytes_sent.rank / machine.local_rate
            ),
        }
        for phase, bytes_sent in figures.items()
    }


def _seconds(
    transport: Transport, shares: Sequence[int], direction: Direction, machine: Machine
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
