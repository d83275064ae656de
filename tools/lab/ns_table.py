"""Measure the fastest form of Newton-Schulz for each shape on this CPU, and write a table of them.

    python tools/lab/ns_table.py --write          measure and rewrite the table (15 minutes)
    python tools/lab/ns_table.py --write-batches  only the table's figures for batches (2 minutes)
    python tools/lab/ns_table.py --report         our time against the plain iteration's

The table is matrixtitan/optim/cpu/newton_schulz_table.py, for one thread and float32. Runs read it
and never measure, so two runs of one config do the same arithmetic. Candidates are timed in
alternation, so that a busy machine slows all of them alike. The report compares medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import log
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import checkout  # noqa: F401
from matrixtitan.optim import cpu
from matrixtitan.optim import newton_schulz as ns
from matrixtitan.optim.batching import orthogonalize
from matrixtitan.optim.cpu import newton_schulz_table, onednn
from matrixtitan.optim.cpu.newton_schulz_table import FormEntry
from matrixtitan.optim.cpu.strips import Strips
from matrixtitan.optim.newton_schulz import QUINTIC, make_newton_schulz
from matrixtitan.optim.products import WHOLE, Choice

TABLE = Path(newton_schulz_table.__file__)
SIZES = (16, 32, 64, 128, 256, 512, 768, 1024)
RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0)
DEPTHS = (0, 1, 2, 3)
BATCHED_SIZES = (16, 32, 64, 128)
BATCH_LIMITS = tuple(factor << power for power in range(13, 19) for factor in (2, 3))
BATCH_SHAPES = (
    *((16, 16), (16, 256), (32, 32), (32, 1024), (64, 64), (64, 256), (64, 1024)),
    *((96, 96), (96, 288), (128, 128), (128, 384), (192, 192), (256, 256)),
)
REPORT_SHAPES = (
    *((size, size) for size in (64, 128, 256, 512, 768)),
    *(
        (64, 192),
        (128, 384),
        (128, 512),
        (256, 768),
        (256, 1024),
        (512, 1536),
        (512, 2048),
        (768, 2304),
        (2048, 512),
    ),
)
Forms = dict[int, dict[float, FormEntry]]

SEVERAL = 4
MARGIN = 1.03
"""How much faster a candidate must be to replace the simpler one, because of noise."""

TEMPLATE = '''"""Which form of Newton-Schulz a shape takes. Written by `tools/lab/ns_table.py`."""

from typing import Literal

FormEntry = tuple[Literal["standard", "gram"], int, int]

FORMS: dict[int, dict[float, FormEntry]] = {{
{forms}}}
"""short side -> long side / short side -> (form, depth of X X^T, depth of (R, R) products).

For float32 on the CPU, measured with one thread."""

BATCHED_FORMS: dict[int, dict[float, FormEntry]] = {{
{batched}}}
"""The same for batches of equal shapes, which share the cost of a call."""

BATCH_ELEMENTS = {batch_elements}
"""Elements up to which equal shapes are multiplied as one batch."""

ONEDNN_ROWS = {onednn_rows}
"""The smallest short side that uses oneDNN's products, if they pay (see `onednn.py`)."""
'''


def alternating_times(
    candidates: Sequence[Callable[[], object]], seconds: float
) -> list[list[float]]:
    """Seconds of every call of each candidate, called in turn for about `seconds` in total.

    There are at least 5 rounds.
    """
    for candidate in candidates:
        candidate()
    times: list[list[float]] = [[] for _ in candidates]
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for candidate, record in zip(candidates, times, strict=True):
            start = time.perf_counter()
            candidate()
            record.append(time.perf_counter() - start)
    return times


def alternating_medians(candidates: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The median of each candidate's `alternating_times`."""
    return [median(record) for record in alternating_times(candidates, seconds)]


def relative_medians(candidates: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The median over the rounds of each candidate's time relative to the first candidate's.

    A disturbance that lasts longer than a round cancels.
    """
    first, *others = alternating_times(candidates, seconds)
    return [1.0, *(median(t / f for t, f in zip(record, first, strict=True)) for record in others)]


def plain(matrix: Tensor) -> Tensor:
    """torch.optim.Muon's iteration, in float32."""
    a, b, c = QUINTIC
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.mT if tall else x


def loop(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The plain iteration of several matrices."""
    return [plain(matrix) for matrix in matrices]


def best_form(rows: int, ratio: float, seconds: float, *, batched: bool) -> FormEntry:
    """The fastest form of the whole iteration for (rows, rows * ratio), or for a batch of them.

    Depths are searched one after the other. The whole iteration is timed, since a product that is
    timed alone finds its operands in other caches.
    """
    cols = round(rows * ratio)
    x = torch.randn(rows, cols)
    if batched:
        x = x.expand(max(2, cpu.batch_size(rows, cols)), rows, cols).contiguous()
    settings = make_newton_schulz()

    def fastest(entries: Sequence[FormEntry], margin: float = 1.0) -> FormEntry:
        choices = [cpu.choice_of(entry) for entry in entries]
        calls = [partial(ns.iterate, x, settings, choice) for choice in choices]
        times = relative_medians(calls, seconds)
        best = times.index(min(times))
        return entries[best if times[best] * margin < 1 else 0]

    whole: FormEntry = ("standard", 0, 0)
    found = []
    for form in ("standard", "gram"):
        entry: FormEntry = (form, 0, 0)
        if not batched:
            entry = fastest([(form, depth, 0) for depth in DEPTHS])
            entry = fastest([(form, entry[1], depth) for depth in DEPTHS])
        found.append(entry)
    return fastest([whole, fastest(found)], MARGIN)


def batch_elements(seconds: float) -> int:
    """The smallest limit on a batch's elements that is nearly as fast as the fastest limit.

    Limits are compared by the mean logarithm of their times over BATCH_SHAPES. Of each shape there
    are as many matrices as fit the largest limit.
    """
    logs = [0.0] * len(BATCH_LIMITS)
    settings = make_newton_schulz()
    before = cpu.BATCH_ELEMENTS

    def limited(matrices: list[Tensor], limit: int) -> None:
        cpu.BATCH_ELEMENTS = limit
        orthogonalize(matrices, settings)

    for rows, cols in BATCH_SHAPES:
        count = BATCH_LIMITS[-1] // (rows * cols)
        matrices = [torch.randn(rows, cols) for _ in range(count)]
        times = relative_medians(
            [partial(limited, matrices, limit) for limit in BATCH_LIMITS], seconds
        )
        print(f"{rows}x{cols}", *(f"{t:.2f}" for t in times), flush=True)
        logs = [total + log(t) for total, t in zip(logs, times, strict=True)]
    cpu.BATCH_ELEMENTS = before
    nearly = min(logs) + len(BATCH_SHAPES) * log(MARGIN)
    return next(limit for limit, total in zip(BATCH_LIMITS, logs, strict=True) if total < nearly)


def onednn_rows(seconds: float) -> int:
    """The smallest size at which oneDNN's products are faster for square and 1:3 matrices.

    The table's present value if oneDNN does not pay on this machine.
    """
    if not onednn.pays():
        return cpu.ONEDNN_ROWS
    settings = make_newton_schulz()
    for rows in SIZES:
        wins = []
        for ratio in (1, 3):
            x = torch.randn(rows, rows * ratio)
            table = cpu.table_choice(rows, rows * ratio, batched=False)
            choices = [table, Choice("gram" if ratio > 1 else "standard", onednn.OneDnn())]
            times = alternating_medians(
                [partial(ns.iterate, x, settings, choice) for choice in choices], seconds
            )
            wins.append(times[1] * MARGIN < times[0])
        if all(wins):
            return rows
    return 1 << 30


def measured_forms(sizes: Sequence[int], seconds: float, *, batched: bool = False) -> Forms:
    """The best form of every size and ratio."""
    forms: Forms = {}
    for rows in sizes:
        forms[rows] = {}
        for ratio in RATIOS:
            forms[rows][ratio] = best_form(rows, ratio, seconds, batched=batched)
            print(rows, ratio, *forms[rows][ratio], flush=True)
    return forms


def body(forms: Forms) -> str:
    """`forms` as the body of a dict in the module."""
    lines = []
    for rows, by_ratio in forms.items():
        lines.append(f"    {rows}: {{\n")
        for ratio, (form, wide_depth, depth) in by_ratio.items():
            lines.append(f'        {ratio}: ("{form}", {wide_depth}, {depth}),\n')
        lines.append("    },\n")
    return "".join(lines)


def write_table(seconds: float, *, batches_alone: bool) -> None:
    """Measure and write the module. Limits are measured with the forms of the present table."""
    cpu.BATCH_ELEMENTS = batch_elements(seconds)
    forms = cpu.FORMS if batches_alone else measured_forms(SIZES, seconds)
    TABLE.write_text(
        TEMPLATE.format(
            forms=body(forms),
            batched=body(measured_forms(BATCHED_SIZES, seconds, batched=True)),
            batch_elements=cpu.BATCH_ELEMENTS,
            onednn_rows=cpu.ONEDNN_ROWS if batches_alone else onednn_rows(seconds),
        )
    )


def report(seconds: float) -> None:
    """Print our speedup over the plain iteration, and the errors of both, for each shape.

    The second ratio is for SEVERAL equal matrices, over which the plain iteration loops.
    """
    print(
        "| shape | form | plain ms | ours ms | ratio | ratio, several | error of plain / ours |\n"
        "|---|---|---|---|---|---|---|"
    )
    settings = make_newton_schulz()
    for shape in REPORT_SHAPES:
        matrices = [torch.randn(shape) for _ in range(SEVERAL)]
        matrix = matrices[0]
        choice = ns.choose(matrix if shape[0] <= shape[1] else matrix.mT)
        products = {WHOLE: "whole", onednn.OneDnn(): "oneDNN"}.get(choice.products)
        if isinstance(choice.products, Strips):
            products = f"strips {1 << choice.products.wide_depth}, {1 << choice.products.depth}"
        before, after = alternating_medians(
            [partial(plain, matrix), partial(orthogonalize, [matrix], settings)], seconds
        )
        looped, batched = alternating_medians(
            [
                partial(loop, matrices),
                partial(orthogonalize, matrices, settings),
            ],
            seconds,
        )
        exact = plain(matrix.double())
        results = (plain(matrix), orthogonalize([matrix], settings)[0])
        errors = [(result.double() - exact).abs().max().item() for result in results]
        print(
            f"| {shape[0]}x{shape[1]} | {choice.form}, {products} | {before * 1e3:.3f} "
            f"| {after * 1e3:.3f} | {before / after:.2f} | {looped / batched:.2f} "
            f"| {errors[0]:.1e} / {errors[1]:.1e} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="measure and rewrite the table")
    parser.add_argument(
        "--write-batches", action="store_true", help="measure and rewrite the batches' part"
    )
    parser.add_argument("--report", action="store_true", help="compare with the plain iteration")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time per comparison (default 1)"
    )
    arguments = parser.parse_args()
    if not (arguments.write or arguments.write_batches or arguments.report):
        parser.error("give --write, --write-batches or --report")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.write or arguments.write_batches:
        write_table(arguments.seconds, batches_alone=not arguments.write)
    if arguments.report:
        report(arguments.seconds)


if __name__ == "__main__":
    main()
