"""Plan a job without its machines: owners, memory, traffic and times.

    matrixtitan plan --config llama_8b.toml --world-size 64 [--replicas R] [--gpus-per-node 8]
        [--picture plan.png]

Prints the owners, each rank's bytes and optimizer FLOPs, the traffic and predicted times of every
strategy and transport, and each strategy's memory, term by term. Any `--section.key value` of the
config may follow. Nothing is allocated or measured; the formulas are in `matrixtitan/plan/` and
`matrixtitan/predict/`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import tomli
from torch import nn

from matrixtitan.config import (
    EMBEDDED_OVERRIDES,
    Config,
    config_from_dict,
    find_config,
    load_config,
)
from matrixtitan.data.tokenizer import load_tokenizer
from matrixtitan.extras import need
from matrixtitan.parallelize import meta_model, model_specs, plan_settings
from matrixtitan.plan.planner import make_plan
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.plan.transport_registry import ALL_GATHER
from matrixtitan.predict.degrees import CLOSE, degree_flags, degree_toml
from matrixtitan.predict.memory import Precision
from matrixtitan.predict.pictures import save_plan_picture
from matrixtitan.predict.report import predictions
from matrixtitan.predict.traffic import Job, Machine
from matrixtitan.tools import make_parser
from models import family
from models.base import LanguageModel

LARGEST = 10**9
"""The upper limit of numeric options. Up to it all figures are finite, as JSON requires."""

PHASE_NOTES = {
    "resident": "",
    "forward_backward": "  in forward and backward",
    "optimizer": "  in the step",
}
NOTHING_SENT = {"rank_bytes": 0, "link_bytes": 0, "seconds": 0.0}


class Vocabulary(NamedTuple):
    size: int
    origin: str


def main(argv: Sequence[str]) -> int:
    options, overrides = _parser().parse_known_args(argv)
    try:
        figures = plan_report(options, overrides)
    except (ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures) if options.json else "\n".join(_lines(figures)))
    return 0


def plan_report(options: argparse.Namespace, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The report of a config on the machines that the command line describes."""
    if options.picture:
        need("matplotlib")
    # a plan reads no data, so the config's files need not exist here
    embedded = shlex.split(EMBEDDED_OVERRIDES)
    config = load_config(["--config", options.config, *embedded, *overrides])
    vocabulary = _vocabulary(options, config, overrides)
    model = meta_model(config, vocabulary.size)
    parallelism, training = config.parallelism, config.training
    job = Job(
        world_size=options.world_size,
        replicas=options.replicas or parallelism.data_parallel_replicate_degree,
        gathered_once=_gathered_once(model, parallelism.fsdp_reshard_after_forward),
        keep_all=parallelism.fsdp_reshard_after_forward == "never",
        prefetch=parallelism.prefetch,
        microbatches=options.microbatches,
        transport=parallelism.transport,
    )
    machine = Machine(
        ranks_per_host=options.gpus_per_node,
        link_rate=options.link_gbit * 1e9 / 8,
        local_rate=options.local_gbit * 1e9 / 8,
        message_seconds=options.message_us * 1e-6,
        backend=options.backend,
        memory_bytes=options.gpu_memory_gb * 1e9,
        flops_rate=options.tflops * 1e12,
    )
    precision = Precision(
        stored=training.dtype,
        compute=training.mixed_precision_param,
        reduce=training.mixed_precision_reduce,
        update=_update_dtype(
            getattr(config.optimizer.rule, "ns_dtype", "float32"), options.backend
        ),
    )
    specs = model_specs(model, config)
    settings = plan_settings(config)
    plan = make_plan(specs, job.shard_ranks, settings)
    if options.picture:
        save_plan_picture(plan, settings, options.picture)
    return {
        "model": _model_figures(model, config, vocabulary, specs),
        **predictions(specs, plan, settings, precision, job, machine),
    }


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__name__, __doc__)
    parser.add_argument(
        "--config", required=True, help="a TOML file, or its name under train_configs/"
    )
    parser.add_argument("--world-size", type=_count, required=True, help="ranks of the whole job")
    parser.add_argument(
        "--replicas",
        type=_count,
        help="HSDP: number of shard groups, each with a whole model [the config's]",
    )
    parser.add_argument("--gpus-per-node", type=_count, default=8, help="ranks per host [8]")
    parser.add_argument(
        "--link-gbit",
        type=_rate,
        default=200.0,
        help="a host's network link, one way, in Gbit/s [200]",
    )
    parser.add_argument(
        "--local-gbit",
        type=_rate,
        default=inf,
        help="a rank's link inside its host, in Gbit/s [free]",
    )
    parser.add_argument(
        "--message-us", type=_latency, default=0.0, help="latency per message, in microseconds [0]"
    )
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="[nccl]")
    parser.add_argument(
        "--gpu-memory-gb", type=_rate, default=80.0, help="memory per rank, in GB [80]"
    )
    parser.add_argument(
        "--tflops",
        type=_rate,
        default=150.0,
        help="a rank's sustained rate in the optimizer, in TFLOP/s [150]",
    )
    parser.add_argument("--vocab-size", type=_count, help="[the tokenizer's]")
    parser.add_argument(
        "--microbatches",
        type=_count,
        default=1,
        help="microbatches per rank and step, each reduced [1]",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="also draw who owns what (.png, .svg, .pdf)"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LARGEST:.0e}")
    return int(text)


def _rate(text: str, least: float = 1 / LARGEST) -> float:
    value = float(text)
    if not least <= value <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from {least:g} to {LARGEST:.0e}"
        )
    return value


def _latency(text: str) -> float:
    return _rate(text, least=0.0)


def _vocabulary(
    options: argparse.Namespace, config: Config, overrides: Sequence[str]
) -> Vocabulary:
    """From the command line, else the config's tokenizer, else, if its file is missing, the family.

    ValueError if none of the three says it.
    """
    if options.vocab_size:
        return Vocabulary(options.vocab_size, "--vocab-size")
    path = config.model.tokenizer_path
    if not any(override.startswith("--model.tokenizer_path") for override in overrides):
        file = find_config(options.config)
        path = config_from_dict(tomli.loads(file.read_text()), str(file)).model.tokenizer_path
        if path and not Path(path).expanduser().exists():
            name = config.model.name
            published = family(name).published_vocab_size
            if published is None:
                raise ValueError(
                    f"model.tokenizer_path: there is no {path}, and the family {name} has no "
                    "vocabulary of its own: give the number of its entries with --vocab-size"
                )
            return Vocabulary(published, f"{name}'s, since {path} is not here")
    return Vocabulary(
        load_tokenizer(path, config.model.tokenizer_pattern).n_words,
        path or "the embedded tokenizer",
    )


def _gathered_once(model: LanguageModel, reshard_after_forward: str) -> list[str]:
    """Units that backward does not gather again: kept after forward, or an embedding alone."""
    names = ["+".join(modules) for modules in model.unit_names()]
    kept = {"never": names, "default": names[-1:], "always": []}[reshard_after_forward]
    lookups = [
        "+".join(modules)
        for modules in model.unit_names()
        if all(isinstance(model.get_submodule(module), nn.Embedding) for module in modules)
    ]
    return [*kept, *lookups]


def _update_dtype(ns_dtype: str, backend: str) -> str:
    """The dtype of FSDP2's exchanges, which is the dtype that Newton-Schulz starts from."""
    if ns_dtype != "auto":
        return ns_dtype
    return "bfloat16" if backend == "nccl" else "float32"


def _model_figures(
    model: LanguageModel, config: Config, vocabulary: Vocabulary, specs: Sequence[ParamSpec]
) -> dict[str, Any]:
    matrices = [spec for spec in specs if spec.role == "matrix"]
    return {
        "name": config.model.name,
        "flavor": config.model.flavor,
        "vocab_size": vocabulary.size,
        "vocab_from": vocabulary.origin,
        "parameters": model.num_parameters,
        "matrices": len(matrices),
        "matrix_parameters": sum(spec.numel for spec in matrices),
    }


# ---------------------------------------------------------------- the printed form


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    model, balance = figures["model"], figures["balance"]
    yield (
        f"{model['name']} {model['flavor']}: {model['parameters'] / 1e9:.2f} B parameters, "
        f"{model['matrices']} matrices; vocabulary {model['vocab_size']} ({model['vocab_from']})"
    )
    groups = (
        f"{figures['replicas']} replicas of {figures['shard_ranks']}"
        if figures["replicas"] > 1
        else "one group"
    )
    yield (
        f"{figures['world_size']} ranks, {groups}, {figures['ranks_per_host']} a host, "
        f"{figures['backend']}, {figures['link_gbit']:g} Gbit/s a host; "
        f"{figures['matrix_optimizer']}; plan {figures['digest'][:16]}"
    )
    yield ""
    yield f"balance.resident_bytes   {balance['resident_bytes']:.4f}   (max / mean over ranks)"
    iteration = f"   ({figures['ns_steps']} Newton-Schulz steps, in the form that takes fewer)"
    yield f"balance.optimizer_flops  {balance['optimizer_flops']:.4f}" + (
        iteration if figures["matrix_optimizer"] == "muon" else ""
    )
    for section in (
        _owner_lines,
        _rank_lines,
        _unit_lines,
        _traffic_lines,
        _memory_lines,
        _degree_lines,
    ):
        yield ""
        yield from section(figures)


def _owner_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Ranks with the same matrices share a line. The tail's rows appear in the bytes below only."""
    held: list[Counter[str]] = [Counter() for _ in range(figures["shard_ranks"])]
    for shard in figures["owners"]:
        if shard["role"] == "matrix":
            for rank, start, stop in shard["segments"]:
                blocks = (stop - start) // shard["block_rows"]
                shape = [shard["block_rows"], *shard["shape"][1:]]
                if len(shape) > 2:
                    shape = shape[1:]
                held[rank]["x".join(map(str, shape))] += blocks
    yield "matrices by owner"
    contents = [
        ", ".join(f"{count} of {shape}" for shape, count in sorted(c.items(), reverse=True))
        for c in held
    ]
    for content, ranks in groupby(range(len(contents)), key=lambda rank: contents[rank]):
        span = list(ranks)
        name = f"rank {span[0]}" if len(span) == 1 else f"ranks {span[0]}-{span[-1]}"
        yield f"  {name:<18} {content or 'no matrix'}"
    cut = Counter(
        len(shard["segments"]) for shard in figures["owners"] if len(shard["segments"]) > 1
    )
    for segments, count in sorted(cut.items()):
        yield f"  {count} parameters are cut into {segments} segments"


def _rank_lines(figures: dict[str, Any]) -> Iterator[str]:
    kinds = ("parameters", "gradients", "optimizer", "total")
    yield (
        f"{'resident, by rank':<22}"
        + "".join(f"{kind:>12}" for kind in kinds)
        + f"{'GFLOP a step':>14}"
    )
    ranks = figures["ranks"]
    order = sorted(ranks, key=lambda rank: rank["total"])
    for name, rank in (("emptiest", order[0]), ("fullest", order[-1])):
        sizes = [rank[kind] for kind in ("parameters", "gradients", "optimizer_state", "total")]
        label = f"{name} (rank {rank['rank']})"
        yield (
            f"{label:<22}"
            + "".join(f"{_size(size):>12}" for size in sizes)
            + f"{rank['optimizer_flops'] / 1e9:>14.1f}"
        )


def _unit_lines(figures: dict[str, Any]) -> Iterator[str]:
    """One line each for the first, a middle and the last unit, since blocks differ little."""
    units = figures["units"]
    chosen = sorted({0, len(units) // 2, len(units) - 1}) if units else []
    yield (
        f"{'one unshard, ms':<18}{'MB':>10}{'owners':>8}{'min share':>11}{'max share':>11}"
        + "".join(f"{name:>10}" for name in figures["transports"])
        + f"{'all-gather':>12}  auto"
    )
    for unit in (units[index] for index in chosen):
        times = unit["unshard_seconds"]
        yield (
            f"{unit['name']:<18}{unit['bytes'] / 1e6:>10.1f}{unit['owners']:>8}"
            f"{_share(unit, 'min_share'):>11}{_share(unit, 'max_share'):>11}"
            + "".join(f"{times[name] * 1e3:>10.2f}" for name in figures["transports"])
            + f"{times[ALL_GATHER] * 1e3:>12.2f}  {unit['auto']}"
        )


def _share(unit: dict[str, Any], key: str) -> str:
    return f"{100 * unit[key] / unit['bytes']:.1f}%" if unit["bytes"] else "-"


def _traffic_lines(figures: dict[str, Any]) -> Iterator[str]:
    header = f"{'a rank':>12}{'a link':>12}{'ms':>10}"
    yield f"{'one step':<28}{'forward + backward':>34}{'optimizer':>34}"
    yield f"{'':<28}{header}{header}"
    for name, transport in figures["transports"].items():
        sent = {
            "rank_bytes": transport["rank_bytes_at_most"],
            "link_bytes": transport["link_bytes_at_most"],
            "seconds": transport["seconds"],
        }
        yield f"{'matrix_fsdp, ' + name + ' (most)':<28}{_sent(sent)}{_sent(NOTHING_SENT)}"
    for name, phases in figures["strategies"].items():
        mean = name + (" (mean)" if name == "matrix_fsdp" else "")
        yield f"{mean:<28}" + "".join(
            _sent(phases[phase]) for phase in ("forward_backward", "optimizer")
        )
        if "replicas" in phases and name == "matrix_fsdp":
            yield f"{'  gradients over replicas':<28}{_sent(phases['replicas'])}"


def _sent(sent: dict[str, float]) -> str:
    sizes = f"{_size(sent['rank_bytes']):>12}{_size(sent['link_bytes']):>12}"
    return f"{sizes}{sent['seconds'] * 1e3:>10.1f}"


def _memory_lines(figures: dict[str, Any]) -> Iterator[str]:
    yield "memory of the fullest rank (activations apart)"
    for name, memory in figures["memory"].items():
        verdict = "" if memory["fits"] else "   DOES NOT FIT"
        yield f"  {name:<20}{_size(memory['peak_bytes']):>10} peak{verdict}"
        for term in memory["terms"]:
            line = f"    {term['name']:<34}{term['dtype']:<10}{_size(term['bytes']):>10}"
            yield line + PHASE_NOTES[term["phase"]]


def _degree_lines(figures: dict[str, Any]) -> Iterator[str]:
    """The degrees to choose from, the best of each criterion, and the keys that set them."""
    degrees = figures["degrees"]
    marks = {"least_memory": "least memory", "fastest": "fastest"}
    yield (
        f"degrees for {figures['world_size']} ranks: bytes of the fullest rank; ms of traffic (not "
        f"hidden) and optimizer; within {CLOSE - 1:.0%} counts as equal"
    )
    yield (
        f"  {'shards x replicas':<18}{'resident':>11}{'max/mean':>10}{'no matrix':>11}{'peak':>11}"
        f"{'a link':>11}{'traffic':>12}{'optimizer':>11}{'both':>12}"
    )
    for row in degrees["candidates"]:
        notes = [mark for key, mark in marks.items() if degrees[key] == row["shards"]]
        notes += ["this job"] if row["shards"] == figures["shard_ranks"] else []
        notes += [] if row["fits"] else ["DOES NOT FIT"]
        pair = f"{row['shards']} x {row['replicas']}"
        sizes = (_size(row[key]) for key in ("peak_bytes", "link_bytes"))
        times = (row["traffic_seconds"], row["optimizer_seconds"], row["step_seconds"])
        widths = (12, 11, 12)
        line = (
            f"  {pair:<18}{_size(row['fullest_bytes']):>11}{row['max_over_mean']:>10.2f}"
            f"{row['idle_ranks']:>11}"
            + "".join(f"{size:>11}" for size in sizes)
            + "".join(f"{1e3 * t:>{width}.1f}" for t, width in zip(times, widths, strict=True))
        )
        yield f"{line}  {', '.join(notes)}".rstrip()
    if degrees["skipped"]:
        most = max(degrees["skipped"])
        pair = f"{most} x {figures['world_size'] // most}"
        yield f"  {pair} or fewer shards: weights and states alone do not fit"
    for degree, reason in degrees["refused"].items():
        yield f"  {degree} shards: {reason}"
    yield from _recommended(degrees, figures["shard_ranks"])


def _recommended(degrees: dict[str, Any], shard_ranks: int) -> Iterator[str]:
    rows = {row["shards"]: row for row in degrees["candidates"]}
    least, fastest, even = (degrees[key] for key in ("least_memory", "fastest", "even"))
    if fastest is None:
        yield "no degrees fit in a rank's memory; these come nearest:"
    picks = {"least memory": least, "fastest": fastest}
    if least == fastest:
        picks = {"recommended, least memory and fastest": least}
    if even and even not in (least, fastest) and rows[least]["idle_ranks"]:
        picks["most shards with a matrix on every rank"] = even
    for title, shards in picks.items():
        if shards is None:
            continue
        row = rows[shards]
        same = " (as this job has it)" if shards == shard_ranks else ""
        yield f"{title}: {shards} x {row['replicas']}{same}"
        yield from (f"    {line}" for line in degree_toml(shards, row["replicas"]))
        yield f"  or {degree_flags(shards, row['replicas'])}"


def _size(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 1e3:.1f} kB" if size else "0"
