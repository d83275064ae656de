"""Weights that bfloat16 rounds back to what they were are told of, with their share."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from matrixtitan.log import get_logger
from matrixtitan.stuck_weights import StuckWeights
from tests.lib.distributed import run_distributed
from tests.lib.strategies import Run, make_config


def warnings_at(strategy: str, dtype: str, rate: float, warmup_steps: int) -> list[str]:
    """What this rank warns of in two steps at constant rates."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    config = make_config(strategy)
    config = replace(
        config,
        training=replace(config.training, dtype=dtype, mixed_precision_param=dtype),
        optimizer=replace(config.optimizer, lr=rate, tail_lr=rate, weight_decay=0.0),
        lr_scheduler=replace(config.lr_scheduler, warmup_steps=warmup_steps),
    )
    torch.set_default_dtype(getattr(torch, dtype))  # of the model that Run makes
    run = Run(config)
    torch.set_default_dtype(torch.float32)
    stuck = StuckWeights(config, run.strategy, first_step=1)
    for step in (1, 2):
        for param in run.strategy.stepped_parameters():
            torch.manual_seed(step)
            param.tensor.grad = torch.randn_like(param.tensor)
        with stuck.watch(step):
            run.strategy.step(run.optimizers)
    run.close()
    return messages


@pytest.mark.parametrize("strategy", ["matrix_fsdp", "fsdp2_all_to_all"])
def test_updates_that_bfloat16_rounds_away_are_told_once_with_their_share(strategy: str) -> None:
    first, second = run_distributed(warnings_at, 2, strategy, "bfloat16", 1e-6, 2)
    assert second == []
    (message,) = first
    assert message.startswith("step 2: ")  # at the peak rate, not in the warm-up
    assert "% of the weights that have a gradient did not move: bfloat16 rounds" in message
    assert 'training.dtype = "float32"' in message


@pytest.mark.parametrize(("dtype", "rate"), [("bfloat16", 0.05), ("float32", 1e-6)])
def test_no_word_where_weights_move(dtype: str, rate: float) -> None:
    assert run_distributed(warnings_at, 1, "matrix_fsdp", dtype, rate, 1) == [[]]


def nothing_to_step() -> int:
    config = make_config("matrix_fsdp")
    config = replace(config, training=replace(config.training, dtype="bfloat16"))
    run = Run(config)
    run.strategy.stepped_parameters = lambda: []  # type: ignore[method-assign]
    with StuckWeights(config, run.strategy, first_step=config.lr_scheduler.warmup_steps).watch(
        config.lr_scheduler.warmup_steps
    ):
        pass
    run.close()
    return dist.get_rank()


def test_ranks_that_own_nothing_look_too() -> None:
    assert run_distributed(nothing_to_step, 2) == [0, 1]
