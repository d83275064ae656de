"""Measure one strategy on this rank: phase times, losses, memory and communication.

Owns the Contender, which is a model under one strategy, trained step by step. Every figure is this
rank's. `bench.py` decides the order of measurements. Next: `bench_report.py`, which combines ranks.
"""

from __future__ import annotations

import dataclasses
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from matrixtitan.assemble import assemble
from matrixtitan.config import Config
from matrixtitan.mesh import World
from matrixtitan.strategies.collective_counter import CollectiveCounter

VOCAB_SIZE = 256  # tokens are bytes
CORPUS_BYTES = 1 << 21
STRATEGY_KEYS: dict[str, dict[str, Any]] = {
    "matrix_fsdp": {"strategy": "matrix_fsdp"},
    "fsdp2_gather_each": {"strategy": "fsdp2", "matrix_exchange": "gather_each"},
    "fsdp2_gather_once": {"strategy": "fsdp2", "matrix_exchange": "gather_once"},
    "fsdp2_all_to_all": {"strategy": "fsdp2", "matrix_exchange": "all_to_all"},
    "zero1_owner": {"strategy": "zero1_owner"},
    "ddp": {"strategy": "ddp"},
}
STOCK = "_stock"
"""Suffix of an fsdp2 strategy's name that selects PyTorch's own collectives."""


def strategy_config(config: Config, name: str) -> Config:
    """`config` with the strategy of that name. Raises ValueError for an unknown name."""
    base = name.removesuffix(STOCK)
    if base not in STRATEGY_KEYS or (base != name and not base.startswith("fsdp2")):
        raise ValueError(
            f"--strategies: {name!r} is unknown; choose from {', '.join(STRATEGY_KEYS)}; "
            f"{STOCK} after an fsdp2 strategy's name selects PyTorch's own transports"
        )
    choice = STRATEGY_KEYS[base]
    transports = "stock" if base != name else config.parallelism.fsdp2_transports
    exchange = choice.get("matrix_exchange", config.optimizer.matrix_exchange)
    return dataclasses.replace(
        config,
        parallelism=dataclasses.replace(
            config.parallelism, strategy=choice["strategy"], fsdp2_transports=transports
        ),
        optimizer=dataclasses.replace(config.optimizer, matrix_exchange=exchange),
    )


@dataclass
class Measurements:
    """One rank's figures of one strategy. Times are in ms, one entry per sample; `losses` are
    this rank's shares."""

    fwd_bwd_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    communication_ms: dict[str, list[float]] = field(
        default_factory=lambda: {"fwd_bwd": [], "optimizer": []}
    )
    losses: list[float] = field(default_factory=list)
    resident_bytes: int = 0
    peak_memory_bytes: int = 0
    optimizer_transient_bytes: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    calls_by_op: dict[str, dict[str, int]] = field(default_factory=dict)
    logical_bytes: dict[str, float] = field(default_factory=dict)
    wire_bytes: dict[str, int] | None = None


class Corpus:
    """The standard library's source, with bytes as tokens. A step's batch is the same for every
    strategy."""

    def __init__(self, world: World, sequences: int, seq_len: int) -> None:
        text = b"".join(
            path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        )
        self._tokens = torch.frombuffer(bytearray(text[:CORPUS_BYTES]), dtype=torch.uint8)
        self._world = world
        self.sequences = sequences  # per step, over all ranks
        self.seq_len = seq_len

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's tokens and labels, (B, T) int64."""
        share = self.sequences // self._world.size
        first = step * self.sequences + self._world.rank * share
        starts = [
            (first + row) * self.seq_len % (len(self._tokens) - self.seq_len - 1)
            for row in range(share)
        ]
        rows = torch.stack([self._tokens[start : start + self.seq_len + 1] for start in starts])
        rows = rows.to(self._world.device, torch.int64)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Contender:
    """One strategy's model, optimizers and measurements."""

    def __init__(
        self, name: str, config: Config, world: World, corpus: Corpus, vocab_size: int
    ) -> None:
        self.name = name
        self.measured = Measurements()
        self._world = world
        self._corpus = corpus
        self._max_norm = config.training.max_norm
        self._step = 0
        self._losses: list[Tensor] = []
        self.model, self._strategy, self._optimizers = assemble(
            strategy_config(config, name), vocab_size, world
        )

    def forward_backward(self) -> None:
        tokens, labels = self._corpus.batch(self._step)
        self._strategy.set_reduce_gradients(True)
        loss = self._strategy.model(tokens, labels) / (
            self._corpus.sequences * self._corpus.seq_len
        )
        loss.backward()
        self._losses.append(loss.detach())
        self._step += 1

    def optimizer_step(self) -> None:
        """Clip, step and drop the gradients. The norm is read, as in the trainer."""
        self._strategy.clip_grad_norm_(self._max_norm).item()
        self._strategy.step(self._optimizers)
        self._strategy.model.zero_grad(set_to_none=True)

    def finish(self) -> Measurements:
        self.measured.losses = [loss.item() for loss in self._losses]
        self._strategy.close()
        return self.measured

    # --- samples ------------------------------------------------------------------------------

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.forward_backward()
            self.optimizer_step()

    def sample_phases(self) -> None:
        """One step with a barrier around each phase, so that no phase waits for slow ranks of the
        phase before."""
        for phase, samples in (
            (self.forward_backward, self.measured.fwd_bwd_ms),
            (self.optimizer_step, self.measured.optimizer_ms),
        ):
            samples.append(self._timed(phase))

    def sample_steps(self, steps: int) -> None:
        """`steps` steps without a barrier between them. Their mean time is one sample."""
        self.measured.step_ms.append(self._timed(lambda: self.warm_up(steps)) / steps)

    def _timed(self, run: Callable[[], None]) -> float:
        self._synchronize()
        dist.barrier()
        began = time.perf_counter()
        run()
        self._synchronize()
        return 1000 * (time.perf_counter() - began)

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    # --- bytes --------------------------------------------------------------------------------

    def count_communication(self, repeats: int) -> None:
        """Count one step's collectives and wire bytes by phase, then time the same messages
        without computation, `repeats` times."""
        wire = WireCounter(self._world)
        for phase, run in (("fwd_bwd", self.forward_backward), ("optimizer", self.optimizer_step)):
            replay = Replay(self._world.device)
            dist.barrier()
            before = wire.sent()
            # Dynamo compiles nothing under the counter's dispatch mode
            with (
                torch.compiler.set_stance("force_eager"),
                CollectiveCounter(replay.record) as counter,
            ):
                run()
            self._synchronize()
            dist.barrier()
            after = wire.sent()
            self.measured.calls[phase] = counter.calls
            self.measured.calls_by_op[phase] = dict(counter.calls_by_op())
            self.measured.logical_bytes[phase] = counter.logical_bytes
            if before is not None and after is not None:
                self.measured.wire_bytes = {
                    **(self.measured.wire_bytes or {}),
                    phase: after - before,
                }
            if replay.possible():
                for _ in range(repeats):
                    replay.prepare()
                    self.measured.communication_ms[phase].append(self._timed(replay.run))
            dist.barrier()

    def measure_memory(self) -> None:
        """Resident bytes, and the peak of one step, of this strategy's own tensors."""
        kept = storage_bytes(self._kept_tensors())
        with traced_memory(self._world.device) as forward_backward:
            self.forward_backward()
        gradients = storage_bytes(self._gradients())
        with traced_memory(self._world.device) as optimizer:
            self.optimizer_step()
        resident = kept + gradients
        # gradients that forward and backward did not allocate, such as DDP's buckets, are resident
        before = max(kept, resident - forward_backward.end)
        self.measured.resident_bytes = resident
        self.measured.optimizer_transient_bytes = optimizer.peak
        self.measured.peak_memory_bytes = before + max(
            forward_backward.peak, forward_backward.end + optimizer.peak
        )

    def _kept_tensors(self) -> Iterator[Tensor]:
        """Weights and optimizer state."""
        for param in self._strategy.local_parameters():
            yield param.tensor
        for state in self._optimizers.state_tensors():
            yield state.tensor

    def _gradients(self) -> Iterator[Tensor]:
        for param in self._strategy.local_parameters():
            if param.tensor.grad is not None:
                yield param.tensor.grad


def matmul_flops(device: torch.device, seconds: float = 0.3) -> float:
    """FLOP/s of this rank's matrix products while all ranks multiply.

    The products are in float32 on the CPU and in bfloat16 on CUDA.
    """
    on_cpu = device.type == "cpu"
    size, dtype = (384, torch.float32) if on_cpu else (8192, torch.bfloat16)
    at_a_time = 1 if on_cpu else 8  # several, so that waiting for the GPU costs little
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(at_a_time):
            torch.mm(left, right, out=out)
        if not on_cpu:
            torch.cuda.synchronize(device)

    multiply()  # loads the library
    dist.barrier()
    products, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        multiply()
        products += at_a_time
    return 2 * size**3 * products / elapsed


def storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the storages behind these tensors, padding included. A storage counts once."""
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@dataclass
class Traced:
    """Bytes allocated since the trace began: at the peak and at the end."""

    peak: int = 0
    end: int = 0


@contextmanager
def traced_memory(device: torch.device) -> Iterator[Traced]:
    """Trace PyTorch's allocations inside the with block. The result is filled in at its end."""
    result = Traced()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield result
        torch.cuda.synchronize(device)
        result.peak = torch.cuda.max_memory_allocated(device) - before
        result.end = torch.cuda.memory_allocated(device) - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        yield result
    # no public result has every allocation in order
    kineto = trace.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]")
    for _, nbytes in changes:  # negative if memory is freed
        result.end += nbytes
        result.peak = max(result.peak, result.end)


class WireCounter:
    """Bytes through this job's network interface: this host's, or on loopback all ranks'."""

    def __init__(self, world: World) -> None:
        self.interface = wire_interface(world.size)

    def sent(self) -> int | None:
        """None if the interface is not known."""
        return self._counter("tx_bytes")

    def received(self) -> int | None:
        return self._counter("rx_bytes")

    def _counter(self, name: str) -> int | None:
        if self.interface is None:
            return None
        return int(Path(f"/sys/class/net/{self.interface}/statistics/{name}").read_text())


def wire_interface(world_size: int) -> str | None:
    """The interface of gloo's messages, or None if it is not known."""
    name = os.environ.get(
        "GLOO_SOCKET_IFNAME",
        "lo" if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world_size else "",
    )
    if (
        dist.get_backend() != "gloo"
        or not name
        or not Path(f"/sys/class/net/{name}/statistics/tx_bytes").exists()
    ):
        return None
    return name


class Replay:
    """Issues a phase's collectives again on other tensors, for the time of communication alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: list[tuple[Any, Any, Any]] = []
        self._prepared: list[tuple[Any, Any, Any]] = []

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = tree_map_only(
            Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), (args, kwargs)
        )
        self._recorded.append((func, *shapes))

    def possible(self) -> bool:
        """False for point-to-point messages on NCCL: outside a group they wait for each other."""
        names = {func.name() for func, _, _ in self._recorded}
        return self._device.type == "cpu" or not any(
            "send" in name or "recv" in name for name in names
        )

    def prepare(self) -> None:
        """Allocate the tensors, before the timed part."""

        def allocate(shape: Tensor) -> Tensor:
            return torch.zeros_like(shape, device=self._device)

        self._prepared = [
            (func, *tree_map_only(Tensor, allocate, (args, kwargs)))
            for func, args, kwargs in self._recorded
        ]

    def run(self) -> None:
        with torch.no_grad():
            results = [func(*args, **kwargs) for func, args, kwargs in self._prepared]
            for (func, _, _), result in zip(self._prepared, results, strict=True):
                _wait(func, result)


def _wait(func: Any, result: Any) -> None:
    if func.namespace == "_c10d_functional":
        tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, result)
        return
    parts: Sequence[Any] = result if isinstance(result, tuple) else (result,)
    for part in parts:
        if isinstance(part, torch.ScriptObject):
            dist.Work.unbox(part).wait()
