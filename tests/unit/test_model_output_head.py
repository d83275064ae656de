"""The output unit: loss and gradients of the plain form, without the full logits in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from models.output_head import OutputHead, linear_cross_entropy

DIM, VOCAB, TOKENS = 24, 101, 50


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[3] = labels[20:31] = -100
    return hidden, weight, labels


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def _relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 10, 50, 1024])  # 10: one chunk all ignored
def test_equals_the_plain_form(chunk_tokens: int) -> None:
    hidden, weight, labels = _inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    plain = _plain(hidden, weight, labels)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    scale = 0.37  # the trainer divides by its token count
    for got, expected in zip(
        torch.autograd.grad(loss * scale, (hidden, weight)),
        torch.autograd.grad(plain * scale, (hidden, weight)),
        strict=True,
    ):
        assert _relative(got, expected) < 1e-6
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_gradients_by_finite_differences() -> None:
    """Against arithmetic alone: an error that the plain form shares would show here."""
    hidden, weight, labels = _inputs(torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels, 16)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    generator = torch.Generator().manual_seed(1)
    for tensor, gradient in zip((hidden, weight), gradients, strict=True):
        step = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 1e-2
        with torch.no_grad():
            tensor += step
            up = _plain(hidden, weight, labels)
            tensor -= 2 * step
            down = _plain(hidden, weight, labels)
            tensor += step
        assert (gradient * step).sum().item() == pytest.approx((up - down).item() / 2, rel=2e-3)


def test_bfloat16_is_no_less_exact_than_the_plain_form() -> None:
    hidden, weight, labels = _inputs(torch.bfloat16)
    reference = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = torch.autograd.grad(
        F.cross_entropy(F.linear(*reference), labels, reduction="sum"), reference
    )
    plain = torch.autograd.grad(_plain(hidden, weight, labels), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, 7)
    chunked = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == torch.float32
    for got, usual, true in zip(chunked, plain, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert _relative(got, true) < max(1.2 * _relative(usual, true), 2**-8)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_every_product_is_in_its_dtype(hidden_dtype: torch.dtype) -> None:
    hidden, weight, labels = _inputs()
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, 7)
    found = torch.autograd.grad(loss, (hidden, weight))
    cast = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    expected = linear_cross_entropy(*cast, labels, 7)
    assert torch.equal(loss, expected)
    for got, want, given in zip(
        found, torch.autograd.grad(expected, cast), (hidden, weight), strict=True
    ):
        assert got.dtype == given.dtype
        assert torch.equal(got.float(), want.float())


def test_nothing_counted_gives_zero() -> None:
    hidden, weight, labels = _inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), 16)
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_huge_logits_stay_finite() -> None:
    hidden, weight, labels = _inputs()
    with torch.no_grad():
        hidden *= 1e4
    loss = linear_cross_entropy(hidden, weight, labels, 16)
    assert loss.item() == pytest.approx(_plain(hidden, weight, labels).item(), rel=1e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_a_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens"):
        linear_cross_entropy(*_inputs(), chunk_tokens=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_costs_no_product(frozen: str) -> None:
    hidden, weight, labels = _inputs()
    expected = torch.autograd.grad(_plain(hidden, weight, labels), (hidden, weight))
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        linear_cross_entropy(hidden, weight, labels, TOKENS).backward()
    assert _matrix_products(recorded) == 2  # the logits and the one gradient
    kept, dropped = (weight, hidden) if frozen == "hidden" else (hidden, weight)
    assert dropped.grad is None and kept.grad is not None
    assert _relative(kept.grad, expected[1 if frozen == "hidden" else 0]) < 1e-6


def test_evaluation_computes_no_gradients() -> None:
    hidden, weight, labels = _inputs()
    with profile(activities=[ProfilerActivity.CPU]) as recorded, torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, TOKENS)
    assert _matrix_products(recorded) == 1
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(_plain(hidden, weight, labels).item(), rel=1e-6)


def test_backward_twice_gives_the_same_twice() -> None:
    hidden, weight, labels = _inputs()
    loss = linear_cross_entropy(hidden, weight, labels, 16) * 0.5
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_weight_may_be_freed_between_forward_and_backward() -> None:
    """A sharding runtime frees the weight's storage after forward."""
    hidden, weight, labels = _inputs()
    expected = torch.autograd.grad(_plain(hidden, weight, labels), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, 16)
    weight.untyped_storage().resize_(0)
    got = torch.autograd.grad(loss, (hidden, weight))
    assert all(_relative(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))


# --- memory ---------------------------------------------------------------------------------------


def _matrix_products(recorded: profile) -> int:
    names = ("aten::mm", "aten::addmm_")
    return sum(event.count for event in recorded.key_averages() if event.key in names)


def _largest_allocation(recorded: profile) -> int:
    """Bytes of the largest single allocation, in forward, backward or inside an operator."""
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events: list[Any] = recorded.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_logits_never_exist(dtype: torch.dtype) -> None:
    tokens, vocab, chunk = 512, 700, 64
    hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        linear_cross_entropy(hidden, weight, labels, chunk).backward()
    assert _largest_allocation(recorded) == chunk * vocab * 4  # one chunk's logits, float32
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        _plain(hidden, weight, labels).backward()
    assert (
        _largest_allocation(recorded) == tokens * vocab * 4
    )  # so the measurement would see full logits


# --- the module -----------------------------------------------------------------------------------


class _PlainHead(nn.Module):
    def __init__(self, head: OutputHead, weight: Tensor) -> None:
        super().__init__()
        self.norm, self.weight = head.norm, weight

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return _plain(self.norm(hidden).flatten(0, 1), self.weight, labels.flatten())


def _head(tied: bool) -> tuple[OutputHead, Tensor]:
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCAB, DIM)
    head = OutputHead(DIM, VOCAB, 1e-5, tied_to=embedding if tied else None, chunk_tokens=16)
    nn.init.uniform_(head.norm.weight, 0.5, 1.5)
    return head, embedding.weight if tied else head.output.weight


def _module_inputs() -> tuple[Tensor, Tensor]:
    hidden, _, labels = _inputs()
    return hidden.detach().view(2, 25, DIM).requires_grad_(), labels.view(2, 25)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrapped", ["eager", "checkpoint", "compile", "compile+checkpoint"])
def test_module_equals_plain_head(wrapped: str, tied: bool) -> None:
    head, weight = _head(tied)
    hidden, labels = _module_inputs()
    wanted = (hidden, head.norm.weight, weight)
    plain = _PlainHead(head, weight)(hidden, labels)
    expected = torch.autograd.grad(plain, wanted)

    def call(hidden: Tensor, labels: Tensor) -> Tensor:
        if "checkpoint" in wrapped:
            return checkpoint(head, hidden, labels, use_reentrant=False)
        return head(hidden, labels)

    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if "compile" in wrapped else call
    loss = run(hidden, labels)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for got, true in zip(torch.autograd.grad(loss, wanted), expected, strict=True):
        assert _relative(got, true) < 1e-6


def test_tied_head_registers_no_weight_of_its_own() -> None:
    head, _ = _head(tied=True)
    assert [name for name, _ in head.named_parameters()] == ["norm.weight"]


def test_tied_head_follows_a_swapped_parameter() -> None:
    embedding = nn.Embedding(VOCAB, DIM)
    head = OutputHead(DIM, VOCAB, 1e-5, tied_to=embedding)
    hidden, _ = _module_inputs()
    embedding.weight = nn.Parameter(torch.ones(VOCAB, DIM))
    torch.testing.assert_close(head(hidden), F.linear(head.norm(hidden), torch.ones(VOCAB, DIM)))


def test_operator_registration_is_sound() -> None:
    """PyTorch's own checks: schema, fake outputs, autograd and compile of the custom operator."""
    hidden, weight, labels = _inputs()
    torch.library.opcheck(
        torch.ops.matrixtitan.linear_cross_entropy, (hidden, weight, labels, 16, True, True)
    )
