"""Acts on every rank with one outcome: success everywhere, or the same error everywhere."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from matrixtitan.checkpoint.errors import CheckpointError, CorruptCheckpointError

T = TypeVar("T")

_HINTS = {
    errno.ENOSPC: "the disk is full: free space, or lower checkpoint.keep_latest_k",
    errno.EDQUOT: "the disk quota is used up: free space, or lower checkpoint.keep_latest_k",
    errno.EROFS: "the folder is read-only: set checkpoint.folder to one that can be written",
    errno.EACCES: "no permission: set checkpoint.folder to one that can be written",
    errno.EFBIG: "the file is larger than the file system or the process's limit allows",
}


def on_all_ranks(group: dist.ProcessGroup, what: str, act: Callable[[], T]) -> T:
    """Collective: call `act` on every rank of `group`; return its result.

    If it raised on any rank, every rank raises an error with the reasons of all failed ranks. The
    error is CorruptCheckpointError if all reasons are corruption, else CheckpointError.
    """
    result: T | None = None
    failure: tuple[str, bool] | None = None
    try:
        result = act()
    except Exception as error:  # to be raised again below, on all ranks
        failure = (reason_of(error), isinstance(error, CorruptCheckpointError))
    failures: list[tuple[str, bool] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    reasons: dict[str, list[int]] = {}
    for rank, entry in enumerate(failures):
        if entry is not None:
            reasons.setdefault(entry[0], []).append(rank)
    if reasons:
        text = "; ".join(
            f"{reason} (rank {', '.join(map(str, ranks))})" for reason, ranks in reasons.items()
        )
        corrupt = all(entry is None or entry[1] for entry in failures)
        raise (CorruptCheckpointError if corrupt else CheckpointError)(f"{what} failed: {text}")
    return result  # type: ignore[return-value]  # act returned it


def from_rank_0(group: dist.ProcessGroup, what: str, act: Callable[[], T]) -> T:
    """Collective: call `act` on rank 0 alone.

    Every rank gets its result (by pickle) or raises its error.
    """
    box = [on_all_ranks(group, what, act if dist.get_rank(group) == 0 else _nothing)]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]  # type: ignore[return-value]  # rank 0's


def reason_of(error: BaseException) -> str:
    """One line for an error: the cause that a person can act on, where there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            hint = _HINTS.get(cause.errno)
            return f"{cause}; {hint}" if hint else str(cause)
        if isinstance(cause, CheckpointError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _nothing() -> None:
    return None


def from_dcp(what: str, error: CheckpointException) -> CheckpointError:
    """Our error for that of DCP, which holds the exceptions of all failed ranks."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    reasons = "; ".join(f"{reason_of(failure)} (rank {rank})" for rank, failure in failures.items())
    corrupt = all(isinstance(failure, CorruptCheckpointError) for failure in failures.values())
    return (CorruptCheckpointError if corrupt else CheckpointError)(f"{what} failed: {reasons}")
