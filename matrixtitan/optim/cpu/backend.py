"""Which form, products and batches a shape takes on CPUs in float32.

It comes from `newton_schulz_table.py`, a fixed table that `tools/ns_table.py` measured, and from the kind of processor:
never from timing, so a run can be repeated. Next: `strips.py`, `onednn.py`.
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
from matrixtitan.optim.products import WHOLE, Backend, Choice


class CpuBackend(Backend):
    """oneDNN's products for large single matrices where they pay, else the table's."""

    def choose(self, x: Tensor) -> Choice:
        rows, cols = x.shape[-2:]
        if x.dtype != torch.float32:
            return super().choose(x)
        if x.ndim == 2 and _takes_onednn(rows, cols):
            return super().choose(x)._replace(products=onednn.OneDnn())
        return table_choice(rows, cols, x.ndim > 2)

    def batch_size(self, rows: int, cols: int) -> int:
        """What a batch holds must stay in a core's cache; oneDNN's product takes no batches."""
        if _takes_onednn(rows, cols):
            return 1
        return max(1, BATCH_ELEMENTS // max(1, rows * cols))


def _takes_onednn(rows: int, cols: int) -> bool:
    return min(rows, cols) >= ONEDNN_ROWS and onednn.pays()


@lru_cache(maxsize=1024)
def table_choice(rows: int, cols: int, batched: bool) -> Choice:
    """What the table says of the largest measured size and ratio not above those of (rows, cols), rows <= cols."""
    table = BATCHED_FORMS if batched else FORMS
    by_ratio = table[max((size for size in table if size <= rows), default=min(table))]
    ratio = cols / max(rows, 1)
    return choice_of(by_ratio[max((r for r in by_ratio if r <= ratio), default=min(by_ratio))])


def choice_of(entry: FormEntry) -> Choice:
    """What an entry of the table stands for."""
    form, wide_depth, depth = entry
    return Choice(form, Strips(wide_depth, depth) if wide_depth or depth else WHOLE)
