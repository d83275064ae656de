"""What a number of ranks means for a config: the mesh's shape, each rank's part of a batch.

Pure arithmetic without torch, so that the launcher can check it before it starts any process. Next:
`mesh.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from matrixtitan.config import Config, ParallelismConfig, TrainingConfig

AUTOMATIC_TOKENS = 8192
"""The most tokens in a microbatch of automatic size, unless one sequence is longer. A cautious
choice for memory, not a measured optimum.
"""


class MeshShape(NamedTuple):
    replicas: int
    shards: int


class BatchSplit(NamedTuple):
    """Each rank runs `microbatches` forward passes of `local_batch_size` rows in a step.

    Over all ranks, `padding_rows` of these rows hold no sequence.
    """

    local_batch_size: int
    microbatches: int
    padding_rows: int


def check_ranks(config: Config, world_size: int) -> None:
    """ValueError if `world_size` ranks cannot run `config`. A dry run counts its imagined ranks."""
    size = counted_ranks(config.parallelism, world_size)
    mesh_shape(config.parallelism, size)
    split_batch(config.training, size)


def counted_ranks(parallelism: ParallelismConfig, processes: int) -> int:
    """The ranks of a run: its processes, or what a dry run imagines, which takes one process."""
    imagined = parallelism.dry_run_world_size
    if imagined and processes > 1:
        raise ValueError(
            f"parallelism.dry_run_world_size {imagined}: a dry run is one process that runs one of "
            f"{imagined} imagined ranks, and this run has {processes} processes. Set NPROC to 1"
        )
    return imagined or processes


def mesh_shape(parallelism: ParallelismConfig, world_size: int) -> MeshShape:
    """The two degrees, -1 resolved. ValueError if they do not make up `world_size` ranks."""
    parallelism.require("parallelism.")
    replicas = parallelism.data_parallel_replicate_degree
    shards = parallelism.data_parallel_shard_degree
    if shards == -1:
        shards, rest = divmod(world_size, replicas)
        if rest:
            raise ValueError(
                f"parallelism.data_parallel_replicate_degree {replicas} does not divide the "
                f"{world_size} ranks of this run, which each copy of the weights takes an equal "
                "part of; change one of them"
            )
    if replicas * shards != world_size:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree {replicas} x data_parallel_shard_degree "
            f"{shards} is not the {world_size} ranks of this run; change one of them (a shard "
            "degree of -1 takes what the replicas leave)"
        )
    return MeshShape(replicas, shards)


def split_batch(training: TrainingConfig, world_size: int) -> BatchSplit:
    """How `world_size` ranks share the global batch of a step.

    With training.local_batch_size 0 any number of ranks can, by padding. ValueError, naming the
    nearest sizes that fit, if a local batch size is given and does not divide evenly.
    """
    training.require("training.")
    total, size = training.global_batch_size, training.local_batch_size
    if size == 0:
        limit = max(1, AUTOMATIC_TOKENS // training.seq_len)
        microbatches = _ceil_div(total, world_size * limit)
        size = _ceil_div(total, world_size * microbatches)
        return BatchSplit(size, microbatches, world_size * microbatches * size - total)
    per_pass = size * world_size
    if total % per_pass:
        lower = total // per_pass * per_pass
        nearest = " or ".join(str(n) for n in (lower, lower + per_pass) if n > 0)
        raise ValueError(
            f"training.global_batch_size {total} cannot be shared evenly: {world_size} ranks of "
            f"training.local_batch_size {size} take {per_pass} sequences at a time. Set "
            "training.local_batch_size to 0, which fits any number of ranks, or the global batch "
            f"to {nearest}"
        )
    return BatchSplit(size, total // per_pass, 0)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
