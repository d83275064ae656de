"""Count collectives and the bytes that they must deliver, whoever issues them.

Owns the CollectiveCounter and the byte formula of each operation. It sees functional collectives,
c10d operations from Python and from C++ (DistributedDataParallel's reducer), on any group,
synchronous or not, and sends from other threads that go through `torch.distributed`. It never
changes what it counts. It slows every operator down, so nothing is timed under it. Tests and
`tools/lab/bench_measure.py` use it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The names of operators, by the formula of their logical bytes, which are what the average rank
# must send. c is (N - 1) / N.
_TWICE_INPUT = {
    "allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced",
}  # fmt: skip
"""2 c times the input's bytes."""
_INPUT = {
    "broadcast_", "broadcast", "reduce_", "gather_", "_reduce_scatter_base_", "reduce_scatter_",
    "reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced_",
}  # fmt: skip
"""c times the input's bytes."""
_OUTPUT = {"scatter_"}
"""c times the output's bytes."""
_GATHERED = {
    "_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    "all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced",
}  # fmt: skip
"""N - 1 times the input's bytes."""
_EXCHANGED = {"alltoall_", "alltoall_base_", "all_to_all_single"}
"""The input's bytes, without the rank's message to itself."""
_SENT = {"send", "isend"}
"""The input's bytes."""
_NOTHING = {"barrier", "monitored_barrier_"}
_RECEIVED = {"recv_", "recv_any_source_", "irecv"}
"""Not counted: the sender counts the message."""

_ENTRY_POINTS = (
    "send", "isend", "recv", "irecv", "batch_isend_irecv", "broadcast", "all_reduce", "reduce",
    "all_gather", "all_gather_single", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather",
    "scatter", "barrier",
)  # fmt: skip
"""The functions of `torch.distributed` that are wrapped while a counter is active."""

OnCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""(operator, args, kwargs)"""


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation as this rank issued it.

    `logical_bytes`: what the average rank must send for it.
    """

    op: str
    logical_bytes: float


class CollectiveCounter:
    """A context manager; `events` are the operations that this process issued inside, in order.

    Only one may be active, and it is entered on the thread that trains. A dispatch mode sees the
    operators of one thread. So operations of other threads are counted through the functions of
    `torch.distributed` (`dist.isend` and its like), which are wrapped while the counter is active.
    `on_call` is given every operator that has a group before it runs, receives included.
    """

    def __init__(self, on_call: OnCall | None = None) -> None:
        self.events: list[Collective] = []
        self._on_call = on_call
        self._active = threading.local()
        self._mode: _CountingMode | None = None
        self._originals: dict[str, Callable[..., Any]] = {}

    @property
    def calls(self) -> int:
        return len(self.events)

    @property
    def logical_bytes(self) -> float:
        return sum(event.logical_bytes for event in self.events)

    def calls_by_op(self) -> Mapping[str, int]:
        return Counter(event.op for event in self.events)

    def __enter__(self) -> CollectiveCounter:
        if self._mode is not None:
            raise RuntimeError("this CollectiveCounter is already active")
        # PyTorch 2.11 lacks some of them
        for name in filter(partial(hasattr, dist), _ENTRY_POINTS):
            self._originals[name] = getattr(dist, name)
            _replace(name, self._counted_on_any_thread(self._originals[name]))
        self._active.here = True
        self._mode = _CountingMode(self.events, self._on_call)
        self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._mode is not None
        self._mode.__exit__(kind, error, trace)
        self._mode = None
        self._active.here = False
        for name, original in self._originals.items():
            _replace(name, original)

    def _counted_on_any_thread(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._active, "here", False) or self._mode is None:
                return original(*args, **kwargs)
            with _CountingMode(self.events, self._on_call):
                return original(*args, **kwargs)

        return counted


def _replace(name: str, function: Callable[..., Any]) -> None:
    # in both modules, since P2POp compares with the functions of distributed_c10d
    for module in (dist, dist.distributed_c10d):
        setattr(module, name, function)


class _CountingMode(TorchDispatchMode):
    def __init__(self, events: list[Collective], on_call: OnCall | None) -> None:
        super().__init__()
        self._events = events
        self._on_call = on_call

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            given = _arguments(func, args, kwargs or {})
            # an operator without a group only waits or wraps
            if given.keys() & {"process_group", "group_name"}:
                if self._on_call is not None:
                    self._on_call(func, args, kwargs or {})
                event = _describe(func, given)
                if event is not None:
                    # threads share the list, and append is atomic
                    self._events.append(event)
        return func(*args, **(kwargs or {}))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _describe(func: Any, given: dict[str, Any]) -> Collective | None:
    """The operation with its logical bytes; None for a receive. RuntimeError for an unknown one."""
    op = func.name().split("::")[1].split(".")[0]
    if op in _RECEIVED:
        return None
    group = _group_of(given)
    size, share = group.size(), (group.size() - 1) / group.size()
    if op in _NOTHING:
        return Collective(op, 0.0)
    if op in _TWICE_INPUT:
        return Collective(op, 2 * share * _bytes(_inputs(given)))
    if op in _INPUT:
        return Collective(op, share * _bytes(_inputs(given)))
    if op in _OUTPUT:
        return Collective(op, share * _bytes(given["output_tensors"]))
    if op in _GATHERED:
        return Collective(op, (size - 1) * _bytes(_inputs(given)))
    if op in _EXCHANGED:
        return Collective(op, _exchanged_bytes(given, group))
    if op in _SENT:
        return Collective(op, float(_bytes(_inputs(given))))
    raise RuntimeError(
        f"{func.name()} is a collective without a byte formula: add it to {__name__}"
    )


def _group_of(given: Mapping[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    return torch._C._distributed_c10d._resolve_process_group(given["group_name"])


_INPUT_NAMES = (
    "input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor", "self",
)  # fmt: skip


def _inputs(given: Mapping[str, Any]) -> Any:
    for name in _INPUT_NAMES:
        if name in given:
            return given[name]
    raise RuntimeError(f"a collective without a known input among its arguments {sorted(given)}")


def _exchanged_bytes(given: Mapping[str, Any], group: dist.ProcessGroup) -> float:
    """Bytes of an all-to-all that leave this rank: all but its message to itself."""
    rank, inputs = group.rank(), _inputs(given)
    if isinstance(inputs, (list, tuple)):
        return float(_bytes(tensor for peer, tensor in enumerate(inputs) if peer != rank))
    splits = given["input_split_sizes"]
    if not splits:
        return _bytes(inputs) * (group.size() - 1) / group.size()
    rows = sum(splits)
    return _bytes(inputs) * (rows - splits[rank]) / rows if rows else 0.0


def _bytes(tensors: Tensor | Iterable[Any]) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)
