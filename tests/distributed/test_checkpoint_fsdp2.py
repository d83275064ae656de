"""Weights go to and from a model that PyTorch's own `fully_shard` shards, through DCP alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from matrixtitan.checkpoint import Checkpointer, TrainState
from matrixtitan.config import Config
from models.llama import Llama
from tests.lib.distributed import run_distributed
from tests.lib.strategies import FLAVOR, SEQ_LEN, VOCAB, Run, make_config


def with_checkpoints(folder: Path, initial_load_path: str = "") -> Config:
    config = make_config("matrix_fsdp")
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=str(folder)),
        checkpoint=dataclasses.replace(
            config.checkpoint, enable=True, initial_load_path=initial_load_path
        ),
    )


def checkpointer(config: Config, run: Run) -> Checkpointer:
    return Checkpointer(config, run.strategy, run.optimizers)


def fsdp2_model() -> Any:
    model = Llama(FLAVOR, vocab_size=VOCAB, max_seq_len=SEQ_LEN, tie_embeddings=False)
    for layer in model.layers.values():
        fully_shard(layer)
    return fully_shard(model)


def both_ways(folder: Path) -> None:
    ours = Run(with_checkpoints(folder / "ours"))
    ours.train(2)
    with checkpointer(ours.config, ours) as saving:
        saving.save(2, TrainState(2))

    theirs = fsdp2_model()
    state = theirs.state_dict()
    step = folder / "ours" / ours.config.checkpoint.folder / "step-2"
    dcp.load({"model": state}, checkpoint_id=str(step))
    whole = {fqn: tensor.full_tensor() for fqn, tensor in state.items()}  # collective, in one order
    for param in ours.strategy.local_parameters():
        rows = whole[param.fqn][param.start : param.start + param.tensor.shape[0]]
        assert torch.equal(rows, param.tensor), param.fqn

    with torch.no_grad():
        for tensor in state.values():
            tensor.mul_(2.0)
    dcp.save({"model": state}, checkpoint_id=str(folder / "theirs"))
    again = Run(with_checkpoints(folder / "again", str(folder / "theirs")))
    with checkpointer(again.config, again) as loading:
        loading.load()
    for new, old in zip(
        again.strategy.local_parameters(), ours.strategy.local_parameters(), strict=True
    ):
        assert torch.equal(new.tensor, 2.0 * old.tensor.detach()), new.fqn
    ours.close()
    again.close()
    dist.barrier()


def test_fully_shard_models_and_ours_load_each_other(tmp_path: Path) -> None:
    run_distributed(both_ways, 3, tmp_path)
