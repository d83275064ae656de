"""The registry of transports: what each carries and how long it takes, by formula; which one `auto`
takes; and which class moves the bytes.

A transport brings a unit's segments from their owners to all ranks (unshard) and sums gradients onto
their owners (reduce). One entry of TRANSPORTS is all that a transport needs: the config accepts its
name, the tools price it, and the runtime imports its class. Prices follow from shapes, backend and
the machine's rates, so that a run can be repeated; nothing is measured and torch is not imported.
The classes that communicate are in `fsdp/transports.py` and `fsdp/ring.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import ceil, inf
from typing import ClassVar, Literal, NamedTuple

Direction = Literal["unshard", "reduce"]

GLOO_WORKERS = 2
"""Threads of PyTorch's gloo process group: so many of its collectives run at a time."""

REDUCTIONS_IN_FLIGHT = {"nccl": 1, "gloo": 2}
"""Units whose full gradients may be in reduction while backward computes those of one more, on GPUs and on CPUs.

On GPUs one, as in FSDP2. On CPUs gloo's threads may share the cores with backward and are late then: with one, backward
waits for them where it could go on.
"""


class BusiestBytes(NamedTuple):
    """Most bytes that one rank, and that one host's link, carries in its busier direction."""

    rank: int
    link: int


class Links(NamedTuple):
    """Each host has one link to the network, each rank one to its neighbours in the host, by default
    taken as free. Rates are bytes per second one way; `message_seconds` is a message's latency."""

    network_rate: float
    local_rate: float = inf
    message_seconds: float = 0.0
    ranks_per_host: int = 1


class TransportSpec(ABC):
    """A transport as plans, tools and configs see it. Shares have one entry a rank, two at least.

    `backends`: where it runs; None: everywhere. `runtime`: "module:Class" of the
    `fsdp.transports.Transport` that moves the bytes, imported when a model is sharded.
    """

    backends: ClassVar[tuple[str, ...] | None] = None
    runtime: ClassVar[str]

    def runs_on(self, backend: str) -> bool:
        return self.backends is None or backend in self.backends

    def is_auto(self, backend: str, across_hosts: bool) -> bool:
        """Whether `auto` takes it there; of several the first in TRANSPORTS."""
        return False

    @abstractmethod
    def carried(
        self, shares: Sequence[int], ranks_per_host: int, direction: Direction, backend: str
    ) -> BusiestBytes:
        """Bytes of one unshard, or one reduction, of a unit whose rank r holds `shares[r]`."""

    @abstractmethod
    def messages(self, shares: Sequence[int], direction: Direction, backend: str) -> int:
        """Messages of one unshard, or one reduction, that must follow each other."""

    def seconds(
        self, shares: Sequence[int], direction: Direction, backend: str, links: Links
    ) -> float:
        """Bytes over the slower link, and the latency of each message."""
        moving = _seconds_moving(
            self.carried(shares, links.ranks_per_host, direction, backend), links
        )
        return moving + self.messages(shares, direction, backend) * links.message_seconds


class RingSpec(TransportSpec):
    """A pipelined ring of sends and receives: a link carries each byte once, whatever the balance.

    gloo alone: receives posted ahead of their sends would deadlock NCCL.
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
    """An owner exchanges its share with each peer.

    Inside a machine every pattern moves the same bytes through memory, and this one has the fewest
    steps.
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
    """One broadcast, or one reduce, an owner, all at once. NCCL makes each a pipelined ring.

    [Note: what gloo does]
    A broadcast is a binomial tree: counted from the owner, rank v gets the whole share from v less
    its highest bit, and sends it to each v + 2^i above that bit at once. A reduction is a ring
    reduce-scatter, in which every rank sends c s, and then a gather of the N parts by the owner. Two
    ranks send to each other as in a star, see `fsdp/transports.py`.
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
        # down the tree, or around the ring, where two segments travel at a time
        each = (world_size - 1).bit_length() if direction == "unshard" else world_size
        return ceil(owners / GLOO_WORKERS) * each

    def seconds(
        self, shares: Sequence[int], direction: Direction, backend: str, links: Links
    ) -> float:
        """gloo runs `GLOO_WORKERS` of the collectives at a time, in the order issued, and these start
        and end nearly together: their times add up, group by group.

        Around the ring of its reductions two segments travel at a time, and so do those of reductions
        beside each other: messages wait while bytes travel, and the longer counts. The owner gathers
        last, and nothing overlaps with that gather.
        """
        world_size = len(shares)
        if backend != "gloo" or world_size == 2:
            return super().seconds(shares, direction, backend, links)
        owners = [rank for rank, share in enumerate(shares) if share]
        moving = 0.0
        for first in range(0, len(owners), GLOO_WORKERS):
            together = owners[first : first + GLOO_WORKERS]
            part = [share if rank in together else 0 for rank, share in enumerate(shares)]
            carried = self.carried(part, links.ranks_per_host, direction, backend)
            moving += _seconds_moving(carried, links)
        waiting = self.messages(shares, direction, backend) * links.message_seconds
        if direction == "unshard":
            return moving + waiting
        around = waiting * (world_size - 1) / world_size
        return max(moving, around) + waiting - around


class AllGatherSpec(TransportSpec):
    """What FSDP2 does: even shares, c S. A measure for the others and no transport of ours."""

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
"""What `parallelism.transport` and `fully_shard(transport=...)` may name, beside "auto"."""

ALL_GATHER = "all_gather"
_ALL_GATHER = AllGatherSpec()


def transport_spec(name: str) -> TransportSpec:
    """The entry of that name; ValueError where there is none."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport {name!r} is none of auto, {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def choose_transport(world_size: int, backend: str, ranks_per_host: int | None = None) -> str:
    """The transport of `transport = "auto"`: from the backend and where ranks are, so that a run can be repeated."""
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
    """Bytes of one unshard, or one reduction, of a unit whose rank r holds `shares[r]`; `name` may
    also be ALL_GATHER."""
    if len(shares) == 1:
        return BusiestBytes(0, 0)
    return _priced(name).carried(shares, ranks_per_host, direction, backend)


def transport_messages(
    name: str, shares: Sequence[int], *, direction: Direction = "unshard", backend: str = "nccl"
) -> int:
    """Messages of one unshard or one reduction that must follow each other."""
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
    """Predicted time of one unshard or one reduction."""
    if len(shares) == 1:
        return 0.0
    links = Links(link_bytes_per_second, local_bytes_per_second, message_seconds, ranks_per_host)
    return _priced(name).seconds(shares, direction, backend, links)


def _priced(name: str) -> TransportSpec:
    return _ALL_GATHER if name == ALL_GATHER else transport_spec(name)


def _seconds_moving(carried: BusiestBytes, links: Links) -> float:
    """The slower of the network's link and the rank's own counts."""
    return max(carried.link / links.network_rate, carried.rank / links.local_rate)


def _hosts(shares: Sequence[int], ranks_per_host: int) -> list[Sequence[int]]:
    """The shares host by host; the last may have fewer ranks."""
    return [
        shares[start : start + ranks_per_host] for start in range(0, len(shares), ranks_per_host)
    ]


def _around_a_ring(
    shares: Sequence[int], ranks_per_host: int, direction: Direction
) -> BusiestBytes:
    """Rank r passes on all but what rank r + 1 holds (a reduction: but what it holds itself), and one
    rank of a host faces the network.

    So the link into a host does not carry its first rank's share, nor the one out of it, in a
    reduction, its last rank's.
    """
    total, edge = sum(shares), 0 if direction == "unshard" else -1
    spared = min(held[edge] for held in _hosts(shares, ranks_per_host))
    several = len(shares) > ranks_per_host
    return BusiestBytes(total - min(shares), total - spared if several else 0)


def _gloo_tree(shares: Sequence[int], ranks_per_host: int) -> int:
    """Bytes through the busiest host's link when every share is broadcast; see [Note: what gloo does]."""
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
    """Bytes into the busiest host's link when every share is reduced; see [Note: what gloo does]."""
    world_size = len(shares)
    gathered = max(sum(held) * (world_size - len(held)) for held in _hosts(shares, ranks_per_host))
    return ((world_size - 1) * sum(shares) + gathered) // world_size
