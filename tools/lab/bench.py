"""Measure every strategy on the same model and data in one run: times, bytes sent, bytes held.

    python tools/lab/bench.py --config bench_cpu.toml --nproc 4 --steps 12 --warmup 3 \\
        --strategies matrix_fsdp,fsdp2_all_to_all,ddp --output outputs/bench

Strategies alternate, so that a noisy machine slows all of them alike. With --nproc the bench starts
the ranks itself. Without, it is one rank of the job that a launcher (torchrun, netlab.py) set up,
or a job of one rank. `_stock` after an fsdp2 strategy's name selects PyTorch's own collectives.
Further `--section.key value` pairs override the config. Next: `bench_measure.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# otherwise the memory trace announces itself
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import bench_report
import checkout  # noqa: F401
from bench_measure import (
    STRATEGY_KEYS,
    VOCAB_SIZE,
    Contender,
    Corpus,
    Measurements,
    matmul_flops,
    strategy_config,
    wire_interface,
)
from matrixtitan.config import EMBEDDED_OVERRIDES, Config, load_config
from matrixtitan.mesh import World, init_world
from matrixtitan.metrics import peak_flops
from matrixtitan.ranks import split_batch
from models.base import LanguageModel

FREE_STEPS = 2
"""Steps in one sample of `step_ms`. No barrier separates them."""
COMMUNICATION_REPEATS = 5
"""Upper limit on replays of a phase's collectives; --steps is another."""


def main(argv: Sequence[str]) -> int:
    options, overrides = parse_arguments(argv)
    try:
        # the bench has its own corpus, so the config's data need not exist here
        own = shlex.split(EMBEDDED_OVERRIDES)
        config = load_config(["--config", options.config, *own, *overrides])
        for name in options.strategies:
            strategy_config(config, name)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.nproc is not None and "RANK" not in os.environ:
        return launch(options.nproc, argv)
    run_rank(options, config, " ".join(["python tools/lab/bench.py", shlex.join(argv)]))
    return 0


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The bench's own options, and the overrides of the config."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="bench_cpu.toml")
    parser.add_argument("--nproc", type=int, help="start this many ranks here")
    parser.add_argument(
        "--strategies", type=lambda text: text.split(","), default=list(STRATEGY_KEYS)
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=12,
        help="samples of each phase, and as many steps without barriers between phases",
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/bench"),
        help="folder of bench.json, .md and, with matplotlib, .png",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=VOCAB_SIZE,
        help="rows of embedding and head; the corpus is bytes, so rows after 256 only cost time",
    )
    options, overrides = parser.parse_known_args(argv)
    if options.steps < 1 or options.warmup < 1:
        parser.error(
            "--steps and --warmup must be at least 1: the first step allocates buffers that later "
            "steps reuse"
        )
    return options, overrides


def launch(nproc: int, argv: Sequence[str]) -> int:
    """Start the ranks on this machine. The first failure ends the others and is returned."""
    threads = max(1, (os.cpu_count() or 1) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with TemporaryDirectory(prefix="bench_") as errors:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="bench",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # any free port
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=errors),
        )
        try:
            elastic_launch(config, sys.executable)(__file__, *argv)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            print(f"bench: rank {rank} failed: {failure.message}", file=sys.stderr)
            return failure.exitcode
        except SignalException as ended:
            return 128 + ended.sigval
    return 0


def run_rank(options: argparse.Namespace, config: Config, command: str) -> None:
    """Measure all strategies together with the other ranks. Rank 0 reports."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with init_world(config) as world:
        training = config.training
        local_batch_size = (
            training.local_batch_size or split_batch(training, world.size).local_batch_size
        )
        corpus = Corpus(world, local_batch_size * world.size, training.seq_len)
        contenders = [
            Contender(name, config, world, corpus, options.vocab_size)
            for name in options.strategies
        ]
        measure(contenders, options.steps, options.warmup)
        model = contenders[0].model
        rate = torch.tensor(matmul_flops(world.device), dtype=torch.float64, device=world.device)
        dist.all_reduce(rate)
        mine = {contender.name: contender.finish() for contender in contenders}
        ranks = world.gather_objects(mine)
        if world.rank == 0:
            report = describe(config, world, corpus, model, command)
            report["matmul_flops_per_rank"] = rate.item() / world.size
            add_strategies(report, ranks, shared_interface=wire_interface(world.size) == "lo")
            bench_report.write(report, options.output)
            print(bench_report.table(report), flush=True)


def measure(contenders: Sequence[Contender], steps: int, warmup: int) -> None:
    """Rounds in which every strategy takes a turn. Each round begins with another strategy."""
    for contender in contenders:
        contender.warm_up(warmup)
    # a garbage collection on one rank would make the others wait
    gc.disable()
    try:
        for number in range(steps):
            for contender in _rotated(contenders, number):
                contender.sample_phases()
            gc.collect()
        for number in range(ceil(steps / FREE_STEPS)):
            for contender in _rotated(contenders, number):
                contender.sample_steps(FREE_STEPS)
            gc.collect()
    finally:
        gc.enable()
    for contender in contenders:
        contender.count_communication(min(steps, COMMUNICATION_REPEATS))
        contender.measure_memory()


def _rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def describe(
    config: Config, world: World, corpus: Corpus, model: LanguageModel, command: str
) -> dict[str, Any]:
    """The part of bench.json that does not depend on the strategy."""
    backend = dist.get_backend()
    transports = config.parallelism.fsdp2_transports
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else cpu_name()
    return {
        "world_size": world.size,
        "ns_steps": getattr(config.optimizer.rule, "ns_steps", None),
        "model": {
            "name": config.model.name,
            "flavor": config.model.flavor,
            "parameters": model.num_parameters,
            "flops_per_token": model.flops_per_token(corpus.seq_len),
        },
        "optimizer": config.optimizer.name,
        "backend": backend,
        "fsdp2_transports": ("tuned" if backend == "gloo" else "stock")
        if transports == "auto"
        else transports,
        "sequences": corpus.sequences,
        "seq_len": corpus.seq_len,
        "link_rate": os.environ.get("NETLAB_RATE"),
        "device": device,
        "peak_flops": peak_flops(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "command": command,
    }


def cpu_name() -> str:
    """The processor's name on Linux; elsewhere the architecture."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def add_strategies(
    report: dict[str, Any], ranks: Sequence[dict[str, Measurements]], *, shared_interface: bool
) -> None:
    """Fill in `strategies` and `ratios` from all ranks' measurements.

    MFU is relative to the device's dense bfloat16 peak, and None if the peak is not known.
    """
    report["strategies"] = {
        name: bench_report.summarize([rank[name] for rank in ranks], shared_interface)
        for name in ranks[0]
    }
    peak = report["peak_flops"]
    for entry in report["strategies"].values():
        rate = report["sequences"] * report["seq_len"] / entry["step_ms"] * 1e3
        entry["tokens_per_second"] = rate
        entry["mfu"] = (
            rate * report["model"]["flops_per_token"] / (peak * report["world_size"])
            if peak
            else None
        )
    report["ratios"] = bench_report.ratios(report["strategies"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
