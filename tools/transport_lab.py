"""Time every transport on a plan's units and compare with `plan/cost.py`: seconds, and bytes through the interface.

    python tools/netlab.py --nodes 8 --rate 10mbit -- python tools/transport_lab.py --rate 10mbit
    torchrun --nproc-per-node 4 tools/transport_lab.py

Every rank runs it. Transports take turns; medians of the slowest rank. Owns only that comparison.
Next: `matrixtitan/fsdp/transports.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from matrixtitan.config import Config, ModelConfig, TrainingConfig
from matrixtitan.fsdp.api import TRANSPORTS
from matrixtitan.fsdp.transports import Piece
from matrixtitan.mesh import init_world
from matrixtitan.parallelize import model_specs
from matrixtitan.plan.cost import transport_seconds, unit_shares
from matrixtitan.plan.planner import make_plan
from models import build_model
from tools.bench_measure import WireCounter

UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}  # bytes per second


def link_bytes_per_second(rate: str) -> float:
    """ "10mbit" as bytes per second."""
    for suffix, scale in UNITS.items():
        if rate.endswith(suffix):
            return float(rate.removesuffix(suffix)) * scale
    raise ValueError(f"--rate {rate!r}: write it as netlab does, such as 10mbit or 1gbit")


def unit_pieces(flavor: str, vocab_size: int, world_size: int) -> dict[str, list[int]]:
    """Bytes of each owner's share of the embedding, of one block, and of the output unit, by the plan."""
    with torch.device("meta"):
        model = build_model("llama3", flavor, vocab_size=vocab_size, max_seq_len=128)
    config = Config(model=ModelConfig(flavor=flavor), training=TrainingConfig(global_batch_size=1))
    shares = unit_shares(make_plan(model_specs(model, config), world_size), element_bytes=4)
    return {
        name: shares[name]
        for name in shares
        if not name.startswith("layers.") or name == "layers.0"
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Transports against their formulas; run on every rank."
    )
    parser.add_argument("--flavor", default="netlab", help="model whose plan is moved")
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rate", default="", help="the links' rate, for predictions, such as 10mbit"
    )
    arguments = parser.parse_args(argv)
    world = init_world(Config())
    wire = WireCounter(world)
    transports = {
        name: (kind(dist.new_group()), kind(dist.new_group())) for name, kind in TRANSPORTS.items()
    }
    for unit, shares in unit_pieces(arguments.flavor, arguments.vocab_size, world.size).items():
        pieces = [
            Piece(owner, torch.ones(share // 4)) for owner, share in enumerate(shares) if share
        ]
        seconds: dict[tuple[str, str], list[float]] = {}
        sent: dict[tuple[str, str], list[float]] = {}
        for _ in range(arguments.rounds):
            for name, (unshard, reduce) in transports.items():
                for direction, move in (("unshard", unshard.unshard), ("reduce", reduce.reduce)):
                    dist.barrier()
                    before, start = wire.sent(), time.perf_counter()
                    for work in move(pieces):
                        work.wait()
                    took = torch.tensor(time.perf_counter() - start)
                    dist.all_reduce(took, dist.ReduceOp.MAX)  # and all sends are done
                    after = wire.sent()
                    seconds.setdefault((name, direction), []).append(took.item())
                    if before is not None and after is not None:
                        sent.setdefault((name, direction), []).append(after - before)
        if world.rank == 0:
            print(
                f"\n{unit}: {sum(shares)} bytes, largest share {max(shares)}, smallest {min(shares)}"
            )
            print(
                "transport  direction   measured ms  predicted ms  ratio   sent by all      due  ratio"
            )
        for (name, direction), samples in seconds.items():
            measured = statistics.median(samples)
            line = f"{name:9}  {direction:9}  {1e3 * measured:12.1f}"
            if arguments.rate:
                rate = link_bytes_per_second(arguments.rate)
                predicted = transport_seconds(cast(Any, name), shares, rate, backend="gloo")
                line += f"  {1e3 * predicted:12.1f}  {measured / predicted:5.2f}"
            samples = sent.get((name, direction), [])
            if samples and wire.interface != "lo":
                everyone = torch.tensor(statistics.median(samples))
                dist.all_reduce(everyone)
                due = (world.size - 1) * sum(
                    shares
                )  # every rank receives what it lacks, or sends it
                line += f"  {everyone.item():12.0f}  {due:8d}  {everyone.item() / due:5.3f}"
            if world.rank == 0:
                print(line)
    for pair in transports.values():
        for transport in pair:
            transport.close()
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
