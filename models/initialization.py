"""Initial values by rows: any rank can draw its own rows, and no rank draws the whole parameter.

Owns the split of a parameter into row blocks and the generator of each block. A row's values follow
from (seed, fqn, row) alone, whatever the number of ranks, the plan and the device. The model
chooses each parameter's distribution: read `llama.py` next.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

# Another number gives other initial values for the same seed.
ROWS_PER_BLOCK = 256


class Normal(NamedTuple):
    """Mean 0, standard deviation `std`; truncated at `cutoff` deviations, None: not truncated."""

    std: float
    cutoff: float | None = 3.0


def fill_rows(
    fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor, seed: int, normal: Normal
) -> None:
    """Write rows [start, start + len(out)) of parameter `fqn` into `out`, in place.

    Values are drawn on the CPU in float32, one block of ROWS_PER_BLOCK rows at a time, and then
    cast to `out`'s dtype and device. So they are the same for every split of the rows and every
    device, and for every dtype up to rounding.
    """
    stop = start + out.shape[0]
    if start < 0 or stop > full_shape[0] or tuple(out.shape[1:]) != tuple(full_shape[1:]):
        raise ValueError(
            f"{fqn}: rows [{start}, {stop}) of shape {tuple(out.shape)} do not fit its full "
            f"shape {full_shape}"
        )
    row = start
    while row < stop:
        block, skip = divmod(row, ROWS_PER_BLOCK)
        values = _draw_block(fqn, full_shape, block, seed, normal)[skip : skip + stop - row]
        out[row - start : row - start + len(values)].copy_(values)
        row += len(values)


def _draw_block(
    fqn: str, full_shape: tuple[int, ...], block: int, seed: int, normal: Normal
) -> Tensor:
    rows = min(ROWS_PER_BLOCK, full_shape[0] - block * ROWS_PER_BLOCK)
    digest = hashlib.sha256(f"{seed}/{fqn}/{block}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(rows, *full_shape[1:], dtype=torch.float32, device="cpu")
    if normal.cutoff is None:
        return values.normal_(0.0, normal.std, generator=generator)
    # The inverse of the normal distribution function, on the part of (-1, 1) inside the cutoff.
    bound = math.erf(normal.cutoff / math.sqrt(2.0))
    values.uniform_(-bound, bound, generator=generator)
    return values.erfinv_().mul_(normal.std * math.sqrt(2.0))
