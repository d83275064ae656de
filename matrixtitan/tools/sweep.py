"""Train over a grid of settings, for a table and a plot of validation losses.

    matrixtitan sweep --config debug_soap,debug_adamw --nproc 2 --grid optimizer.lr=0.002,0.004 \\
        --grid debug.seed=0,1,2

Every `--grid key=a,b,c` is one axis; commas within brackets do not separate values. Other
`--section.key value` pairs go to every run unchanged. `--jobs` runs train at a time; their times
are comparable only if each run has cores of its own. Each finished run becomes a line of
OUT/results.jsonl and is not trained again, so an interrupted sweep continues and a finer grid adds
to a coarse one. A run's log is OUT/runs/NAME/log.txt. The table averages over seeds (debug.seed).
The plot needs the `plots` extra.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import quote

from matrixtitan.curves import FILE_NAME, Curve, read_curves
from matrixtitan.extras import pyplot_for
from matrixtitan.tools import make_parser

ROOT = Path(__file__).resolve().parents[2]
SEED = "debug.seed"
LONGEST_NAME = 200

Settings = dict[str, str]


@dataclass(frozen=True)
class Result:
    """One run: settings, validation losses, mean time of an optimizer step, and the whole time."""

    settings: Settings
    validation: Curve
    optimizer_ms: float
    seconds: float

    @property
    def loss(self) -> float:
        """Of the last validation."""
        return self.validation[-1][1]


def parse_axis(text: str) -> tuple[str, list[str]]:
    """`key` and the values of "key=a,b,c"."""
    key, _, rest = text.partition("=")
    values = [""]
    depth = 0
    for character in rest:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    if not key or not all(values):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form section.key=value,value")
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value twice")
    return key, values


def run_folder(out: Path, settings: Settings) -> Path:
    """The folder of a run's files, named by its settings: quoted, and cut to a legal length."""
    name = quote("_".join(f"{key}-{value}" for key, value in settings.items()), safe="")
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{sha256(name.encode()).hexdigest()[:16]}"
    return out / "runs" / name


def run(settings: Settings, fixed: Sequence[str], nproc: int, folder: Path) -> Result:
    """Train once and read the curves. Raises RuntimeError, with the log's end, if training fails.

    Paths in the settings are relative to the working folder, as for train.py.
    """
    overrides = [word for key, value in settings.items() for word in (f"--{key}", value)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={nproc}",
    ]
    command += [str(ROOT / "train.py"), *overrides, *fixed]
    command += ["--job.dump_folder", str(folder), "--validation.enable", "true"]
    start = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        end = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(
            f"{settings} failed with exit code {done.returncode}; {log} ends with\n{end}"
        )
    curves = read_curves(folder / FILE_NAME)
    first, *later = [value for _, value in curves["time/optimizer_ms"]]
    optimizer_ms = mean(later or [first])  # the first step also loads libraries and allocates
    return Result(settings, curves["loss/validation"], optimizer_ms, seconds)


def load_results(path: Path) -> list[Result]:
    """The finished runs of a sweep."""
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def check_same_sweep(path: Path, common: dict[str, Any]) -> None:
    """Write what all runs of a folder share. ValueError if an earlier sweep there shares other
    settings."""
    if path.exists() and json.loads(path.read_text()) != common:
        raise ValueError(
            f"{path} says that this folder's runs share {path.read_text()}; choose another --out"
        )
    path.write_text(json.dumps(common))


def by_settings(results: Sequence[Result]) -> list[tuple[Settings, list[Result]]]:
    """Runs grouped by settings other than the seed, the lowest mean loss first."""
    groups: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in results:
        key = tuple((name, value) for name, value in result.settings.items() if name != SEED)
        groups.setdefault(key, []).append(result)
    found = [(dict(key), group) for key, group in groups.items()]
    return sorted(found, key=lambda entry: mean(result.loss for result in entry[1]))


def table(results: Sequence[Result]) -> str:
    """A Markdown table: settings, validation loss (mean, lowest to highest over seeds), time."""
    groups = by_settings(results)
    keys = list(dict.fromkeys(key for settings, _ in groups for key in settings))
    lines = [
        "| "
        + " | ".join([*keys, "seeds", "validation loss", "range", "optimizer ms", "run s"])
        + " |"
    ]
    lines.append("|---" * (len(keys) + 5) + "|")
    for settings, group in groups:
        losses = [result.loss for result in group]
        cells = [settings.get(key, "") for key in keys]
        cells += [str(len(group)), f"{mean(losses):.4f}", f"{min(losses):.4f} to {max(losses):.4f}"]
        cells += [
            f"{mean(r.optimizer_ms for r in group):.1f}",
            f"{mean(r.seconds for r in group):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(results: Sequence[Result], path: Path) -> None:
    """Validation loss over steps, one line per setting, averaged over seeds."""
    plt = pyplot_for(path)
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(9, 6))
    for settings, group in by_settings(results):
        steps = [step for step, _ in group[0].validation]
        losses = [
            mean(values)
            for values in zip(*([loss for _, loss in r.validation] for r in group), strict=True)
        ]
        label = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
        axes.plot(steps, losses, marker="o", markersize=3, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument(
        "--config",
        type=lambda text: parse_axis(f"config={text}")[1],
        default=["debug"],
        help="config of every run; several, separated by commas, are an axis (default debug)",
    )
    parser.add_argument(
        "--grid",
        type=parse_axis,
        action="append",
        default=[],
        help="section.key=a,b,c; may be repeated",
    )
    parser.add_argument("--nproc", type=int, default=1, help="processes per run (default 1)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/sweep"), help="folder (default outputs/sweep)"
    )
    arguments, fixed = parser.parse_known_args(argv)
    if arguments.nproc < 1 or arguments.jobs < 1:
        parser.error("--nproc and --jobs must be at least 1")
    axes = [("config", arguments.config), *arguments.grid]
    if len(dict(axes)) < len(axes):
        parser.error("a key has two --grid; give its values in one")
    for word in fixed:
        if word.startswith("--") and word[2:].partition("=")[0] in dict(axes):
            parser.error(f"{word} is given for all runs and has a --grid; give it once")
    try:
        sweep(axes, fixed, arguments)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    return 0


def sweep(
    axes: Sequence[tuple[str, list[str]]], fixed: Sequence[str], arguments: argparse.Namespace
) -> None:
    """Train the missing runs of the grid, then write the table and the plot of all runs."""
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    check_same_sweep(out / "sweep.json", {"nproc": arguments.nproc, "fixed": list(fixed)})
    path = out / "results.jsonl"
    grid = [
        dict(zip((key for key, _ in axes), values, strict=True))
        for values in product(*(values for _, values in axes))
    ]
    results = load_results(path)
    missing = [
        settings for settings in grid if all(result.settings != settings for result in results)
    ]

    def make(settings: Settings) -> Result:
        return run(settings, fixed, arguments.nproc, run_folder(out, settings))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [pool.submit(make, settings) for settings in missing]
        try:
            for done in as_completed(runs):
                result = done.result()
                results.append(result)
                with path.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                print(
                    f"{len(results)}/{len(grid)} {result.settings}: {result.loss:.4f} in "
                    f"{result.seconds:.0f} s",
                    flush=True,
                )
        finally:
            # after a failure, runs that have begun end by themselves
            for waiting in runs:
                waiting.cancel()
    (out / "table.md").write_text(table(results))
    plot(results, out / "curves.png")
    print(table(results), end="")
