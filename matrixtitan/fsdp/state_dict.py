"""State dicts of a sharded model: this rank's rows for DCP, or full tensors on rank 0.

Owns the hooks that make `model.state_dict()` hold RowSegments and let `model.load_state_dict()`
take them or full tensors, and the two transfers between rank 0 and the owners, a parameter at a
time. Files are the caller's business. Next: `row_segment.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrixtitan.fsdp.agreement import gather_integers
from matrixtitan.fsdp.param import ShardedParam
from matrixtitan.fsdp.row_segment import RowSegment
from matrixtitan.fsdp.unit import Communication


class OwnedRows(RowSegment):
    """This rank's rows of a sharded parameter, as `model.state_dict()` returns them."""

    param: ShardedParam


def install_hooks(params: Iterable[ShardedParam]) -> None:
    """Let the modules that hold `params` save and load RowSegments."""
    held: dict[nn.Module, dict[str, ShardedParam]] = {}
    for param in params:
        for slot in param.slots:
            held.setdefault(slot.module, {})[slot.name] = param
    for module, by_name in held.items():
        module.register_state_dict_post_hook(_after_state_dict(by_name))
        module.register_load_state_dict_pre_hook(_before_load(by_name))


def _after_state_dict(by_name: Mapping[str, ShardedParam]) -> Callable[..., None]:
    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        _refuse_full_state_dict()
        for name, param in by_name.items():
            # under full_parameters() the module holds the full parameter, which is saved as it is
            if prefix + name in state_dict and getattr(module, name) is param.sharded:
                state_dict[prefix + name] = _owned_rows(param)

    return hook


def _before_load(by_name: Mapping[str, ShardedParam]) -> Callable[..., None]:
    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in by_name.items():
            value = state_dict.get(prefix + name)
            if value is not None and getattr(module, name) is param.sharded:
                state_dict[prefix + name] = _rows_to_load(prefix + name, param, value)

    return hook


def _owned_rows(param: ShardedParam) -> OwnedRows:
    start = param.segment.start if param.segment else 0
    owned = OwnedRows(param.sharded, param.shard.shape, start)
    owned.param = param
    return owned


def _rows_to_load(key: str, param: ShardedParam, value: Tensor) -> Tensor:
    """This rank's rows of `value`, a RowSegment or a full tensor; ValueError for anything else."""
    mine = _owned_rows(param)
    stop = mine.start + mine.rows.shape[0]
    if not isinstance(value, Tensor) or value.shape != mine.shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{key}: the state dict has {found}, and the sharded parameter is "
            f"{tuple(mine.shape)}; load a full tensor, or what state_dict() of the sharded model "
            "returned"
        )
    if not isinstance(value, RowSegment):
        return value[mine.start : stop]
    if (value.start, value.rows.shape) != (mine.start, mine.rows.shape):
        raise ValueError(
            f"{key}: the state dict has {value!r}, and this rank owns rows [{mine.start}, {stop}); "
            "load it under the plan that it was made with, or through torch.distributed.checkpoint"
        )
    return value.rows


def _refuse_full_state_dict() -> None:
    """RuntimeError inside `get_model_state_dict(full_state_dict=True)`.

    PyTorch would hand on each rank's RowSegments as if they were full tensors, and offers no hook
    that knows of the option, so this looks for its frame among the callers.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_get_model_state_dict":
            if getattr(frame.f_locals.get("info"), "full_state_dict", False):
                raise RuntimeError(
                    "get_model_state_dict(full_state_dict=True) cannot gather a model sharded by "
                    "matrixtitan's fully_shard; call handle.state_dict(full=True) on what "
                    "fully_shard returned"
                )
            return
        frame = frame.f_back  # type: ignore[assignment]


# --- full tensors on rank 0 --------------------------------------------------------------------


def gather_state_dict(
    model: nn.Module, communication: Communication, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Full tensors on the CPU of rank 0 of the first replica, by the keys of `model.state_dict()`.

    Other ranks get {}. All ranks of `group`, the shard group, call it. Rank 0 receives one
    parameter at a time.
    """
    replicas = communication.replicas
    if replicas is not None and dist.get_rank(replicas) != 0:
        return {}
    found: dict[str, Any] = {}
    full: dict[ShardedParam, Tensor] = {}
    for key, value in model.state_dict().items():
        if isinstance(value, OwnedRows):
            # a tied parameter travels once
            if value.param not in full:
                full[value.param] = _gather(value, communication, group)
            found[key] = full[value.param]
        else:
            found[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return found if communication.rank == 0 else {}


def _gather(value: OwnedRows, comm: Communication, group: dist.ProcessGroup | None) -> Tensor:
    full = torch.empty(value.shape if comm.rank == 0 else (0,), dtype=value.dtype)
    for segment in value.param.shard.segments:
        if segment.rank == 0:
            if comm.rank == 0:
                full[segment.start : segment.stop] = value.rows
        elif comm.rank == 0:
            shape = (segment.rows, *value.shape[1:])
            rows = torch.empty(shape, dtype=value.dtype, device=comm.device)
            dist.recv(rows, group=group, group_src=segment.rank)
            full[segment.start : segment.stop] = rows
        elif comm.rank == segment.rank:
            dist.send(value.rows.to(comm.device), group=group, group_dst=0)
    return full


# --- loading -----------------------------------------------------------------------------------


def load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    communication: Communication,
    group: dist.ProcessGroup | None,
    from_rank_0: bool,
) -> None:
    """Load RowSegments or full tensors; with `from_rank_0`, only rank 0 of the first replica's.

    All ranks call it, and nothing is loaded anywhere where a rank finds a mistake: this rank's is a
    ValueError, another rank's a RuntimeError.
    """
    comm = communication
    target = model.state_dict()
    first = comm.rank == 0 and (comm.replicas is None or dist.get_rank(comm.replicas) == 0)
    mistake = None
    if first or not from_rank_0:
        mistake = _mistake(target, state_dict, tensors_only=from_rank_0)
    _agree(mistake, comm, group)
    if not from_rank_0:
        model.load_state_dict(state_dict)
        return
    done: set[ShardedParam] = set()
    with torch.no_grad():
        for key, value in target.items():
            source = state_dict[key] if first else None
            if not isinstance(value, OwnedRows):
                _broadcast(value, source, comm, group)
            elif value.param not in done:
                done.add(value.param)
                _scatter(value, source, comm, group)


def _mistake(
    target: Mapping[str, Any], state_dict: Mapping[str, Any], tensors_only: bool
) -> str | None:
    missing = [key for key in target if key not in state_dict]
    unexpected = [key for key in state_dict if key not in target]
    if missing or unexpected:
        return (
            f"the state dict does not fit the model: missing keys {missing}, unexpected keys "
            f"{unexpected}"
        )
    for key, value in target.items():
        source = state_dict[key]
        if isinstance(value, OwnedRows):
            if tensors_only and isinstance(source, RowSegment):
                return f"{key}: from_rank_0 needs a full tensor, and the state dict has {source!r}"
            try:
                _rows_to_load(key, value.param, source)
            except ValueError as error:
                return str(error)
        elif isinstance(value, Tensor):
            if not isinstance(source, Tensor) or source.shape != value.shape:
                found = tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__
                return f"{key}: the state dict has {found}, and the model {tuple(value.shape)}"
        elif tensors_only:
            return f"{key}: from_rank_0 sends tensors only, and this is a {type(value).__name__}"
    return None


def _agree(mistake: str | None, comm: Communication, group: dist.ProcessGroup | None) -> None:
    bad = int(mistake is not None)
    # first over the shard group, then over the replicas, so that all ranks know of every mistake
    for members in (group, comm.replicas):
        if members is not None:
            flags = gather_integers([bad], members, comm.device, "comparing what ranks load")
            bad = max(flag for (flag,) in flags)
    if mistake is not None:
        raise ValueError(mistake)
    if bad:
        raise RuntimeError(
            "load_state_dict: another rank found a mistake in its state dict, which its own error "
            "names; nothing was loaded"
        )


def _scatter(
    value: OwnedRows, source: Tensor | None, comm: Communication, group: dist.ProcessGroup | None
) -> None:
    """Send each owner its rows of `source`, first within the first replica."""
    if comm.replicas is None or dist.get_rank(comm.replicas) == 0:
        for segment in value.param.shard.segments:
            if comm.rank == 0:
                assert source is not None
                rows = source[segment.start : segment.stop].to(comm.device, value.dtype)
                if segment.rank == 0:
                    value.rows.copy_(rows)
                else:
                    dist.send(rows.contiguous(), group=group, group_dst=segment.rank)
            elif comm.rank == segment.rank:
                rows = torch.empty_like(value.rows, device=comm.device)
                dist.recv(rows, group=group, group_src=0)
                value.rows.copy_(rows)
    if comm.replicas is not None and value.rows.numel():
        rows = value.rows.to(comm.device)
        dist.broadcast(rows, group=comm.replicas, group_src=0)
        value.rows.copy_(rows)


def _broadcast(
    value: Tensor, source: Tensor | None, comm: Communication, group: dist.ProcessGroup | None
) -> None:
    """Copy rank 0's `source` into every rank's `value`."""
    moved = (value if source is None else source).detach().to(comm.device, value.dtype)
    moved = moved.clone(memory_format=torch.contiguous_format)
    in_first_replica = comm.replicas is None or dist.get_rank(comm.replicas) == 0
    if group is not None and in_first_replica:
        dist.broadcast(moved, group=group, group_src=0)
    if comm.replicas is not None:
        dist.broadcast(moved, group=comm.replicas, group_src=0)
    value.copy_(moved)
