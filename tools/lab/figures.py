#!/usr/bin/env python
"""Draw the figures of docs/figures, each with a JSON file of the data that it shows.

    python tools/lab/figures.py                              # all of them
    python tools/lab/figures.py timeline --run FOLDER        # from a new trace

`owners` and `traffic` are computed by the planner and by matrixtitan/predict/. `timeline` shows a
recorded run. Without --run it is drawn again from the committed JSON file. FOLDER is the
`job.dump_folder` of a run with profiling, such as:

    NPROC=2 ./run_train.sh --profiling.enable_profiling true --profiling.profile_freq 8 \\
        --training.steps 8 --validation.enable false --job.dump_folder FOLDER

The same data gives the same file with the same matplotlib. matplotlib is the extra `plots`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import checkout  # noqa: F401
from matrixtitan.config import EMBEDDED_OVERRIDES, Config, load_config
from matrixtitan.extras import need
from matrixtitan.parallelize import dtype_of, meta_model, model_specs, plan_settings
from matrixtitan.plan.planner import make_plan
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.predict.pictures import plan_picture, plan_rows
from matrixtitan.predict.strategies import STRATEGY_VARIANTS, strategy_bytes, unit_sizes
from models.base import LanguageModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "figures"

OWNER_RANKS = 4
TRAFFIC_RANKS = 64
DEBUG_VOCAB, LLAMA3_VOCAB = 4096, 128256

# Okabe and Ito's palette, which readers with any colour vision can tell apart
BLUE, SKY, ORANGE, GREEN, GREY = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#dddddd"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", nargs="?", default="all", choices=("all", *FIGURES))
    parser.add_argument("--run", type=Path, help="dump folder of a run to read")
    parser.add_argument("--output", type=Path, default=COMMITTED, help="[docs/figures]")
    options = parser.parse_args(argv)
    try:
        draw(options.figure, options.run, options.output)
    except (ValueError, OSError) as error:
        print(f"tools/lab/figures.py: {error}", file=sys.stderr)
        return 2
    return 0


def draw(name: str, run: Path | None, output: Path) -> None:
    """Write the named figure, or all, and the data beside it."""
    need("matplotlib")
    if run is not None and (name == "all" or FIGURES[name].read is None):
        readers = [other for other, figure in FIGURES.items() if figure.read is not None]
        raise ValueError(f"--run belongs to one of the figures {', '.join(readers)}: name it first")
    output.mkdir(parents=True, exist_ok=True)
    for each in FIGURES if name == "all" else [name]:
        figure = FIGURES[each]
        if figure.read is None:
            data = figure.compute()
        elif run is None:
            data = json.loads((COMMITTED / f"{each}.json").read_text())
        else:
            data = figure.read(run)
        (output / f"{each}.json").write_text(json.dumps(data, indent=1) + "\n")
        _save(figure.picture(data), output / f"{each}.{figure.suffix}")
        print(output / f"{each}.{figure.suffix}")


def _save(figure: Figure, path: Path) -> None:
    """Without the date, and with fixed ids, so that the same data gives the same file."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "matrixtitan"}):
        nothing = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=110, metadata=nothing)


# ---------------------------------------------------------------- owners


def owners_data() -> dict[str, Any]:
    """Who owns what of the debug model, as the picture shows it."""
    config, _, specs = _model("debug", DEBUG_VOCAB)
    settings = plan_settings(config)
    plan = make_plan(specs, OWNER_RANKS, settings)
    rows = [
        {**row._asdict(), "ranks": list(row.ranks), "pieces": [p._asdict() for p in row.pieces]}
        for row in plan_rows(plan, settings)
    ]
    return {"config": "debug", "ranks": OWNER_RANKS, "digest": plan.digest, "rows": rows}


def owners_picture(data: dict[str, Any]) -> Figure:
    config, _, specs = _model("debug", DEBUG_VOCAB)
    settings = plan_settings(config)
    return plan_picture(make_plan(specs, data["ranks"], settings), settings)


def _model(name: str, vocab_size: int) -> tuple[Config, LanguageModel, list[ParamSpec]]:
    """A config's model on the meta device; its tokenizer and data need not be here."""
    config = load_config(["--config", name, *shlex.split(EMBEDDED_OVERRIDES)])
    model = meta_model(config, vocab_size)
    return config, model, model_specs(model, config)


# ---------------------------------------------------------------- traffic


def traffic_data() -> dict[str, Any]:
    """Logical bytes that a rank sends in one step of Llama 3 8B, the mean over ranks."""
    config, model, specs = _model("llama_8b", LLAMA3_VOCAB)
    units = ["+".join(modules) for modules in model.unit_names()]
    sent = {}
    for name in STRATEGY_VARIANTS:
        step = strategy_bytes(
            name,
            # backward does not gather the embedding, which is a lookup, and the last unit is kept
            unit_sizes(specs, (units[0], units[-1]), TRAFFIC_RANKS if "fsdp2" in name else 1),
            TRAFFIC_RANKS,
            param_bytes=dtype_of(config.training.mixed_precision_param).itemsize,
            grad_bytes=dtype_of(config.training.mixed_precision_reduce).itemsize,
            update_bytes=torch.bfloat16.itemsize,  # what Newton-Schulz starts from on GPUs
            stored_bytes=dtype_of(config.training.dtype).itemsize,
        )
        sent[name] = step._asdict()
    return {"config": "llama_8b", "ranks": TRAFFIC_RANKS, "bytes": sent}


def traffic_picture(data: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = list(data["bytes"])
    titles = {
        "forward_backward": ("forward and backward", BLUE),
        "optimizer": ("inside the optimizer step", ORANGE),
    }
    for axes, (phase, (title, colour)) in zip(panels, titles.items(), strict=True):
        sizes = [data["bytes"][name][phase] / 1e9 for name in names]
        bars = axes.barh(names, sizes, color=colour)
        axes.bar_label(bars, labels=[f"{size:.2f}" if size else "0" for size in sizes], padding=3)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("GB that a rank sends in one step")
        axes.margins(x=0.15)
    panels[0].invert_yaxis()
    figure.suptitle(f"Llama 3 8B on {data['ranks']} ranks, one microbatch (by formula)")
    return figure


# ---------------------------------------------------------------- timeline


class Label(NamedTuple):
    """One span of the runtime in a trace, in ms after the first; see [Note: labels in a trace]."""

    event: str
    """unshard, unshard_wait, reduce, reduce_wait or optimizer."""
    unit: str
    start: float
    stop: float


class Span(NamedTuple):
    """A bar of the picture."""

    unit: str
    kind: str
    start: float
    stop: float


def read_timeline(run: Path) -> dict[str, Any]:
    """The labels of rank 0 in the run's newest trace. ValueError where it has none."""
    traces = sorted(run.rglob("step_*/rank_0.json"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise ValueError(
            f"{run} holds no trace step_*/rank_0.json: train with --profiling.enable_profiling true"
        )
    labels = read_labels(traces[-1])
    return {"labels": [label._asdict() for label in labels]}


def read_labels(trace: Path) -> list[Label]:
    """The runtime's spans and the optimizer's step in a trace of `torch.profiler`, by start."""
    found = []
    for event in json.loads(trace.read_text())["traceEvents"]:
        name, start = event.get("name", ""), event.get("ts")
        if event.get("cat") != "user_annotation":
            continue
        if name.startswith("matrix_fsdp::"):
            kind, unit = name.removeprefix("matrix_fsdp::").split(" ", 1)
        elif name == "optimizer::step":
            kind, unit = "optimizer", "optimizer"
        else:
            continue
        found.append(Label(kind, unit, start, start + event["dur"]))
    if not found:
        raise ValueError(f"{trace} has no span of the runtime: train with strategy matrix_fsdp")
    found.sort(key=lambda label: label.start)
    first = found[0].start
    return [
        label._replace(
            start=round((label.start - first) / 1e3, 2), stop=round((label.stop - first) / 1e3, 2)
        )
        for label in found
    ]


def spans(labels: Sequence[Label]) -> list[Span]:
    """Bars from labels. Weights and gradients are in flight from the issue to the end of the wait.

    What runs between two labels is the compute of the unit whose weights were waited for just
    before, or else of the unit that is reduced next.
    """
    found: list[Span] = []
    issued: dict[tuple[str, str], float] = {}
    for index, label in enumerate(labels):
        if label.event in ("unshard", "reduce"):
            issued[label.event, label.unit] = label.start
        elif label.event == "optimizer":
            found.append(Span(label.unit, "optimizer", label.start, label.stop))
        else:
            kind = label.event.removesuffix("_wait")
            found.append(Span(label.unit, kind, issued[kind, label.unit], label.stop))
        after = labels[index + 1 :]
        issue = next((other for other in after if other.event != "reduce_wait"), None)
        if label.event == "unshard_wait":
            found.append(Span(label.unit, "compute", label.stop, after[0].start))
        elif issue is not None and issue.event == "reduce":
            found.append(Span(issue.unit, "compute", label.stop, after[0].start))
    computes = [span for span in found if span.kind == "compute"]
    return _gathered(labels, computes) + found


def _gathered(labels: Sequence[Label], computes: Sequence[Span]) -> list[Span]:
    """From an unshard to the last compute before the unit's next unshard or its reduction."""
    found = []
    for index, label in enumerate(labels):
        if label.event != "unshard":
            continue
        ends = (
            other.start
            for other in labels[index + 1 :]
            if other.unit == label.unit and other.event in ("unshard", "reduce")
        )
        until = next(ends)
        mine = [
            span.stop
            for span in computes
            if span.unit == label.unit and label.start <= span.start and span.stop <= until
        ]
        # the embedding comes first, and its backward, a lookup's, needs no weights
        stop = mine[0] if label.unit == labels[0].unit else mine[-1]
        found.append(Span(label.unit, "gathered", label.start, stop))
    return found


def timeline_picture(data: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    labels = [Label(**label) for label in data["labels"]]
    units = list(dict.fromkeys(label.unit for label in labels))
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots()
    styles: dict[str, dict[str, Any]] = {
        "gathered": {"color": GREY, "label": "gathered weights are in memory", "height": 0.8},
        "unshard": {"color": SKY, "label": "unshard, to the end of the wait", "height": 0.3},
        "compute": {"color": BLUE, "label": "compute", "height": 0.55},
        "reduce": {"color": ORANGE, "label": "reduce, to the end of the wait", "height": 0.3},
        "optimizer": {"color": GREEN, "label": "optimizer (nothing is sent)", "height": 0.55},
    }
    drawn = spans(labels)
    for kind, style in styles.items():
        bars = [span for span in drawn if span.kind == kind]
        axes.barh(
            [units.index(span.unit) for span in bars],
            [span.stop - span.start for span in bars],
            left=[span.start for span in bars],
            **style,
        )
    _mark_phases(axes, labels)
    axes.set_yticks(range(len(units)), units)
    axes.set_ylim(len(units) - 0.5, -0.5)
    axes.set_xlim(0, 1.005 * max(label.stop for label in labels))
    axes.set_xlabel("ms after the first unshard")
    figure.legend(loc="outside lower center", ncols=len(styles), fontsize=9, frameon=False)
    figure.suptitle("One recorded step of the debug model, rank 0 of 2 (CPU, gloo)")
    return figure


def _mark_phases(axes: Axes, labels: Sequence[Label]) -> None:
    """Lines where backward and the optimizer begin. The first unshard of backward is the first that
    follows the forward's last wait."""
    waits = [i for i, label in enumerate(labels) if label.event == "unshard_wait"]
    order = list(dict.fromkeys(label.unit for label in labels if label.event == "unshard"))
    last_forward = next(i for i in waits if labels[i].unit == order[-1])
    begins = {"forward": 0.0, "backward": labels[last_forward + 1].start}
    optimizer = next((label.start for label in labels if label.event == "optimizer"), None)
    if optimizer is not None:
        begins["optimizer"] = optimizer
    for name, start in begins.items():
        axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
        right = name == "optimizer"
        axes.annotate(
            name,
            (start, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if right else 3, 3),
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize=9,
        )


# ---------------------------------------------------------------- the table of figures


def _no_data() -> dict[str, Any]:
    raise RuntimeError("this figure shows a recorded run")


class FigureKind(NamedTuple):
    """`compute` makes the data, or `read` takes it from a run's folder; `picture` draws it."""

    suffix: str
    picture: Callable[[dict[str, Any]], Figure]
    compute: Callable[[], dict[str, Any]] = _no_data
    read: Callable[[Path], dict[str, Any]] | None = None


FIGURES = {
    "owners": FigureKind("svg", owners_picture, compute=owners_data),
    "traffic": FigureKind("svg", traffic_picture, compute=traffic_data),
    "timeline": FigureKind("svg", timeline_picture, read=read_timeline),
}


if __name__ == "__main__":
    sys.exit(main())
