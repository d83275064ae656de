"""Wrong use of the runtime raises on every rank that can know of it, and names what is wrong."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from matrixtitan.fsdp import fully_shard
from matrixtitan.fsdp.streams import Work
from matrixtitan.fsdp.transports import OwnedTensor, Star
from matrixtitan.plan.planner import make_plan
from matrixtitan.plan.shard import ParamSpec
from tests.lib.distributed import run_distributed
from tests.lib.toy import batch, make_toy, toy_units


def meta_left() -> None:
    with torch.device("meta"):
        model = make_toy()
    fully_shard(model, units=toy_units())
    model(batch(0)[0])


def different_models() -> None:
    model = make_toy(dim=8 + 4 * dist.get_rank())
    fully_shard(model, units=toy_units())


def replicas() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def different_model_on_one_rank() -> None:
    """With replicas: ranks outside of its shard group learn of it too."""
    model = make_toy(dim=12 if dist.get_rank() == 3 else 8)
    fully_shard(model, units=toy_units(), mesh=replicas())


def mistake_on_one_rank() -> None:
    plan = None
    if dist.get_rank() == 2:
        plan = make_plan([ParamSpec("weight", (4, 4), "matrix", "w", 4)], 2)
    fully_shard(make_toy(), units=toy_units(), mesh=replicas(), plan=plan)


def mixed_dtypes() -> None:
    model = make_toy()
    model.blocks[1].up.to(torch.float64)
    fully_shard(model, units=toy_units())


def unknown_unit() -> None:
    fully_shard(make_toy(), units=[["blocks.7"]])


def plan_of_another_model() -> None:
    plan = make_plan([ParamSpec("weight", (4, 4), "matrix", "w", 4)], dist.get_world_size())
    fully_shard(make_toy(), units=toy_units(), plan=plan)


def replaced_parameter() -> None:
    model = make_toy()
    fully_shard(model, units=toy_units())
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(12, 8))
    model(batch(0)[0])


def frozen_later() -> None:
    model = make_toy()
    fully_shard(model, units=toy_units())
    model.blocks[1].up.weight.requires_grad_(False)
    model(batch(0)[0])


def reentrant_checkpoint() -> None:
    model = make_toy()
    fully_shard(model, units=toy_units())
    x = model.embed(batch(0)[0])
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    model.head(model.norm(x)).sum().backward()


def other_unit_on_one_rank() -> None:
    """In the first forward: all ranks learn of it."""
    model = make_toy()
    fully_shard(model, units=toy_units())
    skip = 1 if dist.get_rank() == 1 else 0

    def run(tokens: torch.Tensor) -> torch.Tensor:
        x = model.embed(tokens)
        for block in list(model.blocks)[skip:]:
            x = block(x)
        return model.head(model.norm(x))

    model.forward = run  # type: ignore[method-assign]
    model(batch(0)[0])


def skipped_later_on_one_rank() -> None:
    """After the first forward: the rank that departs raises."""
    model = make_toy()
    fully_shard(model, units=toy_units())
    tokens, labels = batch(0)
    model(tokens, labels).backward()
    if dist.get_rank() == 1:
        model.blocks = nn.ModuleList(list(model.blocks)[:2])
    model(tokens, labels).backward()


def other_end_on_one_rank(head_at_first: bool) -> None:
    model = make_toy()
    fully_shard(model, units=toy_units())
    tokens, _ = batch(0)

    def run(tokens: torch.Tensor, head: bool) -> torch.Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x)) if head else x

    model.forward = run  # type: ignore[method-assign, assignment]
    model(tokens, head_at_first).sum().backward()
    model(tokens, head_at_first != (dist.get_rank() == 1)).sum().backward()


def ended_early_on_one_rank() -> None:
    other_end_on_one_rank(head_at_first=True)


def ran_more_on_one_rank() -> None:
    other_end_on_one_rank(head_at_first=False)


CASES: list[tuple[Callable[[], None], str, bool]] = [
    (meta_left, "embed.weight is still on the meta device", True),
    (different_models, "the sharding plans differ between ranks", True),
    (mixed_dtypes, "mixes dtypes: .*blocks.1.up.weight is torch.float64", True),
    (unknown_unit, "'blocks.7', which the model does not have", True),
    (plan_of_another_model, "the plan does not fit the model", True),
    (replaced_parameter, "blocks.1.up.weight was replaced after fully_shard", True),
    (frozen_later, "requires_grad of blocks.1.up.weight was changed after fully_shard", True),
    (reentrant_checkpoint, "reentrant checkpointing is not supported", True),
    (other_unit_on_one_rank, "ranks run different units at the same time", True),
    (
        skipped_later_on_one_rank,
        r"after 3 units comes norm\+head, expected is blocks\.2",
        False,
    ),
    (ended_early_on_one_rank, r"ended without units .*\['norm\+head'\]", False),
    (ran_more_on_one_rank, r"after 4 units comes norm\+head, expected is none", False),
]


@pytest.mark.parametrize(
    ("wrong", "message", "everywhere"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_wrong_use_raises(wrong: Callable[[], None], message: str, everywhere: bool) -> None:
    answers = run_distributed(wrong, 2, timeout=60, expect_failure=True)
    for rank, answer in enumerate(answers):
        if everywhere or rank == 1:
            assert isinstance(answer, str) and re.search(message, answer), f"rank {rank}: {answer}"
        else:
            assert (
                isinstance(answer, str) and "failed: another rank died, or timed out" in answer
            ), answer


def swap_blocks_later_on_one_rank(transport: str, prefetch: int) -> None:
    model = make_toy()
    fully_shard(model, units=toy_units(), transport=transport, prefetch=prefetch)
    tokens, labels = batch(0)
    model(tokens, labels).backward()
    if dist.get_rank() == 1:
        model.blocks = nn.ModuleList([model.blocks[i] for i in (0, 2, 1)])
    start = time.monotonic()
    try:
        model(tokens, labels).backward()
    except RuntimeError as error:
        raise RuntimeError(f"ended after {time.monotonic() - start} s") from error


@pytest.mark.parametrize("transport", ["grouped", "ring", "star"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_units_in_another_order_on_one_rank_end_all_ranks(transport: str, prefetch: int) -> None:
    answers = run_distributed(
        swap_blocks_later_on_one_rank, 2, transport, prefetch, timeout=60, expect_failure=True
    )
    assert "after 2 units comes blocks.2, expected is blocks.1" in str(answers[1]), answers[1]
    assert "failed: another rank died, or timed out" in str(answers[0]), answers[0]
    for answer in answers:
        ended = re.search(r"ended after (\S+) s", answer)
        # long before the collectives' timeout of 60
        assert ended is not None and float(ended[1]) < 10, answer


def forward_that_raised() -> None:
    """A forward raises on all ranks. Then units are called outside the model, in another order."""
    model = make_toy()
    fully_shard(model, units=toy_units())
    tokens, labels = batch(0)
    model(tokens, labels).backward()
    with pytest.raises(IndexError):
        model(tokens + 1000)
    with torch.no_grad():
        for block in reversed(model.blocks):
            block(torch.zeros(2, 8))
    model(tokens, labels).backward()


def test_no_order_is_checked_outside_of_the_model_after_a_forward_that_raised() -> None:
    run_distributed(forward_that_raised, 2)


def test_a_plan_that_differs_on_one_rank_is_an_error_on_all_replicas() -> None:
    for answer in run_distributed(different_model_on_one_rank, 4, timeout=20, expect_failure=True):
        assert "plans differ between ranks: [3] disagree with rank 0" in str(answer), answer


def test_a_mistake_of_one_rank_is_told_to_all() -> None:
    answers = run_distributed(mistake_on_one_rank, 4, timeout=20, expect_failure=True)
    assert "the plan does not fit the model" in str(answers[2]), answers[2]
    for rank in (0, 1, 3):
        assert "ranks [2] found a mistake in their arguments, model, units or plan" in str(
            answers[rank]
        )


def die_in_backward() -> None:
    model = make_toy()
    fully_shard(model, units=toy_units())
    tokens, labels = batch(0)
    model(tokens, labels).backward()
    loss = model(tokens, labels)
    if dist.get_rank() == 1:
        raise SystemExit("gone")
    loss.backward()


def test_a_dead_rank_is_named_by_what_waited_for_it() -> None:
    answers = run_distributed(die_in_backward, 3, timeout=20, expect_failure=True)
    for rank in (0, 2):
        assert "gradients of norm+head failed: another rank died" in answers[rank] or (
            "gathering blocks.2 failed: another rank died" in answers[rank]
        ), answers[rank]


TIMEOUT = 3
"""Timeout in seconds, after which ranks that wait for a frozen rank raise."""


def freeze_in_backward(transport: str) -> str:
    """Rank 1 stops for ever with its connections open. The others raise and say after how long."""
    model = make_toy()
    sharded = fully_shard(
        model, units=toy_units(), transport=transport, timeout=timedelta(seconds=TIMEOUT)
    )
    tokens, labels = batch(0)
    model(tokens, labels).backward()
    loss = model(tokens, labels)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    try:
        loss.backward()
    except RuntimeError as error:
        sharded.close()
        raise RuntimeError(f"ended after {time.monotonic() - start} s") from error
    raise AssertionError("backward went on without rank 1")


@pytest.mark.parametrize("transport", ["grouped", "ring", "star"])
def test_a_frozen_rank_is_named_by_what_waited_for_it_in_time(transport: str) -> None:
    answers = run_distributed(
        freeze_in_backward, 3, transport, timeout=20, expect_failure=True, frozen=[1]
    )
    assert answers[1] == "frozen"
    for rank in (0, 2):
        assert re.search(
            r"(gathering|reducing the gradients of) \S+ failed: another rank died, or timed out",
            answers[rank],
        ), answers[rank]
        ended = re.search(r"ended after (\S+) s", answers[rank])
        assert ended is not None, answers[rank]
        assert float(ended[1]) < 2 * TIMEOUT, answers[rank]


def interrupt_between_receives_and_sends() -> None:
    """Ctrl-C on all ranks at once, while each waits for what the other has not sent.

    Raises with the seconds that the tear-down took.
    """
    model = make_toy()
    sharded = fully_shard(model, units=toy_units(), transport="star")
    tokens, labels = batch(0)
    model(tokens, labels).backward()
    loss = model(tokens, labels)
    reducing = sharded._communication.reduce
    assert isinstance(reducing, Star)

    reduce = reducing.reduce

    def interrupted(tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        both_own = {owned.owner for owned in tensors} == {0, 1}
        if both_own:
            reducing._send = lambda sends: []  # type: ignore[method-assign]
        works = reduce(tensors)
        if both_own:
            raise KeyboardInterrupt
        return works

    reducing.reduce = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    start = time.monotonic()
    sharded.close()
    dist.destroy_process_group()
    raise RuntimeError(f"ended after {time.monotonic() - start} s")


def test_interrupted_ranks_do_not_wait_for_each_other() -> None:
    answers = run_distributed(
        interrupt_between_receives_and_sends, 2, timeout=20, expect_failure=True
    )
    for answer in answers:
        ended = re.search(r"ended after (\S+) s", answer)
        assert ended is not None, answer
        assert float(ended[1]) < 5, answer
