"""Measure the tables of strategies in docs/measurements/ again, and write them into their pages.

    python tools/lab/performance_tables.py                    all tables (about an hour)
    python tools/lab/performance_tables.py cpu-4 net-8-10mbit

The machine must be idle otherwise. Owns the list of tables and the command of each; the text around
the tables is written by hand. Each table stands between its own pair of markers. Next: `bench.py`,
which measures.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ROOT / "docs" / "measurements"
CONTENDERS = (
    "matrix_fsdp,fsdp2_gather_each,fsdp2_gather_once,fsdp2_all_to_all,fsdp2_all_to_all_stock,"
    "zero1_owner,ddp"
)
RATES = ("10mbit", "200mbit")


def commands() -> dict[str, list[str]]:
    """Name of a table -> the arguments of `python` that measure it, as in the document."""
    tables = {}
    for ranks in (2, 4, 8):
        bench = ["tools/lab/bench.py", "--config", "bench_cpu.toml", "--nproc", str(ranks)]
        tables[f"cpu-{ranks}"] = [
            *bench,
            "--strategies",
            CONTENDERS,
            "--steps",
            "12",
            "--warmup",
            "3",
        ]
    for rate in RATES:
        for hosts in (2, 4, 8):
            netlab = ["tools/lab/netlab.py", "--nodes", str(hosts), "--rate", rate, "--", "python"]
            bench = [
                "tools/lab/bench.py",
                "--config",
                "bench_netlab.toml",
                "--strategies",
                CONTENDERS,
            ]
            tables[f"net-{hosts}-{rate}"] = [*netlab, *bench, "--steps", "3", "--warmup", "1"]
    return tables


def document_of(name: str) -> Path:
    """The page that holds the table `name`."""
    return DOCUMENTS / ("one-machine.md" if name.startswith("cpu-") else "emulated-hosts.md")


def insert(document: str, name: str, table: str) -> str:
    """`document` with `table` between the markers of `name`; ValueError if they are missing."""
    begin, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
    if begin not in document or end not in document:
        raise ValueError(f"{document_of(name).name} has no markers {begin} and {end}")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{table.strip()}\n{end}", document)


def measure(name: str, arguments: Sequence[str], folder: Path) -> str:
    """Run one table's command, and return its Markdown."""
    real = [sys.executable if word == "python" else word for word in arguments]
    subprocess.run([sys.executable, *real, "--output", str(folder / name)], cwd=ROOT, check=True)
    table = (folder / name / "bench.md").read_text()
    shown = f"`python {' '.join(arguments)}`"
    return (
        re.sub(r"^`python .*`$", lambda _: shown, table, flags=re.MULTILINE)
        .replace("# ", "**", 1)
        .replace("\n", "**\n", 1)
    )


def main(argv: Sequence[str]) -> int:
    tables = commands()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(tables)}; none: all")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "performance")
    options = parser.parse_args(argv)
    unknown = set(options.tables) - set(tables)
    if unknown:
        parser.error(
            f"unknown tables {', '.join(sorted(unknown))}; choose from {', '.join(tables)}"
        )
    for name in options.tables or tables:
        table = measure(name, tables[name], options.output.absolute())
        table = f"Taken on {date.today()}.\n\n{table}"
        document = document_of(name)
        document.write_text(insert(document.read_text(), name, table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
