"""DDP as the reference: summed gradients and any split of the batch, against one plain process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixtitan.plan.shard import ParamSpec
from matrixtitan.strategies.collective_counter import CollectiveCounter
from matrixtitan.strategies.ddp import DDP
from tests.lib.distributed import run_distributed

CPU = torch.device("cpu")
SEQUENCES = 12


class Model(nn.Module):
    """Two matrices and a bias. `forward(tokens, labels)` sums over tokens, as trained models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            self.second(torch.tanh(self.first(tokens))).float(), labels, reduction="sum"
        )


def specs() -> list[ParamSpec]:
    return [
        ParamSpec("first.weight", (8, 4), "matrix", "all", 8),
        ParamSpec("first.bias", (8,), "tail", "all", 1),
        ParamSpec("second.weight", (3, 8), "matrix", "all", 3),
    ]


def fill(fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor) -> None:
    values = torch.linspace(-1, 1, out.numel()) * (1 + len(fqn) % 3)
    out.copy_(values.view(full_shape)[start : start + len(out)])


def build(**options: object) -> DDP:
    with torch.device("meta"):
        model = Model()
    strategy = DDP(model, specs(), device=CPU, **options)  # type: ignore[arg-type]
    strategy.materialize(fill)
    return strategy


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(SEQUENCES, 4, generator=generator)
    return tokens, torch.randint(3, (SEQUENCES,), generator=generator)


def reference() -> dict[str, Tensor]:
    model = Model()
    for name, parameter in model.named_parameters():
        fill(name, tuple(parameter.shape), 0, parameter.data)
    (model(*batch()) / SEQUENCES).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradients(
    microbatches: int, options: dict[str, object]
) -> tuple[dict[str, Tensor], float, int]:
    """This rank's gradients of its share, the clipped norm, and the number of collectives."""
    strategy = build(**options)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokens, labels = (tensor.chunk(world_size)[rank].chunk(microbatches) for tensor in batch())
    with CollectiveCounter() as counter:
        for index in range(microbatches):
            strategy.set_reduce_gradients(index == microbatches - 1)
            (strategy.model(tokens[index], labels[index]) / SEQUENCES).backward()
        calls = counter.calls
        found = {param.fqn: param.tensor.grad.clone() for param in strategy.local_parameters()}
        norm = strategy.clip_grad_norm_(0.0).item()
        assert counter.calls == calls, "clipping needs no collective: every rank has every gradient"
    return found, norm, calls


@pytest.mark.parametrize(
    ("world_size", "microbatches"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 3)]
)
def test_gradients_are_the_sum_over_ranks_and_microbatches(
    world_size: int, microbatches: int
) -> None:
    expected = reference()
    results = run_distributed(gradients, world_size, microbatches, {})
    norm = sum(grad.double().square().sum() for grad in expected.values()) ** 0.5
    for found, clipped, calls in results:
        assert calls == (world_size > 1), "one bucket, reduced in the last microbatch only"
        assert clipped == pytest.approx(float(norm), rel=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, results[0][0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.bfloat16}]
)
def test_bfloat16_is_used_where_asked_for_and_masters_stay(options: dict[str, object]) -> None:
    expected = reference()
    for found, _, _ in run_distributed(gradients, 2, 2, options):
        for name, grad in expected.items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], grad, rtol=0.05, atol=0.02)
        differs = [not torch.equal(found[name], grad) for name, grad in expected.items()]
        assert any(differs), "float32 throughout would agree much closer"
        exact = all(
            torch.allclose(found[name], grad, rtol=1e-5, atol=1e-6)
            for name, grad in expected.items()
        )
        assert not exact


def names_and_shapes() -> list[tuple[str, tuple[int, ...], str, int]]:
    return [(p.fqn, tuple(p.tensor.shape), p.role, p.start) for p in build().local_parameters()]


def test_every_rank_holds_everything_under_clean_names() -> None:
    whole = [(spec.fqn, spec.shape, spec.role, 0) for spec in specs()]
    assert run_distributed(names_and_shapes, 2) == [whole, whole]


def error_of(make: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        make()
    return str(caught.value)


def wrong_uses() -> list[str]:
    with torch.device("meta"):
        unwrapped = DDP(Model(), specs(), device=CPU)
    twice = build()
    return [
        error_of(lambda: unwrapped.set_reduce_gradients(False)),
        error_of(lambda: twice.materialize(None)),
        error_of(lambda: DDP(Model(), specs()[:2], device=CPU)),
    ]


def test_wrong_uses_are_named() -> None:
    before, twice, missing = run_distributed(wrong_uses, 1)[0]
    assert "materialize the model before training" in before
    assert "called twice" in twice
    assert "no ParamSpec for ['second.weight']" in missing
