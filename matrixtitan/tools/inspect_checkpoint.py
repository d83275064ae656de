"""Show what a checkpoint holds: step, sizes, plan, config and tensors.

    matrixtitan inspect_checkpoint PATH [--verify] [--no-norms] [--keys 'model.layers.0.*'] [--json]

PATH is a step-N folder, a folder of steps (the newest is taken) or a run's folder. Each tensor is
shown with its shape, dtype and norm. One process is enough, with memory for one stored chunk.
`--verify` reads every byte and compares it with its checksum; the exit status is 1 if something is
damaged. Reading a checkpoint runs no code from it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from matrixtitan.checkpoint import CheckpointError, StoredCheckpoint
from matrixtitan.checkpoint.reading import CONFIG_FILE, PLAN_FILE, find_checkpoint
from matrixtitan.plan.shard import Plan
from matrixtitan.tools import make_parser


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        stored = StoredCheckpoint.open(find_checkpoint(options.path), allow_foreign=True)
        if options.verify:
            return _verify(stored)
        figures = describe(stored, options.keys, norms=not options.no_norms)
        print(json.dumps(figures) if options.json else "\n".join(_lines(figures)))
    except (CheckpointError, ValueError, OSError) as error:
        print(f"inspect_checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--verify", action="store_true", help="compare every byte with its checksum"
    )
    parser.add_argument("--no-norms", action="store_true", help="do not read the tensors")
    parser.add_argument("--keys", default="*", help="only tensors whose key matches, with * and ?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def describe(stored: StoredCheckpoint, keys: str = "*", *, norms: bool = True) -> dict[str, Any]:
    """Everything that is printed. Norms are Frobenius norms, in float64.

    Raises ValueError if `keys` matches none of the tensors.
    """
    entries = {key: entry for key, entry in stored.tensors.items() if fnmatchcase(key, keys)}
    if stored.tensors and not entries:
        near = ", ".join(get_close_matches(keys, stored.tensors, n=3, cutoff=0.0))
        raise ValueError(
            f"--keys {keys!r} matches none of the {len(stored.tensors)} tensors of {stored.path}; "
            f"the nearest are {near}"
        )
    tensors: dict[str, dict[str, Any]] = {
        key: {
            "shape": list(entry.size),
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "chunks": len(entry.chunks),
            "bytes": prod(entry.size) * entry.properties.dtype.itemsize,
            **({"norm": _norm(stored, key)} if norms else {}),
        }
        for key, entry in sorted(entries.items())
    }
    sections: dict[str, dict[str, int]] = {}
    for key, tensor in tensors.items():
        section = sections.setdefault(key.split(".", 1)[0], {"tensors": 0, "bytes": 0})
        section["tensors"] += 1
        section["bytes"] += tensor["bytes"]
    files = stored.checksums.files if stored.checksums else {}
    return {
        "path": str(stored.path),
        "meta": stored.meta,
        "disk_bytes": sum(path.stat().st_size for path in stored.path.iterdir()),
        "sections": sections,
        "plan": stored.read_json(PLAN_FILE) if PLAN_FILE in files else None,
        "config": stored.read_json(CONFIG_FILE) if CONFIG_FILE in files else None,
        "tensors": tensors,
    }


def _norm(stored: StoredCheckpoint, key: str) -> float:
    return math.sqrt(sum(part.double().square().sum().item() for _, part in stored.chunks(key)))


def _verify(stored: StoredCheckpoint) -> int:
    if stored.checksums is None:
        print(f"{stored.path} has no checksums: this project did not write it")
        return 1
    damaged = list(stored.checksums.damaged(stored.path))
    for line in damaged:
        print(line)
    count = len(stored.checksums.chunks) + len(stored.checksums.files)
    print(f"{stored.path}: {count - len(damaged)} of {count} chunks and files are as written")
    return 1 if damaged else 0


def _lines(figures: dict[str, Any]) -> list[str]:
    meta = figures["meta"]
    lines = [figures["path"]]
    if meta:
        state = meta["train_state"]
        lines += [
            f"step {state['step']}, {state['tokens_seen']:,} tokens seen, next window "
            f"{state['window']:,}, skipped steps {state['skipped_steps']}",
            f"contents {meta['contents']}, saved {meta['saved_at']} by {meta['world_size']} ranks, "
            f"torch {meta['torch']}",
        ]
    lines.append(f"{_size(figures['disk_bytes'])} on disk")
    for name, section in figures["sections"].items():
        lines.append(f"  {name:12} {section['tensors']:6} tensors {_size(section['bytes']):>10}")
    if figures["plan"]:
        lines += ["", *_plan_lines(Plan.from_json(figures["plan"]))]
    if figures["config"]:
        lines += ["", "config"]
        for section, keys in figures["config"].items():
            lines.append(f"  [{section}] " + ", ".join(f"{k} = {v!r}" for k, v in keys.items()))
    lines += ["", f"{'key':60} {'shape':>20} {'dtype':>9} {'chunks':>6} {'norm':>12}"]
    for key, tensor in figures["tensors"].items():
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        norm = f"{tensor['norm']:12.6g}" if "norm" in tensor else f"{'':12}"
        lines.append(f"{key:60} {shape:>20} {tensor['dtype']:>9} {tensor['chunks']:6} {norm}")
    return lines


def _plan_lines(plan: Plan) -> list[str]:
    """For each rank of the shard group, its whole parameters and the number of split ones."""
    lines = [f"plan for {plan.world_size} ranks, digest {plan.digest[:12]}"]
    for rank in range(plan.world_size):
        held = [(shard, segment) for shard in plan.shards if (segment := shard.segment(rank))]
        whole = [shard.fqn for shard, _ in held if shard.is_whole]
        numel = sum(segment.rows * shard.row_numel for shard, segment in held)
        named = ", ".join(whole[:4]) + (f" and {len(whole) - 4} more" if len(whole) > 4 else "")
        lines.append(
            f"  rank {rank}: {numel:,} elements; {len(whole)} whole ({named}), "
            f"rows of {len(held) - len(whole)}"
        )
    return lines


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
