"""What a run reports: the log line, the curves (metrics.jsonl, TensorBoard), the progress bar.

Owns the timing of a step's phases, memory figures, MFU and their names. Every rank calls `log_step`
at the same steps: its all-gather of a few numbers is the only collective here. Only rank 0 writes.
Decides nothing about training. Next: `trainer.py`, which calls it.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from matrixtitan.config import MetricsConfig
from matrixtitan.curves import FILE_NAME, CurveWriter
from matrixtitan.extras import need
from matrixtitan.log import get_logger
from matrixtitan.plan.cost import CostSettings
from matrixtitan.plan.shard import Plan
from matrixtitan.predict.pictures import plan_picture, plan_table
from matrixtitan.progress import ProgressBar

logger = get_logger()

DEVICE_PHASES = ("forward_backward", "optimizer")
PHASES = ("data", *DEVICE_PHASES)
"""The phases of a step that are reported. data is time on the host, the others on the device."""

GIB = 2**30

# Dense bfloat16 peak speed in FLOP/s, from the vendors' data sheets (without sparsity). The first
# entry whose name is in the device's name counts.
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2.5e15),
    ("GB200", 2.5e15),
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 149.7e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307.4e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device, by its name; None if the table lacks it."""
    words = f" {device_name.replace('-', ' ')} "
    for name, flops in PEAK_FLOPS:
        if f" {name} " in words:
            return flops
    return None


class PhaseTimer:
    """Adds up the time of named phases until `take`.

    On CUDA, DEVICE_PHASES are timed on the device, by a pair of events around the phase's kernels.
    The events are read at `take` only, so that no step waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda_phases = DEVICE_PHASES if device.type == "cuda" else ()
        self._host_seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name in self._cuda_phases:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            began = time.perf_counter()
            yield
            self._host_seconds[name] = (
                self._host_seconds.get(name, 0.0) + time.perf_counter() - began
            )

    def take(self) -> dict[str, float]:
        """Milliseconds of each phase since the last call. On CUDA waits for the last kernels."""
        total = {name: 1000 * seconds for name, seconds in self._host_seconds.items()}
        if self._events:
            self._events[-1][2].synchronize()
        for name, start, end in self._events:
            total[name] = total.get(name, 0.0) + start.elapsed_time(end)
        self._host_seconds.clear()
        self._events.clear()
        return total


def memory_figures(device: torch.device) -> dict[str, float]:
    """Memory peaks by TensorBoard name: since the last call (CUDA), or since the start (CPU)."""
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"memory/max_rss_gib": peak * (1 if sys.platform == "darwin" else 1024) / GIB}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/max_active_gib": stats["active_bytes.all.peak"] / GIB,
        "memory/max_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "memory/alloc_retries": float(stats["num_alloc_retries"]),
    }


@dataclass(frozen=True, slots=True)
class OverRanks:
    """One figure of all ranks."""

    mean: float
    max: float
    slowest_rank: int

    @staticmethod
    def of(values: Sequence[float]) -> OverRanks:
        slowest = max(range(len(values)), key=lambda rank: values[rank])
        return OverRanks(math.fsum(values) / len(values), values[slowest], slowest)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is reported about one logged step.

    Times are milliseconds per step, averaged over the steps since the last log line.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rates: Mapping[str, float]
    tokens_per_second: float
    mfu: float | None
    phases: Mapping[str, OverRanks]
    memory: Mapping[str, float]
    skipped_steps: int = 0

    def scalars(self) -> dict[str, float]:
        """The new points of the curves, under their fixed names."""
        curves = {
            "loss/train": self.loss,
            "grad_norm": self.grad_norm,
            **{f"lr/{name}": rate for name, rate in self.learning_rates.items()},
            "throughput/tokens_per_second": self.tokens_per_second,
            **self.memory,
        }
        if self.mfu is not None:
            curves["throughput/mfu"] = self.mfu
        if self.skipped_steps:
            curves["skipped_steps"] = self.skipped_steps
        for name, phase in self.phases.items():
            curves[f"time/{name}_ms"] = phase.mean
            curves[f"time/{name}_ms_max"] = phase.max
            curves[f"time/{name}_slowest_rank"] = phase.slowest_rank
        return curves

    def line(self, total_steps: int) -> str:
        """The log line: `step 10/200 | loss 7.123456 | ...`."""
        parts = [
            f"step {self.step}/{total_steps}",
            f"loss {self.loss:.6f}",
            f"grad_norm {self.grad_norm:.6f}",
            "lr " + " ".join(f"{name} {rate:.3e}" for name, rate in self.learning_rates.items()),
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.mfu is not None:
            parts.append(f"mfu {100 * self.mfu:.1f}%")
        parts.append(memory_text(self.memory))
        for name, phase in self.phases.items():
            parts.append(
                f"{name} {phase.mean:.1f} ms (max {phase.max:.1f}, rank {phase.slowest_rank})"
            )
        if self.skipped_steps:
            parts.append(f"{self.skipped_steps} steps skipped")
        return " | ".join(parts)


def memory_text(memory: Mapping[str, float]) -> str:
    if "memory/max_rss_gib" in memory:
        return f"memory {memory['memory/max_rss_gib']:.2f} GiB resident"
    retries = int(memory["memory/alloc_retries"])
    active, reserved = memory["memory/max_active_gib"], memory["memory/max_reserved_gib"]
    return f"memory {active:.2f} GiB active, {reserved:.2f} GiB reserved, {retries} retries"


class Metrics:
    """Times the phases and writes the reports.

    `flops_per_token` counts forward and backward. `total_steps` is for display. `start_step` is the
    number of steps already done. A resumed run appends to metrics.jsonl and to the TensorBoard
    folder, and what an earlier run wrote beyond that step is void. metrics.jsonl is always written,
    and TensorBoard's files if the config says so.
    """

    def __init__(
        self,
        config: MetricsConfig,
        dump_folder: Path,
        *,
        device: torch.device,
        rank: int,
        world_size: int,
        flops_per_token: float,
        total_steps: int,
        start_step: int = 0,
    ) -> None:
        self.timer = PhaseTimer(device)
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._flops_per_token = flops_per_token
        self._total_steps = total_steps
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak_flops = config.peak_flops or peak_flops(device_name)
        if self._peak_flops is None and rank == 0:
            logger.info(
                "MFU is left out: no peak FLOP/s known for %r; metrics.peak_flops sets it",
                device_name,
            )
        self._curves = CurveWriter(dump_folder / FILE_NAME, start_step) if rank == 0 else None
        self._writer: SummaryWriter | None = None
        if config.enable_tensorboard and rank == 0:
            folder = dump_folder / config.save_tb_folder
            self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)
            logger.info("TensorBoard: tensorboard --logdir %s", folder)
        self._bar = ProgressBar()
        self._bar_text = ""
        self._logged_step = start_step
        self._window_start = time.perf_counter()

    def begin(self) -> None:
        """Start the clock, just before the first step: building the model does not count."""
        self._window_start = time.perf_counter()

    def progress(self, step: int) -> None:
        """Redraw the progress bar after `step`."""
        if self._rank == 0:
            text = f"{step}/{self._total_steps} {self._bar_text}"
            self._bar.update(text, step / self._total_steps)

    def log_step(
        self,
        step: int,
        *,
        local_loss: float,
        grad_norm: float,
        learning_rates: Mapping[str, float],
        tokens_per_step: int,
        skipped_steps: int = 0,
    ) -> StepReport:
        """Collective: report a step. `local_loss` is this rank's part of the loss.

        The ranks' parts add up to the loss. All other arguments are the same on all ranks.
        """
        times = self.timer.take()
        steps = step - self._logged_step
        paused = (times.get("validation", 0.0) + times.get("checkpoint", 0.0)) / 1000
        seconds = max(time.perf_counter() - self._window_start - paused, 1e-9)
        memory = memory_figures(self._device)
        mine = [local_loss, *(times.get(phase, 0.0) / steps for phase in PHASES), *memory.values()]
        columns = self._gather_columns(mine)

        tokens_per_second = tokens_per_step * steps / seconds
        mfu = None
        if self._peak_flops:
            mfu = tokens_per_second * self._flops_per_token / (self._world_size * self._peak_flops)
        report = StepReport(
            step=step,
            loss=math.fsum(columns[0]) if all(map(math.isfinite, columns[0])) else math.nan,
            grad_norm=grad_norm,
            learning_rates=learning_rates,
            tokens_per_second=tokens_per_second,
            mfu=mfu,
            phases={
                name: OverRanks.of(column)
                for name, column in zip(PHASES, columns[1:], strict=False)
            },
            memory={
                name: max(column)
                for name, column in zip(memory, columns[1 + len(PHASES) :], strict=True)
            },
            skipped_steps=skipped_steps,
        )
        self._write(step, report.scalars())
        self._say(report.line(self._total_steps))
        self._bar_text = f"loss {report.loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        self._logged_step = step
        self._window_start = time.perf_counter()
        return report

    def log_validation(self, step: int, loss: float, tokens: int) -> None:
        """`loss` is the mean over `tokens` held-out tokens after `step` steps."""
        self._write(step, {"loss/validation": loss})
        self._say(
            f"step {step}/{self._total_steps} | validation loss {loss:.6f} over {tokens:,} tokens"
        )

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write further curves, such as the pause of a save."""
        self._write(step, scalars)

    def log_text(self, tag: str, text: str) -> None:
        """Show a text in TensorBoard as it is: the config, the plan."""
        if self._writer:
            # four spaces make a Markdown code block
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            self._writer.add_text(tag, indented)
            self._writer.flush()

    def log_plan(self, plan: Plan, settings: CostSettings) -> None:
        """Who owns what, in TensorBoard: a table, and a picture where matplotlib is installed."""
        if not self._writer:
            return
        self.log_text("plan", plan_table(plan, settings))
        try:
            need("matplotlib")
        except ValueError as error:
            logger.info("TensorBoard has the plan as a table, without its picture: %s", error)
            return
        self._writer.add_figure("plan", plan_picture(plan, settings))
        self._writer.flush()

    def close(self) -> None:
        self._bar.clear()
        if self._curves:
            self._curves.close()
        if self._writer:
            self._writer.close()

    def _gather_columns(self, mine: Sequence[float]) -> list[list[float]]:
        """Collective: every rank's figures, as table[figure][rank]."""
        row = torch.tensor(mine, dtype=torch.float64, device=self._device)
        rows = [row.clone() for _ in range(self._world_size)]
        dist.all_gather(rows, row)
        table: list[list[float]] = torch.stack(rows).T.tolist()
        return table

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        # both are flushed, so that a killed run loses no logged step
        if self._curves:
            self._curves.write(step, scalars)
        if self._writer:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def _say(self, line: str) -> None:
        self._bar.clear()
        if self._rank == 0:
            logger.info(line)
