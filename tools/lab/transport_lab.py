"""Compare every transport's seconds and bytes on a plan's units with the planner's formulas.

    python tools/lab/netlab.py --nodes 8 --rate 10mbit --mtu 9000 -- \\
        python tools/lab/transport_lab.py --rate 10mbit
    torchrun --nproc-per-node 4 tools/lab/transport_lab.py

Every rank runs it. Transports take turns, and times are medians of the slowest rank. A message's
latency is the time of the same operation, in the same rounds, with a few bytes per owner; the rest
of a prediction is bytes over the rate. `--check` fails if a time is more than 20% from its formula,
or if the ring's bytes are more than 5% above theirs. `--overlap` computes at the same time, for
about as long, and prints how much of the shorter of the two is hidden.
Next: `matrixtitan/fsdp/transports.py`; the formulas are in `plan/transport_registry.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

import checkout  # noqa: F401
from bench_measure import WireCounter
from bench_report import link_bytes_per_second
from matrixtitan.config import Config, ModelConfig, TrainingConfig
from matrixtitan.fsdp.transports import OwnedTensor, Transport, runtime_class
from matrixtitan.mesh import World, init_world
from matrixtitan.parallelize import model_specs
from matrixtitan.plan.cost import unit_shares
from matrixtitan.plan.planner import make_plan
from matrixtitan.plan.transport_registry import (
    TRANSPORTS,
    Direction,
    transport_bytes,
    transport_messages,
    transport_seconds,
)
from models import build_model

TIME_MARGIN, BYTE_MARGIN = 0.2, 0.05
FEW_BYTES = 32
"""Bytes per owner and rank for a latency. gloo cuts a reduction into two segments per rank, and
skips empty segments."""


def shares_of_units(flavor: str, vocab_size: int, world_size: int) -> dict[str, list[int]]:
    """Each owner's bytes of every unit, by the plan."""
    with torch.device("meta"):
        model = build_model("llama3", flavor, vocab_size=vocab_size, max_seq_len=128)
    config = Config(model=ModelConfig(flavor=flavor), training=TrainingConfig(global_batch_size=1))
    return unit_shares(make_plan(model_specs(model, config), world_size), element_bytes=4)


class Moved(NamedTuple):
    """One operation: the slowest rank's seconds, and bytes through this rank's interface.

    The bytes are 0 if the rank has no interface of its own.
    """

    seconds: float
    sent: int
    received: int


def move(
    transport: Transport, direction: Direction, shares: Sequence[int], wire: WireCounter
) -> Moved:
    pieces = [
        OwnedTensor(owner, torch.ones(share // 4)) for owner, share in enumerate(shares) if share
    ]
    dist.barrier()
    sent, received, start = wire.sent() or 0, wire.received() or 0, time.perf_counter()
    for work in getattr(transport, direction)(pieces):
        work.wait()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)  # afterwards all sends are done
    return Moved(took.item(), (wire.sent() or 0) - sent, (wire.received() or 0) - received)


def largest(value: float) -> float:
    """The largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def compare(
    name: str,
    direction: Direction,
    samples: Sequence[Moved],
    without_bytes: Sequence[Moved],
    shares: list[int],
    rate: str,
) -> tuple[str, bool]:
    """A line of the table, and whether it agrees with the formulas. Every rank calls this."""
    seconds, latency = (
        statistics.median(sample.seconds for sample in moves) for moves in (samples, without_bytes)
    )
    busiest = largest(statistics.median(max(s.sent, s.received) for s in samples))
    line, good = f"{name:9}  {direction:9}  {1e3 * latency:8.1f}  {1e3 * seconds:12.1f}", True
    if rate:
        messages = transport_messages(name, shares, direction=direction, backend="gloo")
        predicted = transport_seconds(
            name,
            shares,
            link_bytes_per_second(rate),
            backend="gloo",
            direction=direction,
            message_seconds=latency / messages,
        )
        ratio = seconds / predicted
        line += f"  {1e3 * predicted:12.1f}  {ratio:5.2f}"
        good = abs(ratio - 1) <= TIME_MARGIN
    if busiest:
        due = transport_bytes(name, shares, direction=direction, backend="gloo").link
        line += f"  {busiest:12.0f}  {due:9d}  {busiest / due:5.3f}"
        good = good and (name != "ring" or busiest <= (1 + BYTE_MARGIN) * due)
    return line + ("" if good else "  <"), good


def compute(count: int) -> None:
    matrix = torch.full((128, 128), 1e-3)
    for _ in range(count):
        matrix @ matrix


def seconds_of(act: Callable[[], None]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    act()
    return largest(time.perf_counter() - start)


def hidden(transport: Transport, direction: Direction, shares: Sequence[int], rounds: int) -> float:
    """The share of moving or computing, whichever is shorter, that the other hides: 0 to 1."""

    def moving(count: int) -> None:
        pieces = [
            OwnedTensor(owner, torch.ones(share // 4))
            for owner, share in enumerate(shares)
            if share
        ]
        works = getattr(transport, direction)(pieces)
        compute(count)
        for work in works:
            work.wait()

    enough = seconds_of(lambda: moving(0)) / (seconds_of(lambda: compute(200)) / 200)
    count = int(largest(enough))
    samples = [
        (
            seconds_of(lambda: moving(0)),
            seconds_of(lambda: compute(count)),
            seconds_of(lambda: moving(count)),
        )
        for _ in range(rounds)
    ]
    alone, computing, both = (statistics.median(times) for times in zip(*samples, strict=True))
    return (alone + computing - both) / min(alone, computing)


def step_of_ring(
    ring: Transport, units: Sequence[Sequence[int]], rank: int, wire: WireCounter
) -> float:
    """A step's bytes relative to the formula, for the worst rank.

    A step gathers every unit twice and reduces it once. A rank receives the bytes that it lacks in
    a gather, and sends them in a reduction.
    """
    moved = due = 0
    for shares in units:
        moved += 2 * move(ring, "unshard", shares, wire).received
        moved += move(ring, "reduce", shares, wire).sent
        due += 3 * (sum(shares) - shares[rank])
    return largest(moved / due)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Transports against their formulas; run on every rank."
    )
    parser.add_argument("--flavor", default="netlab", help="the model whose plan is measured")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rate", default="", help="the links' rate, for predictions, such as 10mbit"
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="also compute at the same time; takes three times as long",
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a margin is exceeded")
    arguments = parser.parse_args(argv)
    with init_world(Config()) as world:
        good = measure(world, arguments)
    return 1 if arguments.check and not good else 0


def measure(world: World, arguments: argparse.Namespace) -> bool:
    """Print the tables. Returns whether everything agrees with the formulas."""
    wire = WireCounter(world)
    counted = wire.interface not in (None, "lo")  # loopback counts all ranks' bytes
    transports = {
        name: runtime_class(name)(dist.new_group())
        for name, spec in TRANSPORTS.items()
        if spec.runs_on("gloo")
    }
    units = shares_of_units(arguments.flavor, arguments.vocab_size, world.size)
    good = True

    def say(text: str) -> None:
        if world.rank == 0:
            print(text)

    for unit, shares in units.items():
        if unit.startswith("layers.") and unit != "layers.0":
            continue
        samples: dict[tuple[str, Direction], list[Moved]] = {}
        without_bytes: dict[tuple[str, Direction], list[Moved]] = {}
        directions: tuple[Direction, ...] = ("unshard", "reduce")
        few = [min(share, FEW_BYTES * world.size) for share in shares]
        for _ in range(arguments.rounds):
            for name, transport in transports.items():
                for direction in directions:
                    without_bytes.setdefault((name, direction), []).append(
                        move(transport, direction, few, wire)
                    )
                    moved = move(transport, direction, shares, wire)
                    samples.setdefault((name, direction), []).append(
                        moved if counted else Moved(moved.seconds, 0, 0)
                    )
        say(f"\n{unit}: {sum(shares)} bytes, largest share {max(shares)}, smallest {min(shares)}")
        say(
            "transport  direction  messages  measured ms  predicted ms  ratio  "
            "busiest link    formula  ratio"
        )
        for (name, direction), moves in samples.items():
            line, as_predicted = compare(
                name, direction, moves, without_bytes[name, direction], shares, arguments.rate
            )
            good = good and as_predicted
            if arguments.overlap:
                share = hidden(transports[name], direction, shares, arguments.rounds)
                line += f"  {share:.0%} hidden"
            say(line)
    if counted:
        ratio = step_of_ring(transports["ring"], list(units.values()), world.rank, wire)
        good = good and ratio <= 1 + BYTE_MARGIN
        say(f"\na step by ring: the bytes of the worst rank are {ratio:.3f} of its due")
    for transport in transports.values():
        transport.close()
    return good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
