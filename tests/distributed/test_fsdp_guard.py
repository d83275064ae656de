"""Use of a sharded parameter that would compute with a part of it, or make ranks differ, raises."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from matrixtitan.fsdp import fully_shard
from matrixtitan.fsdp.grad_norm import clip_grad_norm_
from matrixtitan.fsdp.handle import MatrixFSDP
from matrixtitan.fsdp.hooks import Call
from tests.lib.distributed import run_distributed
from tests.lib.toy import Toy, batch, make_toy, toy_units


def sharded_toy(backward: bool = False) -> tuple[Toy, MatrixFSDP]:
    model = make_toy()
    handle = fully_shard(model, units=toy_units())
    if backward:
        tokens, labels = batch(0)
        model(tokens, labels).backward()
    return model, handle


def gathered_toy() -> Toy:
    """The unit that runs last stays gathered between forward and backward."""
    model, _ = sharded_toy()
    model(batch(0)[0])
    return model


def transpose() -> None:
    torch.randn(2, 8) @ sharded_toy()[0].embed.weight.T


def transpose_without_grad() -> None:
    with torch.no_grad():
        transpose()


def embedding_without_grad() -> None:
    with torch.no_grad():
        F.embedding(torch.zeros(1, dtype=torch.int64), sharded_toy()[0].embed.weight)


def linear_without_grad() -> None:
    with torch.no_grad():
        # a scalar operand, so that only the function's name tells
        F.linear(torch.randn(1), sharded_toy()[0].blocks[0].up.weight)


def scale_without_grad() -> None:
    weight = sharded_toy()[0].blocks[0].up.weight
    with torch.no_grad():
        torch.randn(3, 12, 8) * weight


def norm_enters_autograd() -> None:
    sharded_toy()[0].embed.weight.pow(2).sum()


def to_bfloat16() -> None:
    sharded_toy()[0].bfloat16()


def to_bfloat16_while_gathered() -> None:
    gathered_toy().bfloat16()


def data_of_the_same_shape() -> None:
    for param in sharded_toy()[0].parameters():
        param.data = param.data.clone()


def data_while_gathered() -> None:
    model, handle = sharded_toy()
    model(batch(0)[0])
    model.norm.weight.data = model.norm.weight.data.clone()
    handle.reshard()


def deepcopy() -> None:
    copy.deepcopy(sharded_toy()[0])


def deepcopy_of_a_parameter() -> None:
    copy.deepcopy(sharded_toy()[0].embed.weight)


def deepcopy_while_gathered() -> None:
    copy.deepcopy(gathered_toy().norm)


def deepcopy_of_the_runtime() -> None:
    """Each of the objects that a model's hooks hold refuses, whichever is reached first."""
    _, handle = sharded_toy()
    state = handle._schedule.states[0]
    refused = []
    for part in (handle._schedule, state, state.unit, Call(state, handle.model)):
        try:
            copy.deepcopy(part)
        except RuntimeError as error:
            refused += re.findall(r"its (\w+) was reached", str(error))
    raise RuntimeError(f"refused: {refused}")


def register_hook() -> None:
    sharded_toy()[0].embed.weight.register_hook(lambda grad: None)


def hook_before() -> None:
    model = make_toy()
    model.embed.weight.register_hook(lambda grad: None)
    fully_shard(model, units=toy_units())


def accumulate_hook_before() -> None:
    model = make_toy()
    model.embed.weight.register_post_accumulate_grad_hook(lambda param: None)
    fully_shard(model, units=toy_units())


def added_parameter() -> None:
    model, _ = sharded_toy()
    model.blocks[0].adapter = nn.Linear(2, 2)
    model(batch(0)[0])


def torch_clip() -> None:
    torch.nn.utils.clip_grad_norm_(sharded_toy(backward=True)[0].parameters(), 1.0)


def torch_clip_foreach() -> None:
    grads = [p.grad for p in sharded_toy(backward=True)[0].parameters() if p.grad is not None]
    torch._foreach_norm(grads)


def grad_scaler() -> None:
    model, _ = sharded_toy(backward=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


OUTSIDE = "was used by .* outside its unit's forward"
CASES: list[tuple[Callable[[], None], str]] = [
    (transpose, f"embed.weight {OUTSIDE}"),
    (transpose_without_grad, f"embed.weight {OUTSIDE}"),
    (embedding_without_grad, f"embed.weight {OUTSIDE}"),
    (linear_without_grad, f"blocks.0.up.weight {OUTSIDE}"),
    (scale_without_grad, f"blocks.0.up.weight {OUTSIDE}"),
    (norm_enters_autograd, f"embed.weight {OUTSIDE}"),
    (to_bfloat16, r"weight: its \.data was assigned after fully_shard"),
    (data_of_the_same_shape, r"weight: its \.data was assigned after fully_shard"),
    (to_bfloat16_while_gathered, r"weight: its \.data was assigned after fully_shard"),
    (data_while_gathered, r"norm.weight: its \.data was assigned while .* gathered"),
    (deepcopy, "a sharded model cannot be copied"),
    (deepcopy_of_a_parameter, "embed.weight is sharded, and a sharded model cannot be copied"),
    (deepcopy_while_gathered, "a sharded model cannot be copied"),
    (deepcopy_of_the_runtime, "'Schedule', 'UnitState', 'Unit', 'Call'"),
    (register_hook, "embed.weight: register_hook .* use register_post_accumulate_grad_hook"),
    (hook_before, "embed.weight has a gradient hook"),
    (accumulate_hook_before, "embed.weight has a gradient hook"),
    (added_parameter, r"blocks.0.adapter.weight, blocks.0.adapter.bias came into the model"),
    (torch_clip, "vector_norm of the gradient of .*; call clip_grad_norm_ of the handle"),
    (torch_clip_foreach, "_foreach_norm of the gradient of .*; call clip_grad_norm_ of the handle"),
    (grad_scaler, "GradScaler would .* in bfloat16"),
]


def all_messages() -> list[str]:
    messages = []
    for wrong, _ in CASES:
        try:
            wrong()
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
        else:
            messages.append("no error")
    return messages


def allowed_uses() -> tuple[list[str], list[str]]:
    """The names of the parameters whose hook ran, and of those with a gradient on this rank."""
    model, _ = sharded_toy()
    names = {param: name for name, param in model.named_parameters()}
    ran: list[str] = []

    def hook(param: torch.Tensor) -> None:
        assert param.grad is not None
        ran.append(names[param])  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model.parameters(), foreach=True),
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.optim.AdamW(model.parameters(), foreach=False),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ]
    model.float().to("cpu")
    tokens, labels = batch(0)
    model(tokens, labels).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    expected = [name for name, param in model.named_parameters() if param.grad is not None]
    clip_grad_norm_(grads, 1.0, None)
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.detach().clone()).mul_(2).add_(torch.ones_like(param))
            repr(param)
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(tokens, labels).backward()
    return ran[: len(expected)], expected


@pytest.fixture(scope="module")
def messages() -> list[list[str]]:
    return run_distributed(all_messages, 2, timeout=60)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case[0].__name__ for case in CASES])
def test_wrong_use_raises(messages: list[list[str]], index: int) -> None:
    for rank in range(2):
        assert re.search(CASES[index][1], messages[rank][index]), messages[rank][index]


def test_optimizers_and_hooks_run() -> None:
    for ran, expected in run_distributed(allowed_uses, 2, timeout=60):
        assert expected and sorted(ran) == sorted(expected)
