"""More ranks than matrices: ranks that own no matrix, or nothing, train, clip, save and load."""

from __future__ import annotations

from pathlib import Path

import pytest

from matrixtitan.config import Config
from matrixtitan.trainer import Trainer
from models.llama import LLAMA3_FLAVORS, LlamaFlavor
from tests.distributed.test_trainer import Curves, config_for, corpus, curves
from tests.lib.distributed import run_distributed

__all__ = ["corpus"]  # a fixture
RANKS = 9  # the model below has 7 matrices


def train_one_block(config: Config) -> int:
    """Train, resuming where a checkpoint is; return how many matrices this rank owns."""
    LLAMA3_FLAVORS["one_block"] = LlamaFlavor(32, 1, 2, 2, 48)
    with Trainer(config) as trainer:
        trainer.train()
        return sum(param.role == "matrix" for param in trainer.strategy.stepped_parameters())


@pytest.mark.slow
def test_ranks_without_a_matrix_train_clip_save_and_load(corpus: Path, tmp_path: Path) -> None:
    def train(folder: str, world_size: int, steps: int) -> list[int]:
        config = config_for(
            corpus,
            tmp_path / folder,
            model__flavor="one_block",
            parallelism__strategy="matrix_fsdp",
            training__steps=steps,
            training__global_batch_size=RANKS,
            training__local_batch_size=1,
            lr_scheduler__total_steps=4,
            checkpoint__enable="true",
            checkpoint__interval=2,
        )
        return run_distributed(train_one_block, world_size, config, timeout=150)

    assert min(train("through", RANKS, 4)) == 0
    train("resumed", RANKS, 2)
    train("resumed", RANKS, 4)
    train("few", 3, 4)

    def losses(folder: str) -> list[tuple[int, float]]:
        found: Curves = curves(tmp_path / folder)
        return found["loss/train"]

    assert losses("resumed") == losses("through")
    for (step, loss), (other_step, other) in zip(losses("through"), losses("few"), strict=True):
        assert step == other_step
        assert loss == pytest.approx(other, abs=5e-5)
