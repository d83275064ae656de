"""Newton-Schulz on CPUs in float32: which form, products and batches a shape takes.

The answers come from `newton_schulz_table.py`, a fixed table that `tools/lab/ns_table.py` measured,
and from the kind of processor. They never come from timing, so a run can be repeated. Next:
`strips.py`, `onednn.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from matrixtitan.optim.cpu import onednn
from matrixtitan.optim.cpu.newton_schulz_table import (
    BATCH_ELEMENTS,
    BATCHED_FORMS,
    FORMS,
    ONEDNN_ROWS,
    FormEntry,
)
from matrixtitan.optim.cpu.strips import Strips
from matrixtitan.optim.products import WHOLE, Choice, choose_by_flops


def choose(x: Tensor) -> Choice:
    """How to iterate on x (..., R, C), R <= C."""
    rows, cols = x.shape[-2:]
    if x.dtype != torch.float32:
        return choose_by_flops(x)
    if x.ndim == 2 and _takes_onednn(rows, cols):
        return choose_by_flops(x)._replace(products=onednn.OneDnn())
    return table_choice(rows, cols, batched=x.ndim > 2)


def batch_size(rows: int, cols: int) -> int:
    """How many matrices (rows, cols) to multiply as one batch; 1 means each alone.

    A batch must stay in a core's cache. oneDNN's product takes no batches.
    """
    if _takes_onednn(rows, cols):
        return 1
    return max(1, BATCH_ELEMENTS // max(1, rows * cols))


def _takes_onednn(rows: int, cols: int) -> bool:
    return min(rows, cols) >= ONEDNN_ROWS and onednn.pays()


@lru_cache(maxsize=1024)
def table_choice(rows: int, cols: int, *, batched: bool) -> Choice:
    """The table's choice for (rows, cols), rows <= cols.

    The entry taken is that of the largest measured size, then of the largest measured ratio, which
    do not exceed those of the shape.
    """
    table = BATCHED_FORMS if batched else FORMS
    by_ratio = table[max((size for size in table if size <= rows), default=min(table))]
    ratio = cols / max(rows, 1)
    return choice_of(by_ratio[max((r for r in by_ratio if r <= ratio), default=min(by_ratio))])


def choice_of(entry: FormEntry) -> Choice:
    """What an entry of the table stands for."""
    form, wide_depth, depth = entry
    return Choice(form, Strips(wide_depth, depth) if wide_depth or depth else WHOLE)
