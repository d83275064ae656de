"""How many ranks should share one copy of the weights: shard and replica degrees, by formula.

Once ranks outnumber matrices, more shards do not shorten the optimizer step: the fullest rank holds
one matrix as before, and the others hold none. Replicas of smaller shard groups (HSDP) are then an
alternative, at the price of one all-reduce of owned gradients. Owns the candidates, the choice
between them and the trainer's warning. All of it is a pure function of shapes, world size, settings
and the machine's rates.
Next: `traffic.py` and `memory.py`, which price a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from matrixtitan.plan.cost import block_cost, max_over_mean, rank_bytes, rank_flops
from matrixtitan.plan.planner import PlanSettings, make_plan
from matrixtitan.plan.shard import ParamSpec, Plan
from matrixtitan.plan.transport_registry import choose_transport
from matrixtitan.predict.memory import Precision, memory_table, peak
from matrixtitan.predict.traffic import Job, Machine, our_traffic

UNEVEN = 1.5
"""A fullest rank above this many times the mean is worth a warning."""

CLOSE = 1.02
"""Figures within this factor count as equal, since the formulas are not more exact."""


class Balance(NamedTuple):
    """How evenly one plan fills the ranks of a job.

    `fullest_bytes`: resident bytes of the fullest rank. `max_over_mean`: the same over the mean of
    all ranks. `idle_ranks`: ranks of the job that own no matrix.
    """

    shards: int
    replicas: int
    fullest_bytes: int
    max_over_mean: float
    idle_ranks: int

    @property
    def is_even(self) -> bool:
        return not self.idle_ranks and self.max_over_mean <= UNEVEN


class Candidate(NamedTuple):
    """One pair of degrees and its price.

    `step_seconds` is the part of a step that depends on the degrees: traffic, with no overlap, and
    the busiest rank's optimizer. The computation of forward and backward takes the same time at all
    degrees.
    """

    balance: Balance
    peak_bytes: int
    fits: bool
    link_bytes: int
    traffic_seconds: float
    optimizer_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.traffic_seconds + self.optimizer_seconds

    def to_json(self) -> dict[str, Any]:
        figures = {**self.balance._asdict(), **self._asdict(), "step_seconds": self.step_seconds}
        del figures["balance"]
        return figures


class Recommendation(NamedTuple):
    """All candidates and the three to choose from."""

    candidates: list[Candidate]
    """Most shards first."""
    skipped: list[int]
    """Shard degrees whose mean resident bytes alone exceed a rank's memory."""
    refused: dict[int, str]
    """Shard degree -> why the planner has no plan for it."""
    least_memory: Candidate
    fastest: Candidate | None
    """None where no candidate fits in memory."""
    even: Candidate | None
    """The most shards that fit in memory and leave no rank idle or far above the mean. None: no
    candidate does."""

    def to_json(self) -> dict[str, Any]:
        """Candidates are named by their shard degree."""
        chosen = {"least_memory": self.least_memory, "fastest": self.fastest, "even": self.even}
        return {
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "skipped": self.skipped,
            "refused": {str(degree): reason for degree, reason in self.refused.items()},
            **{key: picked and picked.balance.shards for key, picked in chosen.items()},
        }


def shard_degrees(world_size: int, ranks_per_host: int) -> list[int]:
    """Divisors of the world size, largest first, whose groups fill whole hosts or divide one host.

    Other groups would straddle the borders of hosts.
    """
    return [
        degree
        for degree in range(world_size, 0, -1)
        if world_size % degree == 0
        and (degree == world_size or not degree % ranks_per_host or not ranks_per_host % degree)
    ]


def balance_of(plan: Plan, settings: PlanSettings, world_size: int) -> Balance:
    """The Balance of a job of `world_size` ranks, whose shard groups all follow `plan`."""
    held = [part.total for part in rank_bytes(plan, settings)]
    matrices = [shard for shard in plan.shards if shard.role == "matrix"]
    owners = {segment.rank for shard in matrices for segment in shard.segments}
    replicas = world_size // plan.world_size
    idle = (plan.world_size - len(owners)) * replicas if matrices else 0
    return Balance(plan.world_size, replicas, max(held), max_over_mean(held), idle)


def uneven_warning(
    specs: Sequence[ParamSpec],
    plan: Plan,
    settings: PlanSettings,
    world_size: int,
    ranks_per_host: int,
) -> str | None:
    """The warning about a plan that leaves ranks idle or uneven, with the degrees to use instead.

    None where the plan is even. It compares balance alone, which takes under a second.
    """
    now = balance_of(plan, settings, world_size)
    if now.is_even:
        return None
    even = _most_even_shards(specs, now, settings, world_size, ranks_per_host)
    problem = (
        f"{now.idle_ranks} of {world_size} ranks own no matrix, and the fullest rank holds "
        f"{now.max_over_mean:.1f} times the mean ({_size(now.fullest_bytes)} resident)"
    )
    if even is None:
        return f"{problem}. No smaller shard degree levels it; use fewer ranks or a larger model"
    return (
        f"{problem}. With {degree_flags(even.shards, even.replicas)} all ranks own matrices, and "
        f"the fullest holds {_size(even.fullest_bytes)}; tools/plan.py compares the degrees' "
        "memory and steps"
    )


def _size(amount: int) -> str:
    """Bytes in GB, or in MB where two decimals of GB say little."""
    return f"{amount / 1e9:.2f} GB" if amount >= 1e8 else f"{amount / 1e6:.2f} MB"


def _most_even_shards(
    specs: Sequence[ParamSpec],
    now: Balance,
    settings: PlanSettings,
    world_size: int,
    ranks_per_host: int,
) -> Balance | None:
    """The largest degree below the present one at which no rank is idle or far above the mean."""
    blocks = sum(spec.shape[0] // spec.block_rows for spec in specs if spec.role == "matrix")
    # these plans are made without spreading units, so an egress cap cannot be judged by them
    loose = replace(settings, egress_cap=0.0)
    for degree in shard_degrees(world_size, ranks_per_host):
        if degree < now.shards and degree <= blocks:
            plan = make_plan(specs, degree, loose, spread_units=False)
            found = balance_of(plan, settings, world_size)
            if found.is_even:
                return found
    return None


def recommend(
    specs: Sequence[ParamSpec],
    plan: Plan,
    settings: PlanSettings,
    precision: Precision,
    job: Job,
    machine: Machine,
) -> Recommendation:
    """Compare the job's degrees, whose plan is `plan`, with all others of the same world size.

    Degrees whose mean resident bytes exceed a rank's memory are not planned, except for the job's
    own and the largest.
    """
    held = sum(
        spec.shape[0] // spec.block_rows * block_cost(spec, settings).resident.total
        for spec in specs
    )
    candidates, skipped, refused = [], [], {}
    degrees = {*shard_degrees(job.world_size, machine.ranks_per_host), job.shard_ranks}
    for degree in sorted(degrees, reverse=True):
        asked = degree in (job.shard_ranks, job.world_size)
        if held > degree * machine.memory_bytes and not asked:
            skipped.append(degree)
            continue
        try:
            own = degree == job.shard_ranks
            planned = plan if own else make_plan(specs, degree, settings)
        except ValueError as error:
            # an egress cap that cannot be met there
            refused[degree] = str(error)
            continue
        there = replace(job, replicas=job.world_size // degree)
        candidates.append(_price(specs, planned, settings, precision, there, machine))
    fitting = [candidate for candidate in candidates if candidate.fits]
    least_memory, fastest = _choose(fitting or candidates)
    even = [candidate for candidate in fitting if candidate.balance.is_even]
    return Recommendation(
        candidates,
        skipped,
        refused,
        least_memory,
        fastest if fitting else None,
        even[0] if even else None,
    )


def _price(
    specs: Sequence[ParamSpec],
    plan: Plan,
    settings: PlanSettings,
    precision: Precision,
    job: Job,
    machine: Machine,
) -> Candidate:
    most = peak(
        memory_table(
            specs,
            plan,
            settings,
            precision,
            world_size=job.world_size,
            backend=machine.backend,
            prefetch=job.prefetch,
            keep_all=job.keep_all,
            strategies=("matrix_fsdp",),
        )["matrix_fsdp"]
    )
    transport = job.transport
    if transport == "auto":
        transport = choose_transport(plan.world_size, machine.backend, machine.ranks_per_host)
    traffic = our_traffic(transport, plan, precision, job, machine)
    return Candidate(
        balance_of(plan, settings, job.world_size),
        most,
        most <= machine.memory_bytes,
        traffic.link_bytes_at_most,
        traffic.seconds,
        max(rank_flops(plan, settings)) / machine.flops_rate,
    )


def _choose(candidates: Sequence[Candidate]) -> tuple[Candidate, Candidate]:
    """(least memory, fastest): the same candidate twice where one is both.

    Least memory means the fewest bytes on the fullest rank. Of equal candidates the one with the
    fewest idle ranks is chosen, then the one with the fewest shards.
    """
    least = CLOSE * min(candidate.balance.fullest_bytes for candidate in candidates)
    soonest = CLOSE * min(candidate.step_seconds for candidate in candidates)
    small = [candidate for candidate in candidates if candidate.balance.fullest_bytes <= least]
    fast = [candidate for candidate in candidates if candidate.step_seconds <= soonest]
    both = [candidate for candidate in small if candidate in fast]
    if both:
        return (_least_idle(both),) * 2
    lean = CLOSE * min(candidate.balance.fullest_bytes for candidate in fast)
    return _least_idle(small), _least_idle([c for c in fast if c.balance.fullest_bytes <= lean])


def _least_idle(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: (c.balance.idle_ranks, c.balance.shards))


# ---------------------------------------------------------------- as keys of a config


def degree_flags(shards: int, replicas: int) -> str:
    """The degrees as flags for a command line."""
    return " ".join(f"--parallelism.{key} {value}" for key, value in _keys(shards, replicas))


def degree_toml(shards: int, replicas: int) -> list[str]:
    """The degrees as lines of a config file."""
    return ["[parallelism]", *(f"{key} = {value}" for key, value in _keys(shards, replicas))]


def _keys(shards: int, replicas: int) -> list[tuple[str, int]]:
    return [
        ("data_parallel_shard_degree", shards),
        ("data_parallel_replicate_degree", replicas),
    ]
