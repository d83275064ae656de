"""Combine the ranks' measurements into bench.json, a Markdown table and a picture.

Owns how each figure is reduced over ranks (the slowest, the fullest, the mean or the sum) and the
keys of bench.json. It measures nothing; see `bench_measure.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench_measure import Measurements
from matrixtitan.extras import pyplot_for

REFERENCE = "matrix_fsdp"
RATIOS = ("fwd_bwd_ms", "optimizer_ms", "step_ms", "resident_bytes_max", "peak_memory_bytes")
PHASES = ("fwd_bwd", "optimizer")
COLUMNS = (
    *("strategy", "forward+backward", "optimizer", "step"),
    *("f+b communication alone", "optimizer communication alone"),
    *("resident MB", "peak MB", "optimizer's transient MB", "f+b calls", "optimizer calls"),
    *("f+b logical MB", "optimizer logical MB", "f+b wire MB", "optimizer wire MB"),
)


def summarize(ranks: Sequence[Measurements], shared_interface: bool) -> dict[str, Any]:
    """One strategy's entry of bench.json from all ranks' measurements.

    Times are the slowest rank's in each sample. Logical bytes are the mean over ranks. With
    `shared_interface` (loopback) every rank reads the same counter, which counts all ranks' bytes.
    """
    entry: dict[str, Any] = {
        "losses": [sum(shares) for shares in zip(*(rank.losses for rank in ranks), strict=True)],
        "resident_bytes_max": max(rank.resident_bytes for rank in ranks),
        "peak_memory_bytes": max(rank.peak_memory_bytes for rank in ranks),
        "optimizer_transient_bytes": max(rank.optimizer_transient_bytes for rank in ranks),
        "collectives": {
            phase: {
                "calls": max(rank.calls[phase] for rank in ranks),
                "logical_bytes": sum(rank.logical_bytes[phase] for rank in ranks) / len(ranks),
                "calls_by_op": max(
                    (rank.calls_by_op[phase] for rank in ranks), key=lambda ops: sum(ops.values())
                ),
            }
            for phase in PHASES
        },
        "wire_bytes": _wire_bytes(ranks, shared_interface),
    }
    for name in ("fwd_bwd_ms", "optimizer_ms", "step_ms"):
        _add_times(entry, name, _slowest([getattr(rank, name) for rank in ranks]))
    for phase in PHASES:
        samples = _slowest([rank.communication_ms[phase] for rank in ranks])
        if samples:
            _add_times(entry, f"{phase}_communication_ms", samples)
    wire = entry["wire_bytes"]
    entry["wire_bytes_per_step"] = None if wire is None else sum(wire.values())
    return entry


def _wire_bytes(ranks: Sequence[Measurements], shared_interface: bool) -> dict[str, float] | None:
    readings = [rank.wire_bytes for rank in ranks if rank.wire_bytes is not None]
    if len(readings) < len(ranks):
        return None
    total = readings[:1] if shared_interface else readings
    return {phase: sum(reading[phase] for reading in total) / len(ranks) for phase in PHASES}


def _slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    return [max(values) for values in zip(*samples, strict=True)]


def _add_times(entry: dict[str, Any], name: str, samples: Sequence[float]) -> None:
    entry[name] = median(samples)
    entry[f"{name}_quartiles"] = _quartiles(samples)


def _quartiles(samples: Sequence[float]) -> list[float]:
    """The first and the third quartile."""
    if len(samples) < 2:
        return [samples[0], samples[0]]
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return [first, third]


def ratios(strategies: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Each strategy's figures over matrix_fsdp's. Empty if matrix_fsdp did not run."""
    if REFERENCE not in strategies:
        return {}
    ours = strategies[REFERENCE]
    return {
        name: {key: entry[key] / ours[key] for key in RATIOS} for name, entry in strategies.items()
    }


def table(report: Mapping[str, Any]) -> str:
    """The content of bench.md."""
    link = f" at {report['link_rate']}" if report["link_rate"] else ""
    lines = [
        f"# {report['model']['flavor']} ({report['model']['parameters']:,} parameters) on "
        f"{report['world_size']} {report['backend']} ranks{link}",
        "",
        f"{report['ns_steps']} Newton-Schulz steps; {report['sequences']} sequences of "
        f"{report['seq_len']} tokens a step; FSDP2's transports: {report['fsdp2_transports']}. "
        "Times in ms: median (quartiles) of the slowest rank.",
        _rates(report),
        f"`{report['command']}`",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    lines += [_row(name, entry) for name, entry in report["strategies"].items()]
    if report["peak_flops"]:
        lines += ["", "| strategy | tokens/s | MFU |", "|---|---|---|"]
        lines += [
            f"| {name} | {entry['tokens_per_second']:,.0f} | {entry['mfu']:.1%} |"
            for name, entry in report["strategies"].items()
        ]
    if report["ratios"]:
        lines += [
            "",
            "| over matrix_fsdp | " + " | ".join(RATIOS) + " |",
            "|---" * (len(RATIOS) + 1) + "|",
        ]
        lines += [
            f"| {name} | " + " | ".join(f"{values[key]:.2f}" for key in RATIOS) + " |"
            for name, values in report["ratios"].items()
        ]
    return "\n".join(lines) + "\n"


def _rates(report: Mapping[str, Any]) -> str:
    """A rank's FLOP/s, and its FLOPs per byte of the link beside a GPU cluster's figure."""
    flops = report["matmul_flops_per_rank"]
    text = f"{report['device']}; matrix products: {flops / 1e9:.3g} GFLOP/s a rank, all at once."
    if report["link_rate"] is None:
        return text
    link = link_bytes_per_second(report["link_rate"])
    return (
        f"{text} Over {link / 1e6:g} MB/s that is {flops / link:,.0f} FLOPs per byte (an A100's "
        "312 TFLOP/s over 25 GB/s: 12,480)."
    )


def link_bytes_per_second(rate: str) -> float:
    """Bytes per second of a rate as tc writes it, such as 10mbit.

    Raises ValueError for a unit other than kbit, mbit and gbit.
    """
    for unit, bits in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * bits / 8
    raise ValueError(f"link rate {rate!r}: write it in kbit, mbit or gbit")


def _row(name: str, entry: Mapping[str, Any]) -> str:
    collectives, wire = entry["collectives"], entry["wire_bytes"]
    cells = [
        name,
        _time(entry, "fwd_bwd_ms"),
        _time(entry, "optimizer_ms"),
        _time(entry, "step_ms"),
        *(_short(entry.get(f"{phase}_communication_ms")) for phase in PHASES),
        _megabytes(entry["resident_bytes_max"]),
        _megabytes(entry["peak_memory_bytes"]),
        _megabytes(entry["optimizer_transient_bytes"]),
        *(str(collectives[phase]["calls"]) for phase in PHASES),
        *(_megabytes(collectives[phase]["logical_bytes"]) for phase in PHASES),
        *("-" if wire is None else _megabytes(wire[phase]) for phase in PHASES),
    ]
    return "| " + " | ".join(cells) + " |"


def _time(entry: Mapping[str, Any], name: str) -> str:
    low, high = entry[f"{name}_quartiles"]
    return f"{entry[name]:.1f} ({low:.1f}-{high:.1f})"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g}"


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Write bench.json, bench.md and, with matplotlib, bench.png to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "bench.md").write_text(table(report))
    _draw(report, folder / "bench.png")


def _draw(report: Mapping[str, Any], path: Path) -> None:
    plt = pyplot_for(path)
    if plt is None:
        return
    names = list(report["strategies"])
    figure, axes = plt.subplots(1, 3, figsize=(13, 1.5 + 0.45 * len(names)), sharey=True)
    for axis, key, title in zip(
        axes,
        ("fwd_bwd_ms", "optimizer_ms", "step_ms"),
        ("forward + backward", "optimizer", "whole step"),
        strict=True,
    ):
        medians = [report["strategies"][name][key] for name in names]
        edges = [report["strategies"][name][f"{key}_quartiles"] for name in names]
        below = [value - low for value, (low, _) in zip(medians, edges, strict=True)]
        above = [high - value for value, (_, high) in zip(medians, edges, strict=True)]
        colors = ["tab:orange" if name == REFERENCE else "tab:blue" for name in names]
        axis.barh(names, medians, xerr=[below, above], color=colors)
        axis.set_title(f"{title}, ms")
        axis.invert_yaxis()
    figure.suptitle(
        f"{report['model']['flavor']}, {report['world_size']} ranks, "
        f"{report['ns_steps']} Newton-Schulz steps"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
