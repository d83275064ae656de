"""Activation checkpointing: same losses and gradients, less memory, same names, one graph."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from matrixtitan.activation_checkpoint import apply_activation_checkpointing
from matrixtitan.config import ActivationCheckpointConfig
from models.llama import Llama, LlamaFlavor

Mode = Literal[
    "none", "selective", "full"
]  # for casts: some tests pass a mode that the loader refuses

LAYERS = 10  # more blocks than torch.compile would recompile for
PRODUCTS_PER_BLOCK = 7
REPEATED_PER_BLOCK = 6  # no gradient needs the result of w2, so recomputation stops before it
MODES = [("none", "op"), ("full", "op"), ("selective", "op"), ("selective", "2")]


def _model(mode: str, option: str) -> Llama:
    flavor = LlamaFlavor(dim=32, n_layers=LAYERS, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48)
    model = Llama(flavor, vocab_size=50, max_seq_len=16, tie_embeddings=False)
    model.init_weights(seed=0)
    config = ActivationCheckpointConfig(mode=cast(Mode, mode), selective_ac_option=option)
    apply_activation_checkpointing(model, config)
    return model


def _tokens() -> Tensor:
    return torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))


def _loss_and_gradients(model: Llama) -> list[Tensor]:
    loss = model(_tokens(), _tokens())
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def _count_call(calls: Counter[str], name: str, *_: Any) -> None:
    calls[name] += 1


class _CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class _KeptBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the distinct storages that autograd keeps for backward."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        super().__init__(self._pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


@pytest.mark.parametrize(("mode", "option"), MODES)
def test_losses_and_gradients_are_bit_equal(mode: str, option: str) -> None:
    expected = _loss_and_gradients(_model("none", "op"))
    got = _loss_and_gradients(_model(mode, option))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("mode", "option", "repeated_products", "repeated_attentions"),
    [
        ("none", "op", 0, 0),
        ("full", "op", REPEATED_PER_BLOCK * LAYERS, LAYERS),
        ("selective", "op", 3 * LAYERS, 0),  # of seven products four are kept
        ("selective", "2", REPEATED_PER_BLOCK * LAYERS // 2, LAYERS // 2),
        ("selective", "4", REPEATED_PER_BLOCK * 2, 2),  # blocks 4 and 8 of 10
    ],
)
def test_what_is_computed_again(
    mode: str, option: str, repeated_products: int, repeated_attentions: int
) -> None:
    loss = _model(mode, option)(_tokens(), _tokens())
    with _CountOps() as ops:
        loss.backward()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_products = 2 * PRODUCTS_PER_BLOCK * LAYERS
    assert ops.counts[torch.ops.aten.mm.default] == backward_products + repeated_products
    assert ops.counts[attention] == repeated_attentions


def test_less_is_kept_the_more_is_checkpointed() -> None:
    kept = {}
    for mode, option in MODES:
        model = _model(mode, option)
        parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
        bytes_kept = _KeptBytes()
        with bytes_kept:
            model(_tokens(), _tokens())
        activations = {p: n for p, n in bytes_kept.storages.items() if p not in parameters}
        kept[mode, option] = sum(activations.values())
    # Selective checkpointing by operator keeps results in its own cache, which is not counted here.
    assert kept["full", "op"] < kept["selective", "2"] < kept["none", "op"]


@pytest.mark.parametrize(("mode", "option"), MODES)
def test_names_are_untouched(mode: str, option: str) -> None:
    plain, checkpointed = _model("none", "op"), _model(mode, option)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in checkpointed.named_modules()] == [n for n, _ in plain.named_modules()]


@pytest.mark.parametrize(("mode", "option"), MODES)
def test_composes_with_compile_in_one_graph_for_all_blocks(mode: str, option: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = _model(mode, option)
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    got = _loss_and_gradients(model)
    kinds = 2 if option == "2" else 1  # checkpointed blocks and plain ones
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == kinds
    for a, b in zip(got, _loss_and_gradients(_model("none", "op")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_evaluation_works_without_gradients() -> None:
    tokens = _tokens()
    with torch.no_grad():
        expected = _model("none", "op")(tokens)
        for mode, option in MODES:
            assert torch.equal(_model(mode, option)(tokens), expected)


def test_module_hooks_run_once_per_forward() -> None:
    """A sharding runtime depends on it: recomputation must not look like a second forward."""
    for mode, option in MODES:
        model, calls = _model(mode, option), Counter[str]()
        for name, block in model.layers.items():
            block.register_forward_hook(partial(_count_call, calls, name))
        model(_tokens(), _tokens()).backward()
        assert calls == {str(layer): 1 for layer in range(LAYERS)}


@pytest.mark.parametrize(
    ("mode", "option", "message"),
    [
        ("some", "op", "activation_checkpoint.mode"),
        ("selective", "0", "selective_ac_option"),
        ("selective", "-1", "selective_ac_option"),
        ("selective", "ops", "selective_ac_option"),
    ],
)
def test_unknown_settings_are_refused(mode: str, option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _model(mode, option)


def test_twice_or_after_compile_is_refused() -> None:
    model = _model("full", "op")
    with pytest.raises(RuntimeError, match="already replaced"):
        apply_activation_checkpointing(model, ActivationCheckpointConfig(mode="full"))
