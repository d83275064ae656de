"""Llama: shapes, causality, rotary positions, grouped attention, initial rows, counts."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import build_model, family
from models.initialization import ROWS_PER_BLOCK, Normal, fill_rows
from models.layers import Attention, RopeScaling, apply_rope, rope_frequencies, rope_table
from models.llama import Llama, LlamaFlavor

CPU = torch.device("cpu")
SMALL = LlamaFlavor(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48)


def _small(tie_embeddings: bool = False, seed: int = 1) -> Llama:
    model = Llama(SMALL, vocab_size=50, max_seq_len=16, tie_embeddings=tie_embeddings)
    model.init_weights(seed)
    return model


def _tokens(rows: int = 3, length: int = 16) -> Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(2))


def _meta(flavor: str, vocab_size: int = 128256) -> Llama:
    with torch.device("meta"):
        return build_model("llama3", flavor, vocab_size=vocab_size, max_seq_len=8192)


# --- forward --------------------------------------------------------------------------------------


def test_shapes_of_logits_and_loss() -> None:
    model = _small()
    tokens = _tokens()
    assert model(tokens).shape == (3, 16, 50)
    loss = model(tokens, tokens)
    assert loss.shape == () and loss.dtype == torch.float32


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_loss_is_the_sum_of_token_losses(tie_embeddings: bool) -> None:
    model, tokens = _small(tie_embeddings), _tokens()
    labels = tokens.roll(-1, dims=1)
    labels[0, :5] = -100
    plain = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, labels), plain, rtol=1e-6, atol=0)


def test_no_token_sees_a_later_one() -> None:
    model, tokens = _small(), _tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()  # and every token sees earlier ones


def test_a_longer_sequence_than_built_for_is_refused() -> None:
    with pytest.raises(ValueError, match="max_seq_len 16"):
        _small()(_tokens(length=17))


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_first_loss_is_about_ln_vocab(seed: int, tie_embeddings: bool) -> None:
    model = build_model(
        "llama3", "debug", vocab_size=4096, max_seq_len=128, tie_embeddings=tie_embeddings
    )
    model.init_weights(seed)
    tokens = torch.randint(0, 4096, (4, 129), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        loss = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    assert loss.item() == pytest.approx(math.log(4096), abs=0.1)


# --- attention and rotary positions ---------------------------------------------------------------


def test_grouped_queries_equal_repeated_keys_and_values() -> None:
    grouped, full = Attention(32, 4, 2), Attention(32, 4, 4)
    table = rope_table(8, 10, 10_000.0, None, CPU)
    for attention in (grouped, full):
        attention.register_buffer("rope", table, persistent=False)

    def repeated(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)

    state = dict(grouped.state_dict())
    state |= {name: repeated(state[name]) for name in ("wk.weight", "wv.weight")}
    full.load_state_dict(state)
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grouped(x), full(x), rtol=1e-5, atol=1e-6)


def test_attention_equals_its_definition() -> None:
    torch.manual_seed(0)
    attention = Attention(16, 2, 1).double()
    attention.register_buffer("rope", torch.stack((torch.ones(5, 4), torch.zeros(5, 4)), dim=1))
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    q, k, v = (linear(x)[0] for linear in (attention.wq, attention.wk, attention.wv))
    heads = []
    for head in range(2):
        scores = q[:, head * 8 : head * 8 + 8] @ k.T / math.sqrt(8)
        heads.append(scores.tril().masked_fill(scores.tril() == 0, -math.inf).softmax(-1) @ v)
    expected = attention.wo(torch.cat(heads, dim=-1)).unsqueeze(0)
    torch.testing.assert_close(attention(x), expected, rtol=1e-6, atol=1e-6)


def test_rotated_products_depend_on_distance_alone() -> None:
    table = rope_table(8, 40, 10_000.0, RopeScaling(8.0, 1.0, 4.0, 32), CPU)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator)
    q_at = apply_rope(q.expand(1, 40, 1, 8), table)[0, :, 0]  # the same vector at each position
    k_at = apply_rope(k.expand(1, 40, 1, 8), table)[0, :, 0]
    products = q_at @ k_at.T
    for distance in (0, 1, 7):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-5)
    assert (products[:, 0] - products[0, 0]).abs().max() > 0.1
    torch.testing.assert_close(q_at.norm(dim=-1), q.norm().expand(40))


def test_rotation_is_a_complex_product_of_neighbouring_pairs() -> None:
    x = torch.randn(2, 6, 3, 8, generator=torch.Generator().manual_seed(0))
    angles = torch.outer(torch.arange(6.0), rope_frequencies(8, 500_000.0, None))
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns)
    turned = apply_rope(x, rope_table(8, 6, 500_000.0, None, CPU))
    torch.testing.assert_close(turned, expected.flatten(-2), rtol=1e-6, atol=1e-6)


def test_scaling_keeps_fast_rotations_and_stretches_slow_ones() -> None:
    plain = rope_frequencies(128, 500_000.0, None)
    scaled = rope_frequencies(128, 500_000.0, RopeScaling())
    wavelengths = 2 * math.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192
    blended = ~fast & ~slow
    assert fast.any() and slow.any() and blended.any()
    assert torch.equal(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8.0)
    assert (scaled[blended] < plain[blended]).all()
    assert (scaled[blended] > plain[blended] / 8.0).all()


def test_rotary_table_stays_float32_and_is_never_saved() -> None:
    model = _small().to(torch.bfloat16)
    model.init_buffers("cpu")
    tables = [module.rope for module in model.modules() if isinstance(module, Attention)]
    assert all(table is tables[0] for table in tables)
    assert tables[0].dtype == torch.float32
    assert not [name for name in model.state_dict() if "rope" in name]
    assert model(_tokens()).dtype == torch.bfloat16


# --- initial values -------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0, 700), (0, 1, 255, 256, 257, 600, 700), (0, 300, 512, 700)])
def test_any_split_gives_the_same_rows(cuts: tuple[int, ...]) -> None:
    model = _small()
    for fqn, shape in [
        ("tok_embeddings.weight", (700, 6)),
        ("layers.1.feed_forward.w2.weight", (700, 5)),
    ]:
        whole = torch.empty(shape)
        model.init_rows(fqn, shape, 0, whole, seed=7)
        parts = [torch.empty(stop - start, shape[1]) for start, stop in pairwise(cuts)]
        for start, part in zip(cuts[:-1], parts, strict=True):
            model.init_rows(fqn, shape, start, part, seed=7)
        assert torch.equal(torch.cat(parts), whole)


def test_an_empty_piece_is_left_alone() -> None:
    _small().init_rows("tok_embeddings.weight", (50, 32), 50, torch.empty(0, 32), seed=0)


def test_values_depend_on_seed_name_and_block_but_not_on_the_global_generator() -> None:
    def draw(fqn: str, seed: int) -> Tensor:
        out = torch.empty(2 * ROWS_PER_BLOCK, 3)
        fill_rows(fqn, (2 * ROWS_PER_BLOCK, 3), 0, out, seed, Normal(1.0))
        return out

    first = draw("a", 0)
    torch.manual_seed(99)
    assert torch.equal(draw("a", 0), first)
    assert not torch.equal(draw("a", 1), first)
    assert not torch.equal(draw("b", 0), first)
    assert not torch.equal(first[:ROWS_PER_BLOCK], first[ROWS_PER_BLOCK:])


def test_values_are_those_this_repo_has_always_drawn() -> None:
    """Old runs must be reproducible: other values here would change every model's start."""
    out = torch.empty(2, 2)
    fill_rows("layers.0.attention.wq.weight", (4, 2), 1, out, 0, Normal(1.0))
    expected = torch.tensor([[-1.2610802, 0.4479581], [2.0264866, 0.3999590]])
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)


def test_bfloat16_rows_are_the_rounded_float32_rows() -> None:
    model, shape = _small(), (300, 4)
    exact, rounded = torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)
    model.init_rows("head.output.weight", shape, 0, exact, seed=0)
    model.init_rows("head.output.weight", shape, 0, rounded, seed=0)
    assert torch.equal(exact.bfloat16(), rounded)


def test_deviations_follow_the_rules() -> None:
    model = _small()

    def deviation(fqn: str) -> float:
        out = torch.empty(1024, 64)
        model.init_rows(fqn, (1024, 64), 0, out, seed=0)
        return out.std().item()

    truncated = 0.9866  # the deviation of a unit normal truncated at 3
    assert deviation("tok_embeddings.weight") == pytest.approx(1.0, rel=0.02)
    assert deviation("layers.0.attention.wq.weight") == pytest.approx(0.02 * truncated, rel=0.02)
    assert deviation("layers.1.attention.wo.weight") == pytest.approx(0.01 * truncated, rel=0.02)
    assert deviation("head.output.weight") == pytest.approx(0.25 / 32**0.5 * truncated, rel=0.02)
    norm = torch.empty(32)
    model.init_rows("layers.0.ffn_norm.weight", (32,), 0, norm, seed=0)
    assert torch.equal(norm, torch.ones(32))


def test_a_truncated_normal_has_its_shape_and_bounds() -> None:
    out = torch.empty(1024, 256)
    fill_rows("a", (1024, 256), 0, out, 0, Normal(2.0))
    assert 5.9 < out.abs().max() <= 6.001
    assert out.mean().item() == pytest.approx(0.0, abs=0.02)
    within_one = (out.abs() < 2.0).float().mean().item()
    assert within_one == pytest.approx(0.6827 / 0.9973, abs=0.005)


def test_wrong_rows_and_unknown_names_are_refused() -> None:
    model = _small()
    with pytest.raises(ValueError, match=r"rows \[40, 60\)"):
        model.init_rows("tok_embeddings.weight", (50, 32), 40, torch.empty(20, 32), seed=0)
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.wz\.weight"):
        model.init_rows("layers.0.attention.wz.weight", (4, 4), 0, torch.empty(4, 4), seed=0)


# --- names, counts, flavors -----------------------------------------------------------------------


def test_every_parameter_is_one_matrix_or_a_norm_and_in_one_unit() -> None:
    for tie_embeddings in (False, True):
        model = _small(tie_embeddings)
        names = [name for name, _ in model.named_parameters()]
        assert ("head.output.weight" in names) is not tie_embeddings
        assert list(model.state_dict()) == names
        units = model.unit_names()
        for name in names:
            assert sum(name.startswith(f"{module}.") for unit in units for module in unit) == 1
    assert units == [["layers.0"], ["layers.1"], ["tok_embeddings", "head"]]
    assert _small().unit_names() == [["tok_embeddings"], ["layers.0"], ["layers.1"], ["head"]]


@pytest.mark.parametrize(
    ("flavor", "billions"),
    [("1B", 1.236), ("8B", 8.030), ("32B", 32.52), ("70B", 70.55), ("405B", 405.85)],
)
def test_parameter_counts(flavor: str, billions: float) -> None:
    start = time.monotonic()
    model = _meta(flavor)
    assert time.monotonic() - start < 5.0
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.006)
    assert all(param.is_meta for param in model.parameters())


def test_150m_at_a_vocabulary_of_50k() -> None:
    assert _meta("150M", 50257).num_parameters / 1e6 == pytest.approx(150, rel=0.03)


def test_flops_are_six_per_multiplying_parameter_plus_attention() -> None:
    model = _meta("8B")
    multiplying = model.num_parameters - 128256 * 4096
    assert model.flops_per_token(8192) == 6 * multiplying + 12 * 32 * 4096 * 8192
    tied = _meta("1B")
    assert tied.flops_per_token(1) == 6 * tied.num_parameters + 12 * 16 * 2048


def test_unknown_model_or_flavor_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'llama3'"):
        build_model("lama3", "debug", vocab_size=10, max_seq_len=4)
    with pytest.raises(ValueError, match="did you mean '8B'"):
        build_model("llama3", "8b", vocab_size=10, max_seq_len=4)
    assert {"debug", "150M", "1B", "8B", "32B", "70B", "405B"} <= set(family("llama3").flavors)


# heads do not divide dim; kv_heads do not divide heads; head_dim is odd
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (4, 3), (32, 32)])
def test_impossible_heads_are_refused(heads: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match="n_heads"):
        LlamaFlavor(32, 1, heads, kv_heads, 32)
