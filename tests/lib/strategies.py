"""Train a very small Llama under any strategy, a few steps, on fixed tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from matrixtitan.config import Config, config_from_dict
from matrixtitan.optim.build import Optimizers
from matrixtitan.parallelize import parallelize
from matrixtitan.rules import MuonRule
from models.llama import Llama, LlamaFlavor

SEQUENCES, SEQ_LEN, VOCAB = 24, 8, 50
FLAVOR = LlamaFlavor(
    dim=24, n_layers=2, n_heads=2, n_kv_heads=1, ffn_hidden_dim=40
)  # 40 / 3 rows: uneven

SECTIONS = {
    "training": {
        "steps": 20,
        "seq_len": SEQ_LEN,
        "local_batch_size": 2,
        "global_batch_size": SEQUENCES,
        "mixed_precision_param": "float32",
    },
    "optimizer": {"name": "muon", "lr": 0.02, "weight_decay": 0.01, "tail_lr": 3e-3},
}

STRATEGIES: dict[str, dict[str, Any]] = {
    "matrix_fsdp": {"strategy": "matrix_fsdp"},
    "fsdp2_gather_each": {"strategy": "fsdp2", "matrix_exchange": "gather_each"},
    "fsdp2_gather_once": {"strategy": "fsdp2", "matrix_exchange": "gather_once"},
    "fsdp2_all_to_all": {"strategy": "fsdp2", "matrix_exchange": "all_to_all"},
    "fsdp2_all_to_all_stock": {
        "strategy": "fsdp2",
        "matrix_exchange": "all_to_all",
        "fsdp2_transports": "stock",
    },
    "zero1_owner": {"strategy": "zero1_owner"},
    "ddp": {"strategy": "ddp"},
}


def make_config(strategy: str, **muon: Any) -> Config:
    """The config of one of STRATEGIES; keywords replace options of Muon."""
    config = config_from_dict(SECTIONS, __name__)
    choice = dict(STRATEGIES[strategy])
    exchange = choice.pop("matrix_exchange", "all_to_all")
    return dataclasses.replace(
        config,
        parallelism=dataclasses.replace(config.parallelism, **choice),
        optimizer=dataclasses.replace(
            config.optimizer, matrix_exchange=exchange, rule=MuonRule(**muon)
        ),
    )


class Run:
    """One strategy's model and optimizers on this rank; `replicate` is the degree of HSDP's outer axis."""

    def __init__(
        self, config: Config, tied: bool = False, replicate: int = 1, device: str = "cpu"
    ) -> None:
        size = dist.get_world_size()
        self.device = torch.device(device)
        mesh = init_device_mesh(
            self.device.type,
            (replicate, size // replicate),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
        with torch.device("meta"):
            self.model = Llama(FLAVOR, vocab_size=VOCAB, max_seq_len=SEQ_LEN, tie_embeddings=tied)
        self.config = config
        self.strategy = parallelize(self.model, config, mesh, self.device)
        self.close = self.strategy.close
        self.strategy.materialize(self.init_rows)
        self.model.init_buffers(self.device)
        self.optimizers: Optimizers = self.strategy.build_optimizers(config.optimizer)

    def init_rows(self, fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor) -> None:
        self.model.init_rows(fqn, full_shape, start, out, seed=0)

    def forward_backward(self, step: int, microbatches: int = 1) -> float:
        """Gradients of this rank's share of the global batch; its share of the loss."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=generator).to(self.device)
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        total = 0.0
        for index, part in enumerate(mine.chunk(microbatches)):
            self.strategy.set_reduce_gradients(index == microbatches - 1)
            loss = self.strategy.model(part[:, :-1], part[:, 1:]) / (SEQUENCES * SEQ_LEN)
            loss.backward()
            total += loss.item()
        return total

    def update(self) -> float:
        """Clip and step; the gradient norm."""
        norm = self.strategy.clip_grad_norm_(1.0).item()
        self.strategy.step(self.optimizers)
        self.strategy.model.zero_grad(set_to_none=True)
        return norm

    def train(self, steps: int, microbatches: int = 1) -> tuple[list[float], list[float]]:
        """The global loss and gradient norm of each step."""
        losses, norms = [], []
        for step in range(steps):
            losses.append(self.forward_backward(step, microbatches))
            norms.append(self.update())
        total = torch.tensor(losses, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist(), norms
