"""What a placement costs, by formula: resident bytes, optimizer FLOPs, bytes sent, transport times.

Owns every formula that the planner, the tools and `transport = "auto"` use. Nothing measured
enters, so that a plan is the same on every machine. It never decides who owns what (`planner.py`
does) and knows nothing of torch. Read the words in `shard.py` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import Literal, NamedTuple

from matrixtitan.plan.shard import MatrixShard, ParamSpec, Plan

MatrixOptimizer = Literal["muon", "shampoo", "soap", "adamw"]
NewtonSchulzForm = Literal["standard", "gram", "auto"]
Transport = Literal["grouped", "ring", "star", "all_gather"]
Strategy = Literal[
    "matrix_fsdp",
    "fsdp2_gather_each",
    "fsdp2_gather_once",
    "fsdp2_all_to_all",
    "zero1_owner",
    "ddp",
]
STRATEGIES: tuple[Strategy, ...] = (
    "matrix_fsdp",
    "fsdp2_gather_each",
    "fsdp2_gather_once",
    "fsdp2_all_to_all",
    "zero1_owner",
    "ddp",
)

ADAMW_FLOPS = 12
"""Elementwise operations per parameter of one AdamW step: decay, two moments, square root,
quotient, update."""
EIGH_FLOPS = 9
"""n^3 of a symmetric eigendecomposition with vectors (Golub & Van Loan, Matrix Computations, 8.3).
"""
FIRST_RESTART, RESTART_EVERY = 2, 3
"""Steps of Newton-Schulz's Gram form before its first restart, where it goes back to the long matrix,
and between later ones; `optim/newton_schulz.py` restarts there and says why."""


GLOO_WORKERS = 2
"""Threads of PyTorch's gloo process group: so many of its collectives run at a time."""


FACTOR_BYTES = 4
"""Shampoo and SOAP keep all of their state in float32, whatever the parameters are stored in."""


@dataclass(frozen=True)
class CostSettings:
    """What bytes and FLOPs depend on beside shapes. Bytes are per element, as stored on the owner.

    `state_bytes`: of Muon's momentum and AdamW's moments. `max_precond_dim`: SOAP leaves a longer
    side without a factor, Shampoo cuts it into blocks of that length; None takes every side whole.
    `shampoo_moments`: the averaged gradient and the grafted Adam's moment; fewer where it has none.
    `precondition_frequency` spreads the cubic refreshes over the steps between them.
    """

    matrix_optimizer: MatrixOptimizer = "muon"
    param_bytes: int = 4
    grad_bytes: int = 4
    state_bytes: int = 4
    ns_steps: int = 5
    precondition_frequency: int = 10
    max_precond_dim: int | None = None
    shampoo_moments: int = 2

    def __post_init__(self) -> None:
        if self.matrix_optimizer not in ("muon", "shampoo", "soap", "adamw"):
            raise ValueError(
                f"matrix_optimizer {self.matrix_optimizer!r} is unknown: "
                "muon, shampoo, soap or adamw"
            )
        if self.max_precond_dim is not None and self.max_precond_dim < 1:
            raise ValueError(
                f"max_precond_dim {self.max_precond_dim} is below 1; None preconditions every side"
            )
        if min(self.param_bytes, self.ns_steps, self.precondition_frequency) < 1:
            raise ValueError(
                "param_bytes, ns_steps and precondition_frequency must be at least 1, not "
                f"{self.param_bytes}, {self.ns_steps}, {self.precondition_frequency}"
            )


Parameter = ParamSpec | MatrixShard
"""Both have a shape, a role, block rows and whether they train: enough to price their rows."""


class ResidentBytes(NamedTuple):
    """Bytes that stay on a rank between steps, without what aligns parameters in their buffers: each
    rank's rows of one are padded to 64 bytes (256 on a GPU)."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


class BlockCost(NamedTuple):
    """Price of the smallest piece of a parameter that may not be cut."""

    rows: int
    numel: int
    resident: ResidentBytes
    flops: int


# ---------------------------------------------------------------- one parameter


def matrices_in_block(param: Parameter) -> tuple[int, int, int]:
    """(count, R, C): the matrices orthogonalised or preconditioned apart within one block of a
    matrix parameter."""
    if len(param.shape) == 2:
        return 1, param.block_rows, param.shape[1]
    return param.block_rows * prod(param.shape[1:-2]), param.shape[-2], param.shape[-1]


class _Factors(NamedTuple):
    """Sums over the preconditioners of one matrix."""

    squares: int  # elements of the factors
    cubes: int  # n^3 over the factors
    product: int  # FLOPs of multiplying the matrix by each factor once


def _factors(rows: int, cols: int, settings: CostSettings) -> _Factors:
    limit = settings.max_precond_dim or max(rows, cols, 1)
    if settings.matrix_optimizer == "shampoo":
        tiles = [(r, c) for r in _chunks(rows, limit) for c in _chunks(cols, limit)]
    else:
        tiles = [(rows, cols)]
    sides = [(side, r * c) for r, c in tiles for side in (r, c) if side <= limit]
    return _Factors(
        sum(side**2 for side, _ in sides),
        sum(side**3 for side, _ in sides),
        sum(2 * numel * side for side, numel in sides),
    )


def _chunks(length: int, limit: int) -> list[int]:
    """`length` cut into pieces of `limit` and a rest."""
    return [min(limit, length - start) for start in range(0, length, limit)]


def state_elements(rows: int, cols: int, settings: CostSettings) -> dict[str, int]:
    """Elements of the state of one (R, C) matrix, by name; step counters are not counted.

    Muon: momentum. AdamW: both moments. Shampoo: factors and inverse roots (R^2 and C^2 each), the
    averaged gradient and the grafted Adam's moment. SOAP: factors and eigenbases, both moments.
    """
    numel, square = rows * cols, _factors(rows, cols, settings).squares
    match settings.matrix_optimizer:
        case "muon":
            return {"momentum_buffer": numel}
        case "adamw":
            return {"exp_avg": numel, "exp_avg_sq": numel}
        case "shampoo":
            moments = settings.shampoo_moments * numel
            return {"factors": square, "roots": square, "moments": moments}
        case "soap":
            return {"factors": square, "bases": square, "exp_avg": numel, "exp_avg_sq": numel}


def newton_schulz_flops(
    rows: int, cols: int, steps: int = 5, form: NewtonSchulzForm = "auto"
) -> int:
    """FLOPs of `steps` quintic Newton-Schulz steps on one (R, C) matrix; m and n its short and long
    side.

    Standard (Jordan et al. 2024), a step: A = X X^T (2 m^2 n), A A (2 m^3), B X (2 m^2 n). Gram:
    the iteration runs on m x m matrices, four products a step, and touches X twice per chunk of
    steps; a chunk's first step has no product to extend (one less), its last no Gram matrix to
    carry on (two less). "auto", as Muon has it but for small matrices on a CPU: the cheaper one,
    which is Gram for five steps once n is over 1.5 m.
    """
    short, long = sorted((rows, cols))
    standard = steps * (4 * short * short * long + 2 * short**3)
    chunks = 1 + ceil(max(0, steps - FIRST_RESTART) / RESTART_EVERY)
    gram = chunks * 4 * short * short * long + (4 * steps - 3 * chunks) * 2 * short**3
    return {"standard": standard, "gram": gram, "auto": min(standard, gram)}[form]


def optimizer_flops(rows: int, cols: int, settings: CostSettings) -> int:
    """FLOPs of one step of the matrix optimizer on one (R, C) matrix, refreshes spread over steps.

    Shampoo: factor updates, products with the roots, and per refresh an eigendecomposition and a
    product for each factor. SOAP: factor updates, three changes of basis (gradient, moment,
    update), and per refresh a power iteration, its sorting diagonal, a QR (8/3 n^3), the moment's
    new basis.
    """
    elementwise = ADAMW_FLOPS * rows * cols
    factors = _factors(rows, cols, settings)
    match settings.matrix_optimizer:
        case "muon":
            return newton_schulz_flops(rows, cols, settings.ns_steps)
        case "adamw":
            return elementwise
        case "shampoo":
            refresh = (EIGH_FLOPS + 2) * factors.cubes
            step = 2 * factors.product
        case "soap":
            refresh = 4 * factors.cubes + 8 * factors.cubes // 3 + 2 * factors.product
            step = 4 * factors.product
    return elementwise + step + refresh // settings.precondition_frequency


def block_cost(param: Parameter, settings: CostSettings) -> BlockCost:
    """Bytes and FLOPs of one block of `param`; every block of a parameter costs the same."""
    numel = param.block_rows * prod(param.shape[1:])
    parameters = numel * settings.param_bytes
    if not param.trainable:
        return BlockCost(param.block_rows, numel, ResidentBytes(parameters, 0, 0), 0)
    if param.role == "tail":
        state, flops = 2 * numel * settings.state_bytes, ADAMW_FLOPS * numel
    else:
        count, rows, cols = matrices_in_block(param)
        elements = count * sum(state_elements(rows, cols, settings).values())
        in_factors = settings.matrix_optimizer in ("shampoo", "soap")
        state = elements * (FACTOR_BYTES if in_factors else settings.state_bytes)
        flops = count * optimizer_flops(rows, cols, settings)
    resident = ResidentBytes(parameters, numel * settings.grad_bytes, state)
    return BlockCost(param.block_rows, numel, resident, flops)


# ---------------------------------------------------------------- one plan


def rank_bytes(plan: Plan, settings: CostSettings) -> list[ResidentBytes]:
    """Resident bytes of each rank."""
    parts = [[0, 0, 0] for _ in range(plan.world_size)]
    for shard in plan.shards:
        cost = block_cost(shard, settings)
        for segment in shard.segments:
            blocks = segment.rows // shard.block_rows
            for kind, part in enumerate(cost.resident):
                parts[segment.rank][kind] += blocks * part
    return [ResidentBytes(*part) for part in parts]


def rank_flops(plan: Plan, settings: CostSettings) -> list[int]:
    """Optimizer FLOPs of each rank in one step."""
    flops = [0] * plan.world_size
    for shard in plan.shards:
        cost = block_cost(shard, settings)
        for segment in shard.segments:
            flops[segment.rank] += segment.rows // shard.block_rows * cost.flops
    return flops


def unit_shares(plan: Plan, element_bytes: int, *, gradients: bool = False) -> dict[str, list[int]]:
    """Bytes of each unit that each rank holds (s_r), units in order of first appearance.

    `gradients`: those of its gradients, which frozen parameters have none of.
    """
    shares: dict[str, list[int]] = {}
    for shard in plan.shards:
        unit = shares.setdefault(shard.unit, [0] * plan.world_size)
        for segment in shard.segments:
            if shard.trainable or not gradients:
                unit[segment.rank] += segment.rows * shard.row_numel * element_bytes
    return shares


def max_over_mean(values: Sequence[int]) -> float:
    """How far the fullest rank is above the average; 1.0 where there is nothing at all."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


# ---------------------------------------------------------------- transports


Direction = Literal["unshard", "reduce"]


class LinkBytes(NamedTuple):
    """Most bytes that one rank, and that one host's link, carries in its busier direction."""

    rank: int
    link: int


def transport_bytes(
    transport: Transport,
    shares: Sequence[int],
    ranks_per_host: int = 1,
    *,
    direction: Direction = "unshard",
    backend: str = "nccl",
) -> LinkBytes:
    """Bytes of one unshard, or one reduction, of a unit whose rank r holds `shares[r]`.

    Ring, and `grouped` as NCCL does it (each broadcast a pipelined ring): rank r passes on all but
    what rank r + 1 holds (a reduction: but what it holds itself), and one rank of a host faces the
    network. Star: an owner exchanges its share with each peer. All-gather: even shares, c S.
    `grouped` on gloo: [Note: what gloo does].
    """
    world_size, total = len(shares), sum(shares)
    if world_size == 1:
        return LinkBytes(0, 0)
    transport = _carried_by(transport, world_size, backend)
    several = world_size > ranks_per_host
    if transport == "all_gather":
        sent = ceil(total * (world_size - 1) / world_size)
        return LinkBytes(sent, sent if several else 0)
    if transport == "grouped" and backend == "gloo":
        moved = _gloo_tree if direction == "unshard" else _gloo_ring_and_gather
        return LinkBytes(moved(shares, 1), moved(shares, ranks_per_host) if several else 0)
    if transport in ("ring", "grouped"):
        # the link into a host does not carry its first rank's share, nor the one out of it, in a
        # reduction, its last rank's
        edge = 0 if direction == "unshard" else -1
        spared = min(
            shares[start : start + ranks_per_host][edge]
            for start in range(0, world_size, ranks_per_host)
        )
        return LinkBytes(total - min(shares), total - spared if several else 0)
    link = 0
    for start in range(0, world_size, ranks_per_host) if several else ():
        held = shares[start : start + ranks_per_host]
        peers = world_size - len(held)
        link = max(link, sum(held) * peers, (total - sum(held)) * len(held))
    return LinkBytes((world_size - 1) * max(shares), link)


def _gloo_tree(shares: Sequence[int], ranks_per_host: int) -> int:
    """Bytes through the busiest host's link when every share is broadcast.

    [Note: what gloo does]
    A broadcast is a binomial tree: counted from the owner, rank v gets the whole share from v less
    its highest bit, and sends it to each v + 2^i above that bit at once. A reduction is a ring
    reduce-scatter, in which every rank sends c s, and then a gather of the N parts by the owner.
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
    """Bytes into the busiest host's link when every share is reduced; see [Note: what gloo does]."""
    world_size = len(shares)
    gathered = max(
        sum(held) * (world_size - len(held))
        for held in (
            shares[start : start + ranks_per_host] for start in range(0, world_size, ranks_per_host)
        )
    )
    return ((world_size - 1) * sum(shares) + gathered) // world_size


def transport_seconds(
    transport: Transport,
    shares: Sequence[int],
    link_bytes_per_second: float,
    *,
    direction: Direction = "unshard",
    backend: str = "nccl",
    ranks_per_host: int = 1,
    local_bytes_per_second: float = inf,
    message_seconds: float = 0.0,
) -> float:
    """Predicted time of one unshard or one reduction.

    Each host has one link to the network, each rank one to its neighbours in the host, by default
    taken as free; the slower of the two counts. `message_seconds` is the latency of a message, for
    each of `transport_messages`. gloo runs `GLOO_WORKERS` of the collectives of `grouped` at a
    time, in the order issued, and these start and end nearly together: their times add up, group by
    group. Around the ring of its reductions two segments travel at a time, and so do those of
    reductions beside each other: messages wait while bytes travel, and the longer counts. The
    owner's gather comes last and waits for itself.
    """
    world_size = len(shares)
    if world_size == 1:
        return 0.0
    in_groups = backend == "gloo" and _carried_by(transport, world_size, backend) == "grouped"
    parts = [shares]
    if in_groups:
        owners = [rank for rank, share in enumerate(shares) if share]
        parts = [
            [
                share if rank in owners[first : first + GLOO_WORKERS] else 0
                for rank, share in enumerate(shares)
            ]
            for first in range(0, len(owners), GLOO_WORKERS)
        ]
    moving = 0.0
    for part in parts:
        moved = transport_bytes(
            transport, part, ranks_per_host, direction=direction, backend=backend
        )
        moving += max(moved.link / link_bytes_per_second, moved.rank / local_bytes_per_second)
    messages = transport_messages(transport, shares, direction=direction, backend=backend)
    waiting = messages * message_seconds
    if in_groups and direction == "reduce":
        around = waiting * (world_size - 1) / world_size
        return max(moving, around) + waiting - around
    return moving + waiting


def transport_messages(
    transport: Transport,
    shares: Sequence[int],
    *,
    direction: Direction = "unshard",
    backend: str = "nccl",
) -> int:
    """Messages of one unshard or one reduction that must follow each other."""
    world_size, owners = len(shares), sum(share > 0 for share in shares)
    if _carried_by(transport, world_size, backend) != "grouped":
        return world_size - 1
    if backend != "gloo":
        return owners
    # down the tree, or around the ring, where two segments travel at a time
    each = (world_size - 1).bit_length() if direction == "unshard" else world_size
    return ceil(owners / GLOO_WORKERS) * each


def _carried_by(transport: Transport, world_size: int, backend: str) -> Transport:
    """Two gloo ranks send to each other: there `grouped` is a star, see `fsdp/transports.py`."""
    pair = backend == "gloo" and world_size == 2
    return "star" if transport == "grouped" and pair else transport


def choose_transport(
    world_size: int, backend: str, ranks_per_host: int | None = None
) -> Literal["grouped", "ring", "star"]:
    """The transport of `transport = "auto"`: from the backend and where ranks are, so that a run can be repeated.

    NCCL: grouped. gloo across machines: ring, since a link carries each byte once whatever the balance. gloo inside
    one machine: star, since every pattern moves the same bytes through memory and this one has the fewest steps.
    """
    if backend == "nccl":
        return "grouped"
    if backend != "gloo":
        raise ValueError(
            f"no transport is known for backend {backend!r}: use nccl or gloo, or name a transport"
        )
    return "ring" if ranks_per_host is not None and world_size > ranks_per_host else "star"


# ---------------------------------------------------------------- strategies


class UnitSize(NamedTuple):
    """Elements of one unit, and how often its weights are gathered in a microbatch."""

    numel: int
    trainable: int
    matrix: int  # trainable elements of the matrix role
    gathers: int = (
        2  # 1 where they are kept between forward and backward, or not needed in backward
    )


class StepBytes(NamedTuple):
    """Logical bytes that one rank sends in one step, the mean over ranks."""

    forward_backward: int
    optimizer: int


def unit_sizes(
    params: Iterable[Parameter], gathered_once: Iterable[str] = (), row_multiple: int = 1
) -> list[UnitSize]:
    """Sizes of the units in order of first appearance.

    Units named in `gathered_once` are gathered in forward alone. Rows are padded to `row_multiple`,
    as FSDP2 does for its N equal shards.
    """
    once = set(gathered_once)
    sizes: dict[str, UnitSize] = {}
    for param in params:
        size = sizes.setdefault(param.unit, UnitSize(0, 0, 0, 1 if param.unit in once else 2))
        padded = ceil(param.shape[0] / row_multiple) * row_multiple * prod(param.shape[1:])
        sizes[param.unit] = UnitSize(
            size.numel + padded,
            size.trainable + padded * param.trainable,
            size.matrix + padded * (param.trainable and param.role == "matrix"),
            size.gathers,
        )
    return list(sizes.values())


def strategy_bytes(
    strategy: Strategy,
    units: Sequence[UnitSize],
    world_size: int,
    *,
    param_bytes: int,
    grad_bytes: int,
    update_bytes: int = 4,
    stored_bytes: int = 4,
    microbatches: int = 1,
) -> StepBytes:
    """Bytes sent per rank per step; c = (N - 1) / N, and an element has b (computed), g (reduced),
    u (update) or s (stored) bytes on the wire.

    Sharded strategies: c ((1 + resharded) b + g) a microbatch; replicated ones all-reduce their
    gradients once a step, 2 c g. Optimizer step, P trainable matrix elements: gather_each and
    gather_once c P u, all_to_all 2 c (P / N) u, zero1_owner c P s, ours and ddp 0.
    """
    share = (world_size - 1) / world_size
    gathered = sum(unit.numel * unit.gathers for unit in units) * param_bytes
    reduced = sum(unit.trainable for unit in units) * grad_bytes
    matrix = sum(unit.matrix for unit in units)
    replicated = strategy in ("zero1_owner", "ddp")
    sent = 2 * reduced if replicated else (gathered + reduced) * microbatches
    optimizer = {
        "matrix_fsdp": 0.0,
        "fsdp2_gather_each": share * matrix * update_bytes,
        "fsdp2_gather_once": share * matrix * update_bytes,
        "fsdp2_all_to_all": 2 * share * matrix / world_size * update_bytes,
        "zero1_owner": share * matrix * stored_bytes,
        "ddp": 0.0,
    }[strategy]
    return StepBytes(round(share * sent), round(optimizer))
