"""A plan as a picture and as a table: which rank owns what, its bytes and its optimizer work.

The picture needs matplotlib, the extra `plots`; it is imported only to draw. Owns how a plan looks,
for `tools/plan.py --picture`, TensorBoard and docs/figures. Figures come from `plan/cost.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matrixtitan.extras import need
from matrixtitan.plan.cost import CostSettings, block_cost, max_over_mean, rank_bytes, rank_flops
from matrixtitan.plan.shard import MatrixShard, Plan, Role, Segment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 64
"""Rows of a picture. With more ranks a row stands for several, and shows their mean."""
DETAILED_ROWS = 16
"""With at most so many rows each parameter is a block of its own; otherwise each unit is."""
LEGEND_UNITS = 8
"""Units with matrices that the legend names: the first, the last and evenly chosen ones between."""
PANEL_CHARACTERS = 160
"""Width of the left panel in characters of its smallest font."""

CUT_HATCH, WHOLE_TAIL_HATCH = "////", "xxxx"
GREYS = ("#c8c8c8", "#9a9a9a", "#6e6e6e")


class Held(NamedTuple):
    """What a row holds of one parameter, or of one unit's parameters of a kind."""

    name: str
    unit: str
    role: Role
    cut: bool
    """Whether other ranks own rows of the same parameter."""
    bytes: float
    """Resident: weights, gradients and optimizer state. The mean over the row's ranks."""


class Row(NamedTuple):
    """One rank, or a run of neighbouring ranks."""

    ranks: tuple[int, int]
    """The first and the last rank of the row."""
    pieces: list[Held]
    fullest_bytes: int
    """Resident bytes of the row's fullest rank."""
    flops: float
    """Optimizer FLOPs in one step: the mean over the row's ranks."""
    most_flops: int
    """Optimizer FLOPs in one step of the row's busiest rank."""


def plan_rows(plan: Plan, settings: CostSettings, most: int = MOST_ROWS) -> list[Row]:
    """The data of the picture. Matrices come first in a row, then whole tail parameters, then rows
    of cut ones, each in the model's order."""
    size = ceil(plan.world_size / most)
    count = ceil(plan.world_size / size)
    resident = [part.total for part in rank_bytes(plan, settings)]
    flops = rank_flops(plan, settings)
    held: list[dict[tuple[str, str, Role, bool], int]] = [{} for _ in range(count)]
    for shard in plan.shards:
        cost = block_cost(shard, settings)
        name = shard.fqn if count <= DETAILED_ROWS else shard.unit
        for segment in shard.segments:
            pieces = held[segment.rank // size]
            key = (name, shard.unit, shard.role, not shard.is_whole)
            blocks = segment.rows // shard.block_rows
            pieces[key] = pieces.get(key, 0) + blocks * cost.resident.total
    rows = []
    for index, pieces in enumerate(held):
        ranks = range(index * size, min((index + 1) * size, plan.world_size))
        ordered = sorted(pieces.items(), key=lambda item: (item[0][2] == "tail", item[0][3]))
        mine = [flops[rank] for rank in ranks]
        rows.append(
            Row(
                (ranks[0], ranks[-1]),
                [Held(*key, held_bytes / len(ranks)) for key, held_bytes in ordered],
                max(resident[rank] for rank in ranks),
                sum(mine) / len(ranks),
                max(mine),
            )
        )
    return rows


# ---------------------------------------------------------------- as a table


def plan_table(plan: Plan, settings: CostSettings) -> str:
    """One line for each rank: resident bytes, optimizer work, and what it owns of each unit."""
    resident, flops = rank_bytes(plan, settings), rank_flops(plan, settings)
    lines = [
        f"{len(plan.shards)} parameters on {plan.world_size} ranks; max / mean over ranks: "
        f"resident bytes {max_over_mean([part.total for part in resident]):.4f}, "
        f"optimizer work {max_over_mean(flops):.4f}",
        f"{'rank':>5}{'resident MB':>14}{'GFLOP a step':>14}  owns",
    ]
    owned: list[dict[str, list[str]]] = [{} for _ in range(plan.world_size)]
    for shard in plan.shards:
        for segment in shard.segments:
            names = owned[segment.rank].setdefault(shard.unit, [])
            names.append(_short_name(shard.fqn) + _rows_text(shard, segment))
    for rank, units in enumerate(owned):
        text = "; ".join(f"{unit}: {' '.join(names)}" for unit, names in units.items())
        size, work = resident[rank].total / 1e6, flops[rank] / 1e9
        lines.append(f"{rank:>5}{size:>14.2f}{work:>14.3f}  {text or 'nothing'}")
    return "\n".join(lines)


def _rows_text(shard: MatrixShard, segment: Segment) -> str:
    return "" if shard.is_whole else f"[{segment.start}:{segment.stop}]"


def _short_name(fqn: str) -> str:
    """`wq` of layers.0.attention.wq.weight."""
    parts = fqn.split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]


# ---------------------------------------------------------------- as a picture


def save_plan_picture(plan: Plan, settings: CostSettings, path: Path) -> None:
    """Write the picture; the name's end is the format. ValueError where matplotlib is missing."""
    need("matplotlib")
    plan_picture(plan, settings).savefig(path)


def plan_picture(plan: Plan, settings: CostSettings) -> Figure:
    """Two panels with a row for each rank: resident bytes by unit and role, and optimizer work."""
    from matplotlib.figure import Figure

    rows = plan_rows(plan, settings)
    height = 0.5 if len(rows) <= DETAILED_ROWS else 0.16
    figure = Figure(figsize=(13, 2.1 + height * len(rows)), layout="constrained")
    held, work = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    colours = _unit_colours(plan)
    _draw_bytes(held, rows, colours)
    _draw_work(work, rows)
    resident = [part.total for part in rank_bytes(plan, settings)]
    flops = rank_flops(plan, settings)
    matrices = sum(shard.role == "matrix" for shard in plan.shards)
    figure.suptitle(
        f"Who owns what: {matrices} matrices and {len(plan.shards) - matrices} other parameters on "
        f"{plan.world_size} ranks"
    )
    held.set_title(f"resident bytes (max / mean {max_over_mean(resident):.3f})", fontsize=10)
    work.set_title(f"work (max / mean {max_over_mean(flops):.3f})", fontsize=10)
    _draw_legend(figure, plan, colours)
    return figure


def _draw_bytes(axes: Axes, rows: Sequence[Row], colours: dict[str, Any]) -> None:
    unit_name, scale = _byte_scale(max(row.fullest_bytes for row in rows))
    most = max(row.fullest_bytes for row in rows) / scale
    for index, row in enumerate(rows):
        left = 0.0
        for piece in row.pieces:
            width = piece.bytes / scale
            colour = colours[piece.unit]
            axes.barh(
                index,
                width,
                left=left,
                height=0.8,
                color=colour,
                edgecolor="white",
                linewidth=0.6 if len(rows) <= DETAILED_ROWS else 0.2,
                hatch=_hatch(piece),
            )
            name = _short_name(piece.name)
            if len(rows) <= DETAILED_ROWS and width / most * PANEL_CHARACTERS > len(name):
                box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
                axes.text(
                    left + width / 2,
                    index,
                    name,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=_text_colour(colour),
                    bbox=box if _hatch(piece) else None,
                )
            left += width
        if row.ranks[0] != row.ranks[1]:
            axes.plot(row.fullest_bytes / scale, index, marker="|", color="black")
    axes.set_xlabel(f"{unit_name} of weights, gradients and optimizer state")
    axes.set_xlim(0, 1.02 * most or 1)
    several = rows[0].ranks[0] != rows[0].ranks[1]
    axes.set_ylabel(
        "ranks (mean; the mark is the fullest)" if several else "rank of the shard group"
    )
    step = ceil(len(rows) / 32)
    axes.set_yticks(
        range(0, len(rows), step), [_ranks_text(row) for row in rows[::step]], fontsize=8
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _draw_work(axes: Axes, rows: Sequence[Row]) -> None:
    most = max(row.most_flops for row in rows)
    unit_name, scale = ("TFLOP", 1e12) if most >= 1e12 else ("GFLOP", 1e9)
    positions = range(len(rows))
    axes.barh(positions, [row.flops / scale for row in rows], height=0.8, color="#4477aa")
    for index, row in enumerate(rows):
        if row.ranks[0] != row.ranks[1]:
            axes.plot(row.most_flops / scale, index, marker="|", color="black")
    axes.set_xlabel(f"{unit_name} a step")
    axes.set_xlim(0, 1.02 * most / scale if most else 1)
    axes.tick_params(labelleft=False)


def _draw_legend(figure: Figure, plan: Plan, colours: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    units = _units_with_matrices(plan)
    others = [unit for unit in colours if unit not in units][: len(GREYS)]
    if len(units) > LEGEND_UNITS:
        last = len(units) - 1
        units = [units[i * last // (LEGEND_UNITS - 1)] for i in range(LEGEND_UNITS)]
    kinds = {
        "whole matrix": "",
        "whole, stepped by AdamW": WHOLE_TAIL_HATCH,
        "rows of a cut parameter": CUT_HATCH,
    }
    patches = [
        Patch(label=label, hatch=hatch, facecolor="white", edgecolor="#444444")
        for label, hatch in kinds.items()
    ] + [Patch(label=unit, facecolor=colours[unit]) for unit in [*units, *others]]
    columns = len(patches) if len(patches) < 10 else ceil(len(patches) / 2)
    figure.legend(
        handles=patches, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


def _hatch(piece: Held) -> str:
    if piece.cut:
        return CUT_HATCH
    return WHOLE_TAIL_HATCH if piece.role == "tail" else ""


def _units_with_matrices(plan: Plan) -> list[str]:
    return list(dict.fromkeys(shard.unit for shard in plan.shards if shard.role == "matrix"))


def _unit_colours(plan: Plan) -> dict[str, Any]:
    """From dark to light in viridis for the units that have matrices, which readers with any colour
    vision can order; greys for the others."""
    from matplotlib import colormaps

    units, greys = _units_with_matrices(plan), cycle(GREYS)
    shades = {
        unit: colormaps["viridis"](0.95 * index / max(1, len(units) - 1))
        for index, unit in enumerate(units)
    }
    every = dict.fromkeys(shard.unit for shard in plan.shards)
    return {unit: shades.get(unit) or next(greys) for unit in every}


def _text_colour(colour: Any) -> str:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _ranks_text(row: Row) -> str:
    first, last = row.ranks
    return str(first) if first == last else f"{first}-{last}"


def _byte_scale(most: int) -> tuple[str, float]:
    scales: Iterator[tuple[str, float]] = iter((("GB", 1e9), ("MB", 1e6)))
    return next(((name, scale) for name, scale in scales if most >= scale), ("kB", 1e3))
