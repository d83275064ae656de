"""What trainers do to a sharded model: each feature is trained next to an unsharded copy.

On 2 shards, and on 2 replicas of 2 shards. The unsharded ("plain") copy stands for DDP. DDP's loss
is the mean of its ranks' losses on their shares, and its gradient the mean of theirs. The plain
copy computes both on the whole batch at once, which is the same up to rounding. Where it would not
be the same (bfloat16, or a branch that depends on the rank), the plain copy takes one share after
another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from matrixtitan.activation_checkpoint import apply_activation_checkpointing
from matrixtitan.config import ActivationCheckpointConfig, OptimizerConfig
from matrixtitan.fsdp import MatrixFSDP, MixedPrecisionPolicy, fully_shard
from matrixtitan.optim.build import build_optimizers
from matrixtitan.optim.muon import Muon
from matrixtitan.parallelize import unit_of
from matrixtitan.plan.planner import make_plan
from matrixtitan.plan.roles import param_specs
from matrixtitan.plan.shard import MatrixShard, Plan, Segment
from models import build_model
from tests.lib.distributed import run_distributed
from tests.lib.toy import Toy, batch, gathered_nbytes, make_toy, share, toy_units

ROWS = 24
TOKENS = ROWS * 5
"""Tokens of a whole batch; losses and gradients are means over them."""
STEPS = 3
CLOSE = 5e-5
"""Tolerance between losses and those of the plain copy."""


def shard(
    model: nn.Module, replicas: int = 1, units: list[list[str]] | None = None, **kwargs: Any
) -> MatrixFSDP:
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    kwargs.setdefault("tail_patterns", ("head.weight",))
    kwargs.setdefault("gradient_reduction", "sum")
    return fully_shard(model, units=units or toy_units(), mesh=mesh, **kwargs)


def shares(index: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of a batch, rank by rank."""
    world = dist.get_world_size()
    tokens, labels = batch(index, ROWS)
    return [(share(tokens, rank, world), share(labels, rank, world)) for rank in range(world)]


def my_share(index: int) -> tuple[Tensor, Tensor]:
    return shares(index)[dist.get_rank()]


def check_gradients(sharded: MatrixFSDP, plain: nn.Module) -> None:
    """Every owned row's gradient is the plain model's."""
    expected = {fqn: param.grad for fqn, param in plain.named_parameters()}
    for local in sharded.local_parameters():
        want, got = expected[local.fqn], local.tensor.grad
        if want is None:
            assert got is None or not got.any(), f"{local.fqn} has a gradient and should not"
            continue
        assert got is not None, f"{local.fqn} has no gradient"
        assert got.dtype == want.dtype
        want = want[local.start : local.start + got.shape[0]]
        torch.testing.assert_close(
            got, want, atol=1e-6, rtol=1e-4, msg=lambda text, f=local.fqn: f"{f}: {text}"
        )
    assert gathered_nbytes(sharded) == 0


Backward = Callable[[Any, Tensor, Tensor], Tensor]
"""(copy, tokens, labels): forward and backward on this part of a batch.

It returns the part's share of the batch's mean loss.
"""


def backward(copy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = copy(tokens, labels) / TOKENS
    loss.backward()
    return loss.detach()


def train_in_step(
    sharded: MatrixFSDP,
    plain: nn.Module,
    mine: Backward = backward,
    whole: Backward | None = None,
    before: Callable[[int], None] = lambda index: None,
    passes: int = 2,
    lr: float = 0.5,
    optimizers: tuple[Any, Any] | None = None,
) -> None:
    """Train both copies, and check in each step that their gradients and losses agree.

    A step accumulates `passes` batches, the same ones in each step, and calls `before(index)`
    before each. `mine` runs the sharded copy on this rank's share, and `whole` (None: `mine`) the
    plain copy on the whole batch. `optimizers` are those of the two copies. None is SGD: Adam would
    hide gradients of a wrong scale.
    """
    if optimizers is None:
        ours, theirs = (
            torch.optim.SGD(copy.parameters(), lr=lr, momentum=0.9)
            for copy in (sharded.model, plain)
        )
        optimizers = ours, theirs
    history = []
    for _ in range(STEPS):
        losses = torch.zeros(2)
        for index in range(passes):
            before(index)
            losses[0] += mine(sharded.model, *my_share(index))
            losses[1] += (whole or mine)(plain, *batch(index, ROWS))
        check_gradients(sharded, plain)
        dist.all_reduce(losses[0])
        torch.testing.assert_close(losses[0], losses[1], atol=CLOSE, rtol=0)
        history.append(losses[1].item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert history[-1] < history[0] - 100 * CLOSE, f"training that hardly trains: {history}"


def compare_toy(
    replicas: int,
    prepare: Callable[[Toy], None] = lambda model: None,
    mine: Backward = backward,
    **kwargs: Any,
) -> None:
    """Train plain and sharded copies. `prepare` changes both, the latter after `fully_shard`."""
    plain, model = make_toy(), make_toy()
    prepare(plain)
    sharded = shard(model, replicas, **kwargs)
    prepare(model)
    train_in_step(sharded, plain, mine)


# --- the features ------------------------------------------------------------------------------


def checkpoint_inside(model: Toy) -> None:
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)


def recomputed_inside(replicas: int) -> None:
    compare_toy(replicas, checkpoint_inside)


def run_checkpointed_outside(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    x = model.embed(tokens)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    logits = model.head(model.norm(x))
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def checkpoint_outside(model: Toy) -> None:
    model.forward = partial(run_checkpointed_outside, model)  # type: ignore[method-assign]


def recomputed_outside(replicas: int) -> None:
    compare_toy(replicas, checkpoint_outside)


def compile_blocks(model: Toy) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")


def compiled(replicas: int) -> None:
    compare_toy(replicas, compile_blocks)


def compile_and_checkpoint(model: Toy) -> None:
    compile_blocks(model)
    checkpoint_inside(model)


def compiled_and_recomputed(replicas: int) -> None:
    compare_toy(replicas, compile_and_checkpoint)


def freeze(model: Toy) -> None:
    for name, param in model.named_parameters():
        if "up" in name or name.startswith("blocks.1") or name == "embed.weight":
            param.requires_grad_(False)


def frozen(replicas: int) -> None:
    plain, model = make_toy(), make_toy()
    freeze(plain)
    freeze(model)
    train_in_step(shard(model, replicas), plain)


class Gated(Toy):
    """Uses one block's extra bias only where `use` says so, and never its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].extra = nn.Parameter(torch.ones(8))
        self.blocks[1].never = nn.Parameter(torch.ones(4, 8))
        self.use = True
        block = self.blocks[1]
        plain = block.forward
        block.forward = lambda x: plain(x) + (block.extra if self.use else 0.0)


def unused_on_some_ranks(replicas: int) -> None:
    torch.manual_seed(0)
    plain = Gated()
    torch.manual_seed(0)
    model = Gated()
    sharded = shard(model, replicas)
    model.use = dist.get_rank() == 1
    world = dist.get_world_size()

    def each_share(plain: Gated, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = torch.zeros(())
        for rank in range(world):
            plain.use = rank == 1
            loss += backward(plain, share(tokens, rank, world), share(labels, rank, world))
        return loss

    train_in_step(sharded, plain, whole=each_share)


def mean_of_a_share(copy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = copy(tokens, labels) / tokens.numel()
    loss.backward()
    return loss.detach() * tokens.numel() / TOKENS


def mean_of_gradients(replicas: int) -> None:
    """The mean is over all ranks, of shards and of replicas."""
    compare_toy(replicas, mine=mean_of_a_share, gradient_reduction="mean")


def two_forwards(copy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = (copy(tokens, labels) + 0.5 * copy(labels, tokens)) / TOKENS
    loss.backward()
    return loss.detach()


def two_forwards_one_backward(replicas: int) -> None:
    compare_toy(replicas, mine=two_forwards)


def two_of_each(copy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    first, second = copy(tokens, labels) / TOKENS, copy(labels, tokens) / TOKENS
    first.backward()
    second.backward()
    return (first + second).detach()


def two_forwards_two_backwards(replicas: int) -> None:
    compare_toy(replicas, mine=two_of_each)


def forgetful(copy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    copy(labels, tokens)
    return backward(copy, tokens, labels)


def forgotten_forward(replicas: int) -> None:
    """A forward whose loss is dropped without a backward must not delay the next reduction."""
    compare_toy(replicas, mine=forgetful)


def remembered_forward(replicas: int) -> None:
    """A forward whose loss is kept without a backward must not prevent the next reduction."""
    kept = []

    def mine(copy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        kept.append(copy(labels, tokens))
        return backward(copy, tokens, labels)

    compare_toy(replicas, mine=mine)


def two_backwards(copy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = copy(tokens)
    first, second = logits.square().sum() / TOKENS, logits.sin().sum() / TOKENS
    first.backward(retain_graph=True)
    second.backward()
    return (first + second).detach()


def two_backwards_through_one_graph(replicas: int) -> None:
    plain, model = make_toy(), make_toy()
    train_in_step(shard(model, replicas), plain, two_backwards, lr=0.01)


class TwoHeads(Toy):
    """Both heads run in each forward, the loss sees one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.second = nn.Linear(8, 24, bias=False)
        self.use_second = False

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x), self.second(x)
        return logits[self.use_second].square().sum()


def heads_by_turns_accumulated(replicas: int) -> None:
    """The microbatch that reduces does not reach a unit whose gradients an earlier one kept."""
    plain, model = TwoHeads(), TwoHeads()
    units = [["embed"], *([f"blocks.{i}"] for i in range(3)), ["norm"], ["head"], ["second"]]
    sharded = shard(model, replicas, units=units, tail_patterns=("head.weight", "second.weight"))

    def by_turns(index: int) -> None:
        plain.use_second = model.use_second = index % 2 == 1
        sharded.set_reduce_gradients(index % 2 == 1)

    train_in_step(sharded, plain, before=by_turns, passes=4, lr=0.01)


def backward_that_raises(replicas: int) -> None:
    """A backward that raises midway on every rank loses its own gradients and no others."""
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas)

    def stop(*_: Any) -> None:
        raise ArithmeticError

    def poison(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(stop)

    def raise_once(index: int) -> None:
        if index == 1:
            handle = model.blocks[1].register_forward_hook(poison)
            with pytest.raises(ArithmeticError):
                model(*my_share(7)).backward()
            handle.remove()

    train_in_step(sharded, plain, before=raise_once)


def evaluation_between(replicas: int) -> None:
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas, reshard_after_forward="never")

    def evaluate(index: int) -> None:
        with torch.no_grad():
            torch.testing.assert_close(model(my_share(9)[0]), plain(my_share(9)[0]))
        assert gathered_nbytes(sharded) == 0
        with torch.inference_mode():
            torch.testing.assert_close(model(my_share(8)[0]), plain(my_share(8)[0]))

    train_in_step(sharded, plain, before=evaluate)


def state_dict_reloaded(replicas: int) -> None:
    """Rows saved by one model are loaded into another whose last unit is still gathered."""
    source, model, plain = make_toy(seed=1), make_toy(seed=2), make_toy(seed=1)
    sharded_source, sharded = shard(source, replicas), shard(model, replicas)
    # leaves the last unit gathered, with the values before the load
    model(*my_share(7))
    rows = source.state_dict()
    for local in sharded_source.local_parameters():
        assert rows[local.fqn].rows.shape == local.tensor.shape
    model.load_state_dict(rows)
    train_in_step(sharded, plain)


def step_without_backward(replicas: int) -> None:
    """After a step on weights whose unit is still gathered, the next forward sees the new ones."""
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas)
    model(*my_share(7))
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(1.25)
        for local in sharded.local_parameters():
            local.tensor.mul_(1.25)
        torch.testing.assert_close(model(my_share(0)[0]), plain(my_share(0)[0]))
    train_in_step(sharded, plain)


def compiled_selective_llama(replicas: int) -> None:
    """This repo's own model, tied and untied, with selective checkpointing in compiled blocks."""
    for tied in (False, True):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            model = build_model(
                "llama3", "netlab", vocab_size=24, max_seq_len=8, tie_embeddings=tied
            )
            model.init_weights(0)
            apply_activation_checkpointing(model, ActivationCheckpointConfig(mode="selective"))
            models.append(model)
        plain, model = models
        for block in model.layers.values():
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        sharded = shard(
            model, replicas, units=model.unit_names(), tail_patterns=model.tail_patterns
        )
        train_in_step(sharded, plain, lr=0.1)


class Out(NamedTuple):
    value: Tensor
    extra: dict[str, Tensor]


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, state: dict[str, Any], *, scale: Tensor | None = None) -> Out:
        x = state["x"]
        return Out(
            x + torch.tanh(self.a(x)), {"side": self.b(x) * (1.0 if scale is None else scale)}
        )


class TupleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = TupleBlock(), TupleBlock()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        one = self.first({"x": x, "name": "first"})
        two = self.second({"x": one.value, "name": "second"}, scale=self.scale * one.extra["side"])
        return two.value.sum() + (two.extra["side"] ** 2).sum()


def structured_loss(copy: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = copy(torch.sin(tokens.unsqueeze(-1) * torch.arange(1, 9))) / TOKENS
    loss.backward()
    return loss.detach()


def structured_inputs_and_outputs(replicas: int) -> None:
    torch.manual_seed(0)
    plain = TupleModel()
    torch.manual_seed(0)
    model = TupleModel()
    sharded = shard(model, replicas, units=[["first"], ["second"]], tail_patterns=())
    train_in_step(sharded, plain, structured_loss, lr=0.01)


def in_bfloat16(plain: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """As DDP would: each share computes in bfloat16, and gradients are summed in float32."""
    loss = torch.zeros(())
    world = dist.get_world_size()
    for rank in range(world):
        weights = {fqn: param.bfloat16() for fqn, param in plain.named_parameters()}
        part = share(tokens, rank, world), share(labels, rank, world)
        copy = partial(torch.func.functional_call, plain, weights)
        loss += backward(lambda *args, copy=copy: copy(args), *part)
    return loss


def mixed_precision(replicas: int) -> None:
    """Compute in bfloat16, with float32 masters and sums over ranks and over microbatches.

    Gradients are reduced after each microbatch, and once for both.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for reduce_each in (True, False):
        plain, model = make_toy(), make_toy()
        sharded = shard(model, replicas, mp_policy=policy)
        with torch.no_grad():
            assert model(my_share(0)[0]).dtype == torch.float32
        for local in sharded.local_parameters():
            assert local.tensor.dtype == torch.float32

        def before(index: int, sharded: MatrixFSDP = sharded, each: bool = reduce_each) -> None:
            sharded.set_reduce_gradients(each or index == 1)

        train_in_step(sharded, plain, whole=in_bfloat16, before=before)


def summed_in_reduce_dtype(replicas: int) -> None:
    """Sums over ranks and over microbatches are float32: in bfloat16, 256 + 1 is 256."""
    torch.manual_seed(0)
    plain = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.load_state_dict({"0.weight": plain.weight})
    sharded = shard(
        model,
        replicas,
        units=[["0"]],
        tail_patterns=(),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    optimizers = [torch.optim.SGD(copy.parameters(), lr=1e-4) for copy in (model, plain)]
    rank, world = dist.get_rank(), dist.get_world_size()
    for microbatches in (1, 2, 3):
        losses = torch.zeros(2)
        for index in range(microbatches):
            values = [256.0 if index == microbatches - 1 and r == 0 else 1.0 for r in range(world)]
            sharded.set_reduce_gradients(index == microbatches - 1)
            loss = model(torch.full((1, 2), values[rank])).sum()
            loss.backward()
            losses[0] += loss.detach()
            for value in values:
                x = torch.full((1, 2), value, dtype=torch.bfloat16)
                loss = nn.functional.linear(x, plain.weight.bfloat16()).sum()
                loss.backward()
                losses[1] += loss.detach()
        dist.all_reduce(losses[0])
        torch.testing.assert_close(losses[0], losses[1], atol=CLOSE, rtol=0)
        assert (plain.weight.grad == 255 + microbatches * world).all()  # type: ignore[union-attr]
        for local in sharded.local_parameters():
            assert torch.equal(local.tensor.grad, plain.weight.grad), local.tensor.grad  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


FEATURES = [
    recomputed_inside,
    recomputed_outside,
    compiled,
    compiled_and_recomputed,
    frozen,
    unused_on_some_ranks,
    mean_of_gradients,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    forgotten_forward,
    remembered_forward,
    two_backwards_through_one_graph,
    heads_by_turns_accumulated,
    backward_that_raises,
    evaluation_between,
    state_dict_reloaded,
    step_without_backward,
    compiled_selective_llama,
    structured_inputs_and_outputs,
    mixed_precision,
    summed_in_reduce_dtype,
]


@pytest.mark.parametrize("replicas", [1, 2], ids=["1D", "HSDP"])
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_feature(feature: Callable[[int], None], replicas: int) -> None:
    run_distributed(feature, 2 * replicas, replicas, timeout=120)


# --- parameters cut between ranks --------------------------------------------------------------


class Mixture(nn.Module):
    """A projection into three heads, and a stack of five experts that all see every token."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(8, 12, bias=False)
        self.up = nn.Parameter(torch.randn(5, 12, 6) * 0.3)
        self.down = nn.Parameter(torch.randn(5, 6, 8) * 0.3)
        self.gate = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(x).unflatten(-1, (3, 4))
        hidden = nn.functional.normalize(heads, dim=-1).flatten(-2)
        experts = torch.tanh(torch.einsum("btc,ecf->btef", hidden, self.up))
        out = torch.einsum("btef,efd->bted", experts, self.down)
        return x + (self.gate(x).softmax(-1).unsqueeze(-1) * out).sum(-2)


def make_mixture() -> Toy:
    model = make_toy(depth=2)
    model.blocks = nn.ModuleList([Mixture() for _ in range(2)])
    return model


def cut_evenly(shard: MatrixShard, world_size: int) -> MatrixShard:
    """`shard` cut between its blocks, over as many ranks as possible."""
    blocks = shard.shape[0] // shard.block_rows
    parts = min(world_size, blocks)
    bounds = [blocks * part // parts * shard.block_rows for part in range(parts + 1)]
    segments = [Segment(rank, bounds[rank], bounds[rank + 1]) for rank in range(parts)]
    return dataclasses.replace(shard, segments=tuple(segments))


def heads_and_experts(replicas: int) -> None:
    """Heads, experts and embeddings are cut between ranks, and dense matrices are whole.

    Muon steps a head's rows and an expert as the separate matrices that they are in PlainMuon.
    """
    plain, model = make_mixture(), make_mixture()
    units = toy_units(depth=2)
    specs = param_specs(
        [(fqn, tuple(param.shape), True) for fqn, param in model.named_parameters()],
        lambda fqn: unit_of(units, fqn),
        tail_patterns=("head.weight", "embed.weight"),
        per_head_patterns={"blocks.*.heads.weight": 4},
    )
    shard_ranks = dist.get_world_size() // replicas
    planned = make_plan(specs, shard_ranks)
    plan = Plan(shard_ranks, tuple(cut_evenly(shard, shard_ranks) for shard in planned.shards))
    cut = {shard.fqn for shard in plan.shards if not shard.is_whole and shard.role == "matrix"}
    assert cut == {
        f"blocks.{i}.{name}" for i in range(2) for name in ("heads.weight", "up", "down")
    }
    sharded = shard(model, replicas, units=units, plan=plan)
    matrices, tails = [], []
    for fqn, param in plain.named_parameters():
        group = matrices if plan.by_fqn[fqn].role == "matrix" else tails
        group.append((fqn, param))
    config = OptimizerConfig(weight_decay=0.0, tail_weight_decay=0.0)
    theirs = PlainMuon(matrices, tails, config)
    ours = build_optimizers(sharded.local_parameters(), config)
    train_in_step(sharded, plain, optimizers=(ours, theirs))


class PlainMuon:
    """Muon on separate matrices: heads and experts are own parameters, copied in and out."""

    def __init__(
        self,
        matrices: list[tuple[str, nn.Parameter]],
        tails: list[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
    ) -> None:
        self.parts: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        for fqn, param in matrices:
            rows = param.detach()
            pieces = rows.split(4) if "heads" in fqn else rows if rows.ndim == 3 else [rows]
            self.parts.append((param, [nn.Parameter(piece.clone()) for piece in pieces]))
        everything = [piece for _, pieces in self.parts for piece in pieces]
        self.muon = Muon(everything, lr=config.lr, momentum=config.rule.momentum)
        self.adamw = torch.optim.AdamW(
            [param for _, param in tails],
            lr=config.tail_lr,
            betas=(config.tail_betas[0], config.tail_betas[1]),
            weight_decay=0.0,
        )

    def step(self) -> None:
        for param, pieces in self.parts:
            assert param.grad is not None
            for piece, grad in zip(
                pieces, param.grad.view(len(pieces), *pieces[0].shape), strict=True
            ):
                piece.grad = grad.clone()
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for param, pieces in self.parts:
                param.copy_(torch.stack(list(pieces)).view(param.shape))

    def zero_grad(self) -> None:
        for param, _ in self.parts:
            param.grad = None
        self.adamw.zero_grad()


@pytest.mark.parametrize(("world_size", "replicas"), [(3, 1), (4, 2)], ids=["1D", "HSDP"])
def test_heads_and_experts_cut_between_ranks_train_as_whole_ones(
    world_size: int, replicas: int
) -> None:
    run_distributed(heads_and_experts, world_size, replicas)
