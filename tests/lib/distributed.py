"""Run a function on several ranks, each a process on this machine, and return their results.

Processes come from a fork server that has imported torch, Dynamo included, so a 4-rank test starts
in a fraction of a second. A rank that raises, dies or outlives the timeout fails the test with that
rank's traceback. No process outlives the call.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._inductor.compile_fx",
    "matrixtitan.trainer",
]
"""What the fork server imports. Dynamo comes with Inductor: optimizers and checkpointing import it
at their first use, which takes seconds."""

VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")


class RankFailure(AssertionError):
    """A rank raised, died or timed out; the message has the traceback of every rank that failed."""


def _run_rank(
    connection: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    on_gpu: bool,
    visible_gpus: str | None,
    args: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    device = None
    # the fork server has the environment of its own start
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif visible_gpus is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus
    if on_gpu:
        # NCCL refuses two ranks of one host on one GPU: each says that it is a host of its own
        os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
        os.environ.update(NCCL_IB_DISABLE="1")
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device,
        )
        result = fn(*args)
        dist.barrier()
        dist.destroy_process_group()
        # not send(): torch would share memory with a dead process
        connection.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        connection.close()


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    expect_failure: bool = False,
    on_gpu: bool = False,
    frozen: Sequence[int] = (),
) -> list[Any]:
    """Call `fn(*args)` on `world_size` gloo ranks; return the results in rank order.

    `fn` must be a module-level function. Its arguments and result must pickle; tensors are sent by
    value, so return them detached and on the CPU.

    timeout: seconds, for the whole call.
    expect_failure: the traceback (a string) of a rank that fails stands in place of its result.
        Otherwise any failure raises RankFailure.
    on_gpu: the ranks are NCCL ranks that share the first GPU.
    frozen: ranks that stop themselves for ever, and are not waited for.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pending: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            parent, child = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(child, fn, rank, world_size, store, timeout, on_gpu, VISIBLE_GPUS, args),
                daemon=False,
            )
            process.start()
            child.close()
            pending[parent] = rank
            processes.append(process)
        try:
            while not set(frozen).issuperset(pending.values()):
                ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    for rank in pending.values():
                        failures[rank] = f"no answer within {timeout} s"
                    break
                for connection in ready:
                    assert isinstance(connection, Connection)
                    rank = pending.pop(connection)
                    try:
                        ok, value = pickle.loads(connection.recv_bytes())
                    except EOFError:
                        processes[rank].join(5)
                        ok, value = False, f"the process died, exit code {processes[rank].exitcode}"
                    (results if ok else failures)[rank] = value
                if failures and not expect_failure:
                    # the others wait in a collective for a rank that is gone
                    break
            for rank in set(frozen).intersection(pending.values()):
                failures.setdefault(rank, "frozen")
        finally:
            for process in processes:
                process.join(2 if not failures else 0.2)
                if process.is_alive():
                    process.kill()
                    process.join()
    if failures and not expect_failure:
        raise RankFailure(
            "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items()))
        )
    return [results.get(rank, failures.get(rank)) for rank in range(world_size)]
