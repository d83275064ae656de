"""What trainers do to a sharded model, each against an unsharded copy, on 2 shards and on 2 x 2 (replicas)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from matrixtitan.activation_checkpoint import apply_activation_checkpointing
from matrixtitan.config import ActivationCheckpointConfig
from matrixtitan.fsdp import MatrixFSDP, MixedPrecisionPolicy, fully_shard
from models import build_model
from tests.lib.distributed import run_distributed
from tests.lib.toy import Toy, batch, make_toy, share, toy_units

ROWS = 24
OPTIONS: dict[str, Any] = {}
"""Of every model that this process shards."""


def shard(
    model: nn.Module, replicas: int = 1, units: list[list[str]] | None = None, **kwargs: Any
) -> MatrixFSDP:
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    kwargs.setdefault("tail_patterns", ("head.weight",))
    kwargs.setdefault("gradient_reduction", "sum")
    return fully_shard(model, units=units or toy_units(), mesh=mesh, **{**OPTIONS, **kwargs})


def my_share(step: int) -> tuple[Tensor, Tensor]:
    tokens, labels = batch(step, ROWS)
    return share(tokens, dist.get_rank(), dist.get_world_size()), share(
        labels, dist.get_rank(), dist.get_world_size()
    )


def check_gradients(sharded: MatrixFSDP, plain: nn.Module, atol: float = 1e-4) -> None:
    """Every owned row's gradient is the plain model's."""
    expected = {fqn: param.grad for fqn, param in plain.named_parameters()}
    for local in sharded.local_parameters():
        want, got = expected[local.fqn], local.tensor.grad
        if want is None:
            assert got is None or not got.any(), f"{local.fqn} has a gradient and should not"
            continue
        assert got is not None, f"{local.fqn} has no gradient"
        want = want[local.start : local.start + got.shape[0]]
        torch.testing.assert_close(
            got, want, atol=atol, rtol=1e-4, msg=lambda text, f=local.fqn: f"{f}: {text}"
        )
    assert sharded.gathered_nbytes == 0


def compare_toy(
    replicas: int,
    prepare: Callable[[Toy], None] = lambda model: None,
    run: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda model, tokens, labels: model(
        tokens, labels
    ),
    passes: int = 2,
    **kwargs: Any,
) -> None:
    """Gradients of `run`, accumulated over `passes` backwards, on plain and sharded copies that `prepare` changed."""
    plain, model = make_toy(), make_toy()
    prepare(plain)
    sharded = shard(model, replicas, **kwargs)
    prepare(model)
    for step in range(passes):
        run(plain, *batch(step, ROWS)).backward()
        run(model, *my_share(step)).backward()
    check_gradients(sharded, plain)


# --- the table -------------------------------------------------------------------------------------------------------


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
    model.forward = lambda tokens, labels: run_checkpointed_outside(model, tokens, labels)  # type: ignore[assignment]


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
    sharded = shard(model, replicas)
    for step in range(2):
        plain(*batch(step, ROWS)).backward()
        model(*my_share(step)).backward()
    check_gradients(sharded, plain)


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
    world = dist.get_world_size()
    for step in range(2):
        for rank in range(world):  # the plain copy sees each rank's share with that rank's branch
            plain.use = rank == 1
            tokens, labels = batch(step, ROWS)
            plain(share(tokens, rank, world), share(labels, rank, world)).backward()
        model.use = dist.get_rank() == 1
        model(*my_share(step)).backward()
    check_gradients(sharded, plain)


def mean_of_gradients(replicas: int) -> None:
    """One normalisation for all layouts: the sum over all ranks, divided by their number."""
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas, gradient_reduction="mean")
    plain(*batch(0, ROWS)).backward()
    for param in plain.parameters():
        param.grad /= dist.get_world_size()  # type: ignore[operator]
    model(*my_share(0)).backward()
    check_gradients(sharded, plain)


def two_forwards(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return model(tokens, labels) + 0.5 * model(labels, tokens)


def two_forwards_one_backward(replicas: int) -> None:
    compare_toy(replicas, run=two_forwards)


def two_forwards_two_backwards(replicas: int) -> None:
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas)
    for step in range(2):
        tokens, labels = batch(step, ROWS)
        (plain(tokens, labels) + plain(labels, tokens)).backward()
        mine, mine_labels = my_share(step)
        first, second = model(mine, mine_labels), model(mine_labels, mine)
        first.backward()
        second.backward()
    check_gradients(sharded, plain)


def forgotten_forward(replicas: int) -> None:
    """A forward with gradients whose loss is dropped must not hold back the next reduction."""
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas)
    for step in range(2):
        plain(*batch(step, ROWS)).backward()
        model(*my_share(step + 5))
        model(*my_share(step)).backward()
    check_gradients(sharded, plain)


def remembered_forward(replicas: int) -> None:
    """As above, but its loss is kept: the graph is alive, and the next backward reduces all the same."""
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas)
    losses = []
    for step in range(2):
        plain(*batch(step, ROWS)).backward()
        losses.append(model(*my_share(step + 5)))
        model(*my_share(step)).backward()
    check_gradients(sharded, plain)


def two_backwards_through_one_graph(replicas: int) -> None:
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas)
    for step in range(2):
        for copy, (tokens, _) in ((plain, batch(step, ROWS)), (model, my_share(step))):
            logits = copy(tokens)
            logits.square().sum().backward(retain_graph=True)
            logits.sin().sum().backward()
    check_gradients(sharded, plain)


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
    """The microbatch that reduces does not come by a unit whose gradients an earlier one kept."""
    plain, model = TwoHeads(), TwoHeads()
    units = [["embed"], *([f"blocks.{i}"] for i in range(3)), ["norm"], ["head"], ["second"]]
    sharded = shard(model, replicas, units=units, tail_patterns=("head.weight", "second.weight"))
    for step in range(4):
        plain.use_second = model.use_second = step % 2 == 1
        plain(*batch(step, ROWS)).backward()
        sharded.set_reduce_gradients(step % 2 == 1)
        model(*my_share(step)).backward()
    check_gradients(sharded, plain)


def backward_that_raises(replicas: int) -> None:
    """On every rank, in the middle: the gradients of that step are lost, and nothing else."""
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas)

    def stop(*_: Any) -> None:
        raise ArithmeticError

    def poison(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(stop)

    for step in range(3):
        if step == 1:
            handle = model.blocks[1].register_forward_hook(poison)
            with pytest.raises(ArithmeticError):
                model(*my_share(step)).backward()
            handle.remove()
        else:
            plain(*batch(step, ROWS)).backward()
            model(*my_share(step)).backward()
    check_gradients(sharded, plain)


def evaluation_between(replicas: int) -> None:
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas, reshard_after_forward="never")
    for step in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(my_share(9)[0]), plain(my_share(9)[0]))
        assert sharded.gathered_nbytes == 0
        with torch.inference_mode():
            torch.testing.assert_close(model(my_share(8)[0]), plain(my_share(8)[0]))
        plain(*batch(step, ROWS)).backward()
        model(*my_share(step)).backward()
    check_gradients(sharded, plain)


def state_dict_reloaded(replicas: int) -> None:
    """Rows saved by one model and loaded into another, while its last unit is still gathered."""
    source, model, plain = make_toy(seed=1), make_toy(seed=2), make_toy(seed=1)
    sharded_source, sharded = shard(source, replicas), shard(model, replicas)
    model(*my_share(7))  # leaves the last unit gathered, with the values before the load
    rows = source.state_dict()
    for local in sharded_source.local_parameters():
        assert rows[local.fqn].shape == local.tensor.shape
    model.load_state_dict(rows)
    plain(*batch(0, ROWS)).backward()
    model(*my_share(0)).backward()
    check_gradients(sharded, plain)


def step_without_backward(replicas: int) -> None:
    """An optimizer step while the last unit is still gathered: the next forward must see the new weights."""
    plain, model = make_toy(), make_toy()
    sharded = shard(model, replicas)
    model(*my_share(7))
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(1.25)
        for local in sharded.local_parameters():
            local.tensor.mul_(1.25)
        torch.testing.assert_close(model(my_share(0)[0]), plain(my_share(0)[0]))


def compiled_selective_llama(replicas: int) -> None:
    """This repo's own model, with selective checkpointing inside compiled blocks, tied and untied."""
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
        plain(*batch(0, ROWS)).backward()
        model(*my_share(0)).backward()
        check_gradients(sharded, plain)


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


def structured_inputs_and_outputs(replicas: int) -> None:
    torch.manual_seed(0)
    plain = TupleModel()
    torch.manual_seed(0)
    model = TupleModel()
    sharded = shard(model, replicas, units=[["first"], ["second"]], tail_patterns=())
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    plain(x).backward()
    model(share(x, dist.get_rank(), dist.get_world_size())).backward()
    check_gradients(sharded, plain)


def mixed_precision(replicas: int) -> None:
    """bfloat16 compute, float32 masters and sums: near a plain bfloat16 copy, and gradients are float32."""
    plain, model = make_toy(), make_toy()
    sharded = shard(
        model,
        replicas,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    )
    plain(*batch(0, ROWS)).backward()
    loss = model(*my_share(0))
    assert loss.dtype == torch.float32
    loss.backward()
    for local in sharded.local_parameters():
        assert local.tensor.dtype == torch.float32
        assert local.tensor.grad is not None and local.tensor.grad.dtype == torch.float32
    check_gradients_roughly(sharded, plain)


def summed_in_reduce_dtype(replicas: int) -> None:
    """Over ranks and over microbatches: 256 + 1 is 256 in bfloat16."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    sharded = shard(
        model,
        replicas,
        units=[["0"]],
        tail_patterns=(),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    mine = 256.0 if dist.get_rank() == 0 else 1.0
    others = dist.get_world_size() - 1
    for first, expected in ((None, 256 + others), (1.0, 257 + 2 * others)):
        for value, reduce in ((first, False), (mine, True)):
            if value is not None:
                sharded.set_reduce_gradients(reduce)
                model(torch.full((1, 2), value)).sum().backward()
        for local in sharded.local_parameters():
            assert local.tensor.grad is not None
            assert (local.tensor.grad == expected).all(), (local.tensor.grad, expected)
            local.tensor.grad = None


def check_gradients_roughly(sharded: MatrixFSDP, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for local in sharded.local_parameters():
        want = expected[local.fqn].grad[local.start : local.start + local.tensor.shape[0]]  # type: ignore[index]
        error = (local.tensor.grad - want).norm() / expected[local.fqn].grad.norm()  # type: ignore[operator, union-attr]
        assert error < 0.1, (local.fqn, error)


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


def over_a_ring(feature: Callable[[int], None]) -> None:
    OPTIONS.update(transport="ring", prefetch=2)
    feature(1)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_feature_over_a_ring(feature: Callable[[int], None]) -> None:
    run_distributed(over_a_ring, 2, feature, timeout=120)
