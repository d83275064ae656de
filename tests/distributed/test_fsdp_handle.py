"""What the handle of `fully_shard` offers to other people's trainers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrixtitan.fsdp import MixedPrecisionPolicy, fully_shard
from tests.lib.distributed import run_distributed
from tests.lib.toy import batch, gathered_nbytes, make_toy, share, toy_units


class Switch(nn.Module):
    """Uses `left`, `right` or both. The large matrices are reduced on their own, not packed."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(128, 160)
        self.right = nn.Linear(128, 160)
        self.norm = nn.LayerNorm(160)

    def forward(self, x: Tensor, sides: str) -> Tensor:
        y = x.new_zeros(len(x), 160)
        for side in sides.split():
            y = y + getattr(self, side)(x)
        return self.norm(y).square().sum()


class Switches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Switch()

    def forward(self, x: Tensor, sides: str) -> Tensor:
        return self.inner(x, sides)


class Scales(nn.Module):
    """If it uses its weights, their gradients are -0.0 in each element."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4, 4)) for _ in range(4)])

    def forward(self, x: Tensor, use: bool) -> Tensor:
        for weight in self.weights if use else ():
            x = x + weight.sum() * -0.0
        return x.sum()


def groups_and_clipping() -> None:
    """no_sync, param_groups and clip_grad_norm_ give what plain PyTorch gives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, plain = make_toy(), make_toy()
    handle = fully_shard(model, units=toy_units(), gradient_reduction="sum")
    groups = handle.param_groups()
    assert [group["name"] for group in groups] == ["matrix", "tail"]
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters())
    listed = {n: p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    assert all(listed[name] is param for name, param in model.named_parameters())
    assert any(param.numel() == 0 for param in listed.values()), "zero rows are listed too"

    for _ in range(2):
        plain(*batch(0)).backward()
    mine = [share(tensor, rank, world) for tensor in batch(0)]
    with handle.no_sync():
        model(*mine).backward()
        assert all(param.grad is None for param in listed.values())
    model(*mine).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(handle.clip_grad_norm_(0.5), expected)
    full = {name: param.grad for name, param in plain.named_parameters()}
    for local in handle.local_parameters():
        grad = local.tensor.grad
        assert grad is not None
        wanted = full[local.fqn]
        assert wanted is not None
        torch.testing.assert_close(grad, wanted[local.start : local.start + len(grad)])

    frozen = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    frozen[0].requires_grad_(False)
    groups = fully_shard(frozen, units=[["0"]]).param_groups()
    assert [group["param_names"] for group in groups] == [["1.weight", "1.bias"]]


def unused_gradients(replicas: int = 1) -> None:
    """`.grad` stays None exactly where no rank of the mesh used the parameter."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    for microbatches, reduce_each in ((1, True), (2, True), (2, False)):
        for last_uses in ("left", "left right"):
            torch.manual_seed(0)
            handle = fully_shard(model := Switches(), units=[["inner"]], mesh=mesh)
            sides = last_uses if rank == world - 1 else "left"
            for index in range(microbatches):
                handle.set_reduce_gradients(reduce_each or index == microbatches - 1)
                # the last microbatch uses `left` alone
                used = sides if index == 0 else "left"
                model(torch.randn(3, 128), used).backward()
            for local in handle.local_parameters():
                expected = "right" not in local.fqn or "right" in last_uses
                case = (local.fqn, microbatches, reduce_each, last_uses)
                assert (local.tensor.grad is not None) == expected, case
                if "weight" in local.fqn and local.tensor.grad is not None:
                    assert local.tensor.grad.abs().sum() > 0, case
            handle.close()


def used_with_a_gradient_of_negative_zeros() -> None:
    """A used parameter has a gradient, even where each of its elements is -0.0."""
    handle = fully_shard(model := Scales(), units=[])
    model(torch.ones(1, requires_grad=True), use=dist.get_rank() == 1).backward()
    assert handle.local_parameters(), "each rank owns some"
    for local in handle.local_parameters():
        assert local.tensor.grad is not None, local.fqn


def whole_weights() -> None:
    """Inside full_parameters a rank runs forwards of its own; only writeback changes weights."""
    rank = dist.get_rank()
    model, plain = make_toy(), make_toy()
    handle = fully_shard(model, units=toy_units())
    tokens, labels = batch(0)
    model(tokens, labels).backward()
    gathers = []
    for unit in handle.units:
        start = unit.start_unshard
        unit.start_unshard = lambda start=start: (gathers.append(1), start())  # type: ignore
    with handle.full_parameters():
        gathers.clear()
        with torch.no_grad():
            for _ in range(1 + rank):
                assert torch.equal(model(tokens), plain(tokens))
            assert torch.equal(model.blocks[rank](torch.ones(8)), plain.blocks[rank](torch.ones(8)))
        assert not gathers, "a forward inside communicates nothing"
        state = model.state_dict()
        assert all(torch.equal(state[name], p) for name, p in plain.state_dict().items())
        with pytest.raises(RuntimeError, match=r"run it under torch.no_grad\(\)"):
            model(tokens)
        with pytest.raises(RuntimeError, match="entered twice"), handle.full_parameters():
            pass
        with pytest.raises(RuntimeError, match="would lose what it loads"):
            model.load_state_dict(state)
    assert gathered_nbytes(handle) == 0
    other = make_toy(seed=1)
    with handle.full_parameters(writeback=True):
        model.load_state_dict(other.state_dict())
    wanted = dict(other.named_parameters())
    for local in handle.local_parameters():
        rows = wanted[local.fqn][local.start : local.start + len(local.tensor)]
        assert torch.equal(local.tensor, rows), local.fqn
    loss = model(tokens, labels)
    loss.backward()
    assert torch.equal(loss, other(tokens, labels)), "training goes on"

    low = fully_shard(
        make_toy(),
        units=toy_units(),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    with pytest.raises(ValueError, match="would round"), low.full_parameters(writeback=True):
        pass


def all_at_two_ranks() -> None:
    whole_weights()
    groups_and_clipping()
    unused_gradients()
    used_with_a_gradient_of_negative_zeros()


@pytest.mark.timeout(60)
def test_two_ranks() -> None:
    run_distributed(all_at_two_ranks, 2)


@pytest.mark.timeout(60)
def test_unused_parameters_with_replicas() -> None:
    run_distributed(unused_gradients, 4, 2)


def test_one_rank_leaves_an_unused_parameter_without_a_gradient() -> None:
    handle = fully_shard(model := Switches(), units=[["inner"]])
    model(torch.randn(3, 128), "left").backward()
    without = {local.fqn for local in handle.local_parameters() if local.tensor.grad is None}
    assert without == {"inner.right.weight", "inner.right.bias"}
