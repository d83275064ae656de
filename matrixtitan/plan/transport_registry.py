"""The registry of transports: the name, price and runtime class of each, and what "auto" chooses.

A transport brings a unit's segments from their owners to all ranks (unshard), and sums gradients
onto their owners (reduce). To add a transport, give TRANSPORTS one entry: the config then accepts
its name, the tools price it, and the runtime imports its class. Prices follow from shapes, backend
and the machine's rates. None is measured, so a run can be repeated. This module imports no torch
and sends nothing. Next: `fsdp/transports.py` and `fsdp/ring.py`, the classes that communicate.

Symbols below: S is a unit's bytes, s a rank's share of them, N the number of ranks,
c = (N - 1) / N.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import ceil, inf
from typing import ClassVar, Literal, NamedTuple

Direction = Literal["unshard", "reduce"]

GLOO_WORKERS = 2
"""Threads of PyTorch's gloo process group: so many of its collectives run at once."""

REDUCTIONS_IN_FLIGHT = {"nccl": 1, "gloo": 2}
"""By backend, how many units' full gradients may be in reduction while backward makes the next.

On GPUs 1, as in FSDP2. On CPUs gloo's threads may share the cores with backward, and are late then.
With 1, backward would wait for them where it could go on.
"""


class BusiestBytes(NamedTuple):
    """Bytes of the busiest rank and of the busiest host's link, each in its busier direction."""

    rank: int
    link: int


class LinkRates(NamedTuple):
    """What links carry: each host has one to the network, each rank one inside its host.

    Rates are in bytes per second one way. By default the rank's own link takes no time.
    `message_seconds` is the latency of a message.
    """

    network_rate: float
    local_rate: float = inf
    message_seconds: float = 0.0
    ranks_per_host: int = 1


class TransportSpec(ABC):
    """A transport as plans, tools and configs see it; the class that sends is `Transport`.

    `backends`: those that it runs on; None: all. `runtime`: "module:Class" of the subclass of
    `fsdp.transports.Transport` that moves the bytes, imported when a model is sharded.

    In all methods `shares[r]` are rank r's bytes of a unit; there are two ranks at least.
    """

    backends: ClassVar[tuple[str, ...] | None] = None
    runtime: ClassVar[str]

    def runs_on(self, backend: str) -> bool:
        return self.backends is None or backend in self.backends

    def is_auto(self, backend: str, across_hosts: bool) -> bool:
        """Whether "auto" chooses it there; of several, it chooses the first in TRANSPORTS."""
        return False

    @abstractmethod
    def carried(
        self, shares: Sequence[int], ranks_per_host: int, direction: Direction, backend: str
    ) -> BusiestBytes:
        """Bytes of one unshard, or of one reduction."""

    @abstractmethod
    def messages(self, shares: Sequence[int], direction: Direction, backend: str) -> int:
        """Messages of one unshard, or of one reduction, that must follow each other."""

    def seconds(
        self, shares: Sequence[int], direction: Direction, backend: str, links: LinkRates
    ) -> float:
        """Seconds: the bytes over the slower link, and the latency of each message."""
        moving = _seconds_moving(
            self.carried(shares, links.ranks_per_host, direction, backend), links
        )
        return moving + self.messages(shares, direction, backend) * links.message_seconds


class RingSpec(TransportSpec):
    """A pipelined ring of sends and receives: a link carries each byte once, whatever the balance.

    On gloo only: `fsdp/ring.py` says why.
    """

    backends = ("gloo",)
    runtime = "matrixtitan.fsdp.ring:Ring"

    def is_auto(self, backend: str, across_hosts: bool) -> bool:
        return across_hosts

    def carried(
        self, shares: Sequence[int], ranks_per_host: int, direction: Direction, backend: str
    ) -> BusiestBytes:
        return _around_a_ring(shares, ranks_per_host, direction)

    def messages(self, shares: Sequence[int], direction: Direction, backend: str) -> int:
        return len(shares) - 1


class StarSpec(TransportSpec):
    """Each owner sends its share to each peer, and receives gradients from each peer.

    "auto" chooses it inside a machine on gloo. There every transport moves the same bytes through
    memory, and this one takes the fewest steps.
    """

    runtime = "matrixtitan.fsdp.transports:Star"

    def is_auto(self, backend: str, across_hosts: bool) -> bool:
        return backend == "gloo" and not across_hosts

    def carried(
        self, shares: Sequence[int], ranks_per_host: int, direction: Direction, backend: str
    ) -> BusiestBytes:
        world_size, total, link = len(shares), sum(shares), 0
        if world_size > ranks_per_host:
            for held in _hosts(shares, ranks_per_host):
                peers = world_size - len(held)
                link = max(link, sum(held) * peers, (total - sum(held)) * len(held))
        return BusiestBytes((world_size - 1) * max(shares), link)

    def messages(self, shares: Sequence[int], direction: Direction, backend: str) -> int:
        return len(shares) - 1


class GroupedSpec(TransportSpec):
    """One broadcast, or one reduce, per owner, all at once. NCCL makes each a pipelined ring.

    [Note: gloo's broadcasts and reductions]
    A broadcast is a binomial tree. Counted from the owner, rank v receives the whole share from the
    rank v without its highest bit. It then sends the share to every v + 2^i above that bit at once.
    A reduction is a ring reduce-scatter, in which every rank sends c s bytes. Then the owner
    gathers the N reduced parts. Two ranks use a star instead: `Grouped` in `fsdp/transports.py`
    says why.
    """

    runtime = "matrixtitan.fsdp.transports:Grouped"
    _pair = StarSpec()

    def is_auto(self, backend: str, across_hosts: bool) -> bool:
        return backend == "nccl"

    def carried(
        self, shares: Sequence[int], ranks_per_host: int, direction: Direction, backend: str
    ) -> BusiestBytes:
        if backend != "gloo":
            return _around_a_ring(shares, ranks_per_host, direction)
        if len(shares) == 2:
            return self._pair.carried(shares, ranks_per_host, direction, backend)
        moved = _gloo_tree if direction == "unshard" else _gloo_ring_and_gather
        several = len(shares) > ranks_per_host
        return BusiestBytes(moved(shares, 1), moved(shares, ranks_per_host) if several else 0)

    def messages(self, shares: Sequence[int], direction: Direction, backend: str) -> int:
        world_size, owners = len(shares), sum(share > 0 for share in shares)
        if backend != "gloo":
            return owners
        if world_size == 2:
            return self._pair.messages(shares, direction, backend)
        # down the tree, or around the ring, where two parts travel at a time
        each = (world_size - 1).bit_length() if direction == "unshard" else world_size
        return ceil(owners / GLOO_WORKERS) * each

    def seconds(
        self, shares: Sequence[int], direction: Direction, backend: str, links: LinkRates
    ) -> float:
        """As `TransportSpec.seconds`; on gloo, a sum over groups of collectives that run at once.

        gloo runs GLOO_WORKERS collectives at once, in the order in which they were issued. They
        start and end nearly together, so the times of these groups add up. Around the ring of a
        reduction two parts travel at a time, beside those of the other reduction in its group: a
        message's latency passes while other bytes travel, and the longer of the two counts. The
        owner gathers the reduced parts last, and nothing overlaps with that gather.
        """
        world_size = len(shares)
        if backend != "gloo" or world_size == 2:
            return super().seconds(shares, direction, backend, links)
        owners = [rank for rank, share in enumerate(shares) if share]
        moving = 0.0
        for first in range(0, len(owners), GLOO_WORKERS):
            concurrent = owners[first : first + GLOO_WORKERS]
            part = [share if rank in concurrent else 0 for rank, share in enumerate(shares)]
            carried = self.carried(part, links.ranks_per_host, direction, backend)
            moving += _seconds_moving(carried, links)
        waiting = self.messages(shares, direction, backend) * links.message_seconds
        if direction == "unshard":
            return moving + waiting
        around = waiting * (world_size - 1) / world_size
        return max(moving, around) + waiting - around


class AllGatherSpec(TransportSpec):
    """FSDP2's all-gather of even shares, c S bytes: to compare with, no transport of ours."""

    backends = ()
    runtime = ""

    def carried(
        self, shares: Sequence[int], ranks_per_host: int, direction: Direction, backend: str
    ) -> BusiestBytes:
        world_size = len(shares)
        sent = ceil(sum(shares) * (world_size - 1) / world_size)
        return BusiestBytes(sent, sent if world_size > ranks_per_host else 0)

    def messages(self, shares: Sequence[int], direction: Direction, backend: str) -> int:
        return len(shares) - 1


TRANSPORTS: dict[str, TransportSpec] = {
    "grouped": GroupedSpec(),
    "ring": RingSpec(),
    "star": StarSpec(),
}
"""What `parallelism.transport` and `fully_shard(transport=...)` may name, besides "auto"."""

ALL_GATHER = "all_gather"
"""A name that has a price, and is no transport: see AllGatherSpec."""
_ALL_GATHER = AllGatherSpec()


def transport_spec(name: str) -> TransportSpec:
    """The entry of that name; ValueError where there is none."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport is {name!r}; use one of auto, {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def choose_transport(world_size: int, backend: str, ranks_per_host: int | None = None) -> str:
    """What `transport = "auto"` chooses, from the backend and from where the ranks are alone.

    Nothing is measured, so that a run can be repeated. `ranks_per_host` None: all on one host.
    """
    across_hosts = ranks_per_host is not None and world_size > ranks_per_host
    for name, spec in TRANSPORTS.items():
        if spec.runs_on(backend) and spec.is_auto(backend, across_hosts):
            return name
    raise ValueError(
        f"no transport is known for backend {backend!r}: use nccl or gloo, or name a transport"
    )


# ---------------------------------------------------------------- prices by name


def transport_bytes(
    name: str,
    shares: Sequence[int],
    ranks_per_host: int = 1,
    *,
    direction: Direction = "unshard",
    backend: str = "nccl",
) -> BusiestBytes:
    """Bytes of one unshard, or of one reduction, of a unit whose rank r holds `shares[r]` bytes.

    `name` is a key of TRANSPORTS or ALL_GATHER.
    """
    if len(shares) == 1:
        return BusiestBytes(0, 0)
    return _priced(name).carried(shares, ranks_per_host, direction, backend)


def transport_messages(
    name: str, shares: Sequence[int], *, direction: Direction = "unshard", backend: str = "nccl"
) -> int:
    """Messages of one unshard, or of one reduction, that must follow each other."""
    return _priced(name).messages(shares, direction, backend) if len(shares) > 1 else 0


def transport_seconds(
    name: str,
    shares: Sequence[int],
    link_bytes_per_second: float,
    *,
    direction: Direction = "unshard",
    backend: str = "nccl",
    ranks_per_host: int = 1,
    local_bytes_per_second: float = inf,
    message_seconds: float = 0.0,
) -> float:
    """Predicted seconds of one unshard, or of one reduction, with nothing beside it."""
    if len(shares) == 1:
        return 0.0
    links = LinkRates(
        link_bytes_per_second, local_bytes_per_second, message_seconds, ranks_per_host
    )
    return _priced(name).seconds(shares, direction, backend, links)


def _priced(name: str) -> TransportSpec:
    return _ALL_GATHER if name == ALL_GATHER else transport_spec(name)


def _seconds_moving(carried: BusiestBytes, links: LinkRates) -> float:
    """Seconds on the slower of the network's link and the rank's own."""
    return max(carried.link / links.network_rate, carried.rank / links.local_rate)


def _hosts(shares: Sequence[int], ranks_per_host: int) -> list[Sequence[int]]:
    """The shares host by host; the last may have fewer ranks."""
    return [
        shares[start : start + ranks_per_host] for start in range(0, len(shares), ranks_per_host)
    ]


def _around_a_ring(
    shares: Sequence[int], ranks_per_host: int, direction: Direction
) -> BusiestBytes:
    """Bytes of an unshard or a reduction that passes each share around the ring of ranks.

    In an unshard rank r sends all shares but that of rank r + 1; in a reduction, all but its own.
    One link of the ring enters a host, at its first rank, and one leaves it, at its last. So the
    link into a host does not carry its first rank's share in an unshard, and the link out of a host
    does not carry its last rank's in a reduction.
    """
    total, edge = sum(shares), 0 if direction == "unshard" else -1
    spared = min(held[edge] for held in _hosts(shares, ranks_per_host))
    several = len(shares) > ranks_per_host
    return BusiestBytes(total - min(shares), total - spared if several else 0)


def _gloo_tree(shares: Sequence[int], ranks_per_host: int) -> int:
    """Bytes through the busiest host's link when every share is broadcast.

    See [Note: gloo's broadcasts and reductions].
    """
    world_size = len(shares)
    sent, received = ([0] * ceil(world_size / ranks_per_host) for _ in range(2))
    for owner, share in enumerate(shares):
        for relative in range(1, world_size) if share else ():
            parent = relative - (1 << relative.bit_length() - 1)
            source, target = (
                (owner + rank) % world_size // ranks_per_host for rank in (parent, relative)
            )
            if source != target:
                sent[source] += share
                received[target] += share
    return max(*sent, *received)


def _gloo_ring_and_gather(shares: Sequence[int], ranks_per_host: int) -> int:
    """Bytes into the busiest host's link when every share is reduced.

    See [Note: gloo's broadcasts and reductions].
    """
    world_size = len(shares)
    gathered = max(sum(held) * (world_size - len(held)) for held in _hosts(shares, ranks_per_host))
    return ((world_size - 1) * sum(shares) + gathered) // world_size
