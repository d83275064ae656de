"""Agreement between ranks: that all have the same plan, and that all gather the same unit next.

Owns the small all-gathers that check both, and the error that every rank raises where they find a
difference. It never moves weights or gradients (`transports.py` does). Next: `hooks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist

from matrixtitan.fsdp.groups import Groups
from matrixtitan.fsdp.streams import failure
from matrixtitan.plan.shard import Plan


def gather_integers(
    values: list[int], group: dist.ProcessGroup, device: torch.device, what: str
) -> list[list[int]]:
    """Every rank's `values`, in group rank order; errors name `what` they are for."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(gathered, mine, group=group)
    except RuntimeError as error:
        raise failure(what, error) from error
    return [tensor.tolist() for tensor in gathered]


def compare_plans(plan: Plan | None, groups: Groups, device: torch.device) -> None:
    """RuntimeError on all ranks, shards and replicas, unless all have the same plan.

    All ranks call it before anything else communicates. `plan` None: this rank found a mistake. The
    others learn of it here, and this rank raises its own error afterwards.
    """
    if groups.shard is None:
        return
    digest = plan.digest if plan is not None else "0" * 64
    words = [dist.get_rank(), *(int(digest[i : i + 8], 16) for i in range(0, 64, 8))]
    size = len(words)
    # over shards, then what each found over replicas: no rank raises before all know all
    for group in (groups.shard, groups.replicas):
        if group is None or dist.get_world_size(group) == 1:
            continue
        gathered = gather_integers(
            words, group, device, "comparing the sharding plans of all ranks"
        )
        words = list(chain.from_iterable(gathered))
    found = {words[i]: words[i + 1 : i + size] for i in range(0, len(words), size)}
    if plan is None:
        return
    mistaken = [rank for rank, other in found.items() if not any(other)]
    if mistaken:
        raise RuntimeError(
            f"ranks {mistaken} found a mistake in their arguments, model, units or plan, which "
            "their own errors name; this rank has none. Call fully_shard with the same model and "
            "the same settings on every rank"
        )
    first = min(found)
    different = [rank for rank, other in found.items() if other != found[first]]
    if different:
        raise RuntimeError(
            f"the sharding plans differ between ranks: {different} disagree with rank {first} "
            f"(this rank's digest is {digest[:16]}). Build the same model with the same settings "
            "on every rank"
        )


def order_check(groups: Groups, device: torch.device, names: list[str]) -> Callable[[int], None]:
    """A function of a unit's index, to be called by all ranks of the shard group at once.

    It raises RuntimeError on all of them unless all give the same index. `names` are the units'.
    """

    def check(index: int) -> None:
        if groups.shard is None or groups.shard_ranks == 1:
            return
        what = f"agreeing that {names[index]} is gathered next"
        gathered = gather_integers([index], groups.shard, device, what)
        indices = [values[0] for values in gathered]
        if any(other != index for other in indices):
            listing = ", ".join(
                f"rank {rank}: {names[other]}" for rank, other in enumerate(indices)
            )
            raise RuntimeError(
                f"ranks run different units at the same time ({listing}); every rank must run the "
                "same units in the same order, since all ranks gather them together"
            )

    return check
