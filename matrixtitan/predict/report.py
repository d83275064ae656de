"""A plan in figures: balance, bytes by kind, traffic and times of all strategies and transports.

Owns the JSON of `tools/plan.py`. All of it follows from shapes, world size and the machine's rates:
nothing is run and nothing is measured. Next: the formulas, in `traffic.py`, `strategies.py`,
`memory.py`, `degrees.py` and `matrixtitan/plan/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matrixtitan.plan.cost import max_over_mean, rank_bytes, rank_flops, unit_shares
from matrixtitan.plan.planner import PlanSettings
from matrixtitan.plan.shard import ParamSpec, Plan
from matrixtitan.plan.transport_registry import (
    ALL_GATHER,
    TRANSPORTS,
    BusiestBytes,
    choose_transport,
)
from matrixtitan.predict.degrees import recommend
from matrixtitan.predict.memory import Precision, memory_table, peak
from matrixtitan.predict.strategies import (
    STRATEGY_VARIANTS,
    StrategyVariant,
    strategy_bytes,
    unit_sizes,
)
from matrixtitan.predict.traffic import Job, Machine, our_traffic, replica_bytes, seconds_of


def predictions(
    specs: Sequence[ParamSpec],
    plan: Plan,
    settings: PlanSettings,
    precision: Precision,
    job: Job,
    machine: Machine,
) -> dict[str, Any]:
    """All that `tools/plan.py --json` writes. `plan` is over one shard group of the job."""
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
        "matrix_optimizer": settings.rule.name,
        "ns_steps": getattr(settings.rule, "ns_steps", None),
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
            name: our_traffic(name, plan, precision, job, machine)._asdict() for name in TRANSPORTS
        },
        "strategies": {
            name: _strategy(name, specs, plan, precision, job, machine)
            for name in STRATEGY_VARIANTS
        },
        "memory": {
            name: {
                "terms": [term._asdict() for term in terms],
                "peak_bytes": peak(terms),
                "fits": peak(terms) <= machine.memory_bytes,
            }
            for name, terms in memory.items()
        },
        "degrees": recommend(specs, plan, settings, precision, job, machine).to_json(),
    }


def _units(plan: Plan, precision: Precision, machine: Machine) -> list[dict[str, Any]]:
    """Each unit's size, its shares, and the predicted time to unshard it by each transport.

    ALL_GATHER, FSDP2's even all-gather, stands beside them to compare with.
    """
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
                    transport: seconds_of(transport, shares, "unshard", machine)
                    for transport in (*TRANSPORTS, ALL_GATHER)
                },
            }
        )
    return rows


def _strategy(
    name: StrategyVariant,
    specs: Sequence[ParamSpec],
    plan: Plan,
    precision: Precision,
    job: Job,
    machine: Machine,
) -> dict[str, Any]:
    """By phase: bytes that a rank sends in a step, bytes of a host's link, and the time they take.

    A rank's bytes are logical bytes, the mean over ranks.
    """
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
    if name == "fsdp2_all_to_all" and across:
        # no ring: a host's link carries what each of its ranks sends to ranks of other hosts
        away = (ranks - machine.ranks_per_host) / (ranks - 1)
        optimizer_link = round(sent.optimizer * machine.ranks_per_host * away)
    figures = {
        "forward_backward": BusiestBytes(
            sent.forward_backward, sent.forward_backward if across else 0
        ),
        "optimizer": BusiestBytes(sent.optimizer, optimizer_link),
    }
    if job.replicas > 1 and name not in ("zero1_owner", "ddp"):
        replicas = replica_bytes(plan, precision, job, machine)
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
