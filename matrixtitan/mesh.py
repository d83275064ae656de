"""The processes of a run: device, process group, the (dp_replicate, dp_shard) mesh, seeds.

Owns everything that is set once per process before a model exists, including NCCL's environment,
and what the ranks do together outside training. Next: `trainer.py`.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from matrixtitan.config import CommConfig, Config, DebugConfig, ParallelismConfig
from matrixtitan.log import get_logger
from matrixtitan.mistakes import is_mistake
from matrixtitan.ranks import counted_ranks, mesh_shape

logger = get_logger()
T = TypeVar("T")

_WAIT_LOG_SECONDS = 60.0
_POLL_SECONDS = 0.01, 1.0  # first and longest pause between two looks at the store


@dataclass(frozen=True)
class World:
    """Who this process is among the `size` ranks of the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    owns_group: bool

    def set_timeout(self, seconds: int, except_for: Sequence[dist.ProcessGroup] = ()) -> None:
        """How long a collective may take from now on, in every group but those of `except_for`.

        Two names are private in PyTorch, and used only here: the list of all groups, and before
        2.15 the call that changes a group's timeout.
        """
        if dist.get_backend() == "fake":  # a dry run waits for nobody
            return
        set_timeout = (
            dist.set_timeout
            if hasattr(dist, "set_timeout")
            else dist.distributed_c10d._set_pg_timeout
        )
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in except_for:
                set_timeout(timedelta(seconds=seconds), group)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Collective: every rank's `mine`, by rank. A dry run repeats its only rank's."""
        if dist.get_backend() == "fake":
            return [mine] * self.size
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine)
        return everyone

    def on_all_ranks(self, act: Callable[[], T], long_work: str = "") -> T:
        """Collective: call `act` and return its result. A mistake that one rank finds ends all
        ranks.

        Without this, the ranks that find nothing wrong would wait for those that left, and fail in
        a collective in turn. `long_work` says what `act` does where it may take one rank longer
        than a collective's time limit.
        """
        mistake: Exception | None = None
        try:
            result = act()
        except Exception as error:
            if not is_mistake(error):
                raise
            mistake = error
        if long_work:
            self.wait_for_all(long_work)
        found = self.gather_objects(None if mistake is None else str(mistake))
        if mistake is not None:
            raise mistake
        others = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
        if others:
            raise ValueError(others[0])
        return result

    def wait_for_all(self, work: str) -> None:
        """Return when every rank has called this; all ranks call it equally often.

        Use it after work that takes some ranks much longer than others. Unlike a collective, this
        wait has no time limit. torchrun notices a rank that dies, and ends the others. `work` tells
        the log what the missing ranks are doing.

        The store of the process group is private in PyTorch. A store of our own would need an
        address and a port that all ranks know, and only the launcher has these.
        """
        if self.size == 1 or dist.get_backend() == "fake":
            return
        store = dist.distributed_c10d._get_default_store()
        arrived = store.add("wait_for_all/arrived", 1)
        # of this call: no rank reaches the next call before all ranks have reached this one
        number = -(-arrived // self.size)
        store.set(f"wait_for_all/{number}/{self.rank}", "")
        pause, longest = _POLL_SECONDS
        told = time.monotonic()
        while store.add("wait_for_all/arrived", 0) < number * self.size:
            if self.rank == 0 and time.monotonic() - told > _WAIT_LOG_SECONDS:
                missing = [
                    rank
                    for rank in range(self.size)
                    if not store.check([f"wait_for_all/{number}/{rank}"])
                ]
                logger.info("waiting for %s, which still %s", _name_ranks(missing), work)
                told = time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Destroy the process group, unless it was there before.

        After an error on GPUs it stays: NCCL would wait for peers that no longer join a
        collective, and the error would be printed only after that.
        """
        if not self.owns_group or (kind is not None and self.device.type == "cuda"):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        if kind is None:
            # The threads of a gloo group live as long as anything refers to the group. A thread
            # that drops a tensor while Python ends can abort the process
            # (https://github.com/pytorch/pytorch/pull/179291). So references in cycles are
            # collected first. After an error they stay: the end of a thread that waits for a dead
            # peer would be waited for.
            atexit.register(gc.collect)


def _name_ranks(ranks: Sequence[int]) -> str:
    """Such as "ranks 3, 8-15": neighbouring ranks, which often share a machine, as a range."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return "ranks " + ", ".join(names)


def init_world(config: Config) -> World:
    """Join the run that the launcher describes (RANK, WORLD_SIZE, ...), or be a run of one process.

    An existing process group is used as it is, and on the CPU if it has no NCCL. Raises ValueError
    where the degrees in the config do not fit the number of ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    owns_group = not dist.is_initialized()
    use_cuda = torch.cuda.is_available() and (owns_group or "nccl" in dist.get_backend_config())
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; "
            "start one process per GPU (NPROC)"
        )
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        _set_cuda_environment(config.comm)
        torch.cuda.set_device(device)
    if owns_group:
        size = counted_ranks(config.parallelism, int(os.environ.get("WORLD_SIZE", "1")))
        # degrees that do not fit stop here, before anything connects
        mesh_shape(config.parallelism, size)
        _init_group(config, device)
    mesh = build_mesh(
        config.parallelism,
        dist.get_world_size(),
        device.type,
        timedelta(seconds=config.comm.init_timeout_seconds),
    )
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device, mesh, owns_group)


def _init_group(config: Config, device: torch.device) -> None:
    parallelism = config.parallelism
    if parallelism.dry_run_world_size:
        # A backend that moves nothing and completes at once. PyTorch keeps it with its test tools.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake",
            store=FakeStore(),
            rank=parallelism.dry_run_rank,
            world_size=parallelism.dry_run_world_size,
        )
        return
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    if device.type == "cuda":
        # gloo besides NCCL: what ranks agree on outside training (checkpoints) needs no GPU
        backend, device_id = "cpu:gloo,cuda:nccl", device
    else:
        backend, device_id = "gloo", None
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(
            backend,
            timeout=timeout,
            device_id=device_id,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )


def build_mesh(
    parallelism: ParallelismConfig, world_size: int, device_type: str, timeout: timedelta
) -> DeviceMesh:
    """The mesh with axes dp_replicate and dp_shard, also where an axis has size 1.

    The ranks of a shard group are neighbours. `timeout` is for the groups made here. An axis of all
    ranks uses the world's group.
    """
    shape = mesh_shape(parallelism, world_size)
    ranks = torch.arange(world_size, device="cpu").view(shape)
    replica, shard = divmod(dist.get_rank(), shape.shards)
    # init_device_mesh would give its groups PyTorch's default timeout: half an hour on gloo
    groups = [
        _axis_group(members.tolist(), world_size, timeout)
        for members in (ranks[:, shard], ranks[replica])
    ]
    return DeviceMesh.from_group(
        groups, device_type, mesh=ranks, mesh_dim_names=("dp_replicate", "dp_shard")
    )


def _axis_group(ranks: list[int], world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group along an axis. All ranks call this together, each with its own `ranks`."""
    if len(ranks) == world_size:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _set_cuda_environment(comm: CommConfig) -> None:
    """Defaults that a user's own environment overrides, also under a variable's older name.

    Must run before the first CUDA allocation.
    """
    defaults = {
        # units come and go in every step: memory freed by one size then serves another
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
        # NCCL's flight recorder writes what each rank waited for when a collective times out
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): str(comm.trace_buf_size),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1" if comm.trace_buf_size else "0",
        # a timed-out collective ends the process instead of hanging in clean-up
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING",): "3",
    }
    for names, value in defaults.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def set_seeds(debug: DebugConfig) -> None:
    """Seed the global generators, alike on all ranks. Weights and data have generators of their
    own.
    """
    random.seed(debug.seed)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        # what cuBLAS needs to be deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
