"""Llama weights to and from Hugging Face: same logits as transformers' model, exact round trips."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from models.hf_llama import fqn_of, from_hf, from_hf_config, hf_name, to_hf, to_hf_config
from models.layers import RopeScaling
from models.llama import LLAMA3_FLAVORS, Llama, LlamaFlavor

transformers = pytest.importorskip("transformers")

VOCAB, SEQ_LEN = 61, 48
# An original context so short that all three kinds of rotation (kept, blended, stretched) occur.
SCALING = RopeScaling(8.0, 1.0, 4.0, original_max_seq_len=32)
CASES = [
    LlamaFlavor(48, 2, 6, 2, 80, rope_scaling=SCALING),
    LlamaFlavor(48, 2, 3, 3, 80, rope_scaling=None, rope_theta=10_000.0),
    LlamaFlavor(64, 2, 4, 1, 96, tie_embeddings=True, rope_scaling=SCALING, norm_eps=1e-6),
]


def _ours(flavor: LlamaFlavor) -> Llama:
    model = Llama(
        flavor, vocab_size=VOCAB, max_seq_len=SEQ_LEN, tie_embeddings=flavor.tie_embeddings
    )
    model.init_weights(seed=3)
    for fqn, param in model.named_parameters():
        if fqn.endswith("norm.weight"):  # ones would hide norms that are swapped
            torch.nn.init.uniform_(
                param, 0.5, 1.5, generator=torch.Generator().manual_seed(len(fqn))
            )
    return model


def _theirs(flavor: LlamaFlavor) -> Any:
    config = to_hf_config(
        flavor, vocab_size=VOCAB, max_seq_len=SEQ_LEN, tie_embeddings=flavor.tie_embeddings
    )
    torch.manual_seed(4)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config)).eval()


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("flavor", CASES)
@torch.no_grad()
def test_logits_equal_after_export(flavor: LlamaFlavor) -> None:
    ours, theirs = _ours(flavor), _theirs(flavor)
    exported = dict(to_hf(fqn, param.data, flavor) for fqn, param in ours.named_parameters())
    missing, unexpected = theirs.load_state_dict(exported, strict=False)
    assert not unexpected
    assert set(missing) == ({"lm_head.weight"} if flavor.tie_embeddings else set())
    torch.testing.assert_close(ours(_tokens()), theirs(_tokens()).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("flavor", CASES)
@torch.no_grad()
def test_logits_equal_after_import(flavor: LlamaFlavor) -> None:
    ours, theirs = _ours(flavor), _theirs(flavor)
    for param in theirs.parameters():  # far from the tiny initial values, so that errors show
        param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(6)) * 0.1)
    named = [(name, param.data) for name, param in theirs.named_parameters()]  # tied: once
    ours.load_state_dict(dict(from_hf(name, tensor, flavor) for name, tensor in named))
    logits = ours(_tokens())
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, theirs(_tokens()).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(dtype: torch.dtype) -> None:
    flavor = CASES[0]
    for fqn, param in _ours(flavor).named_parameters():
        tensor = param.detach().to(dtype)
        back, again = from_hf(*to_hf(fqn, tensor, flavor), flavor)
        assert back == fqn
        assert again.dtype == dtype and again.is_contiguous()
        assert torch.equal(again, tensor)


def test_query_rows_are_reordered_within_their_head() -> None:
    flavor = LlamaFlavor(8, 1, 2, 2, 8)  # two heads of 4 rows
    rows = torch.arange(8.0).unsqueeze(1).expand(8, 8)
    _, moved = to_hf("layers.0.attention.wq.weight", rows, flavor)
    assert moved[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    _, kept = to_hf("layers.0.attention.wv.weight", rows, flavor)
    assert torch.equal(kept, rows)


@pytest.mark.parametrize("name", list(LLAMA3_FLAVORS))
def test_config_round_trip(name: str) -> None:
    flavor = LLAMA3_FLAVORS[name]
    written = to_hf_config(
        flavor, vocab_size=VOCAB, max_seq_len=SEQ_LEN, tie_embeddings=flavor.tie_embeddings
    )
    assert from_hf_config(written) == flavor
    assert from_hf_config(transformers.LlamaConfig.from_dict(written).to_dict()) == flavor


def hf_config(**keys: object) -> dict[str, Any]:
    """What we write of a model with scaled rotations, with `keys` changed."""
    return {
        **to_hf_config(CASES[0], vocab_size=VOCAB, max_seq_len=SEQ_LEN, tie_embeddings=False),
        **keys,
    }


LLAMA3_ROPE = hf_config()["rope_scaling"]
OTHER_MODELS = [
    ("model_type", "mistral"),
    ("architectures", ["LlamaForSequenceClassification"]),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("head_dim", 128),
    ("partial_rotary_factor", 0.5),
    ("sliding_window", 4096),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("auto_map", {"AutoModelForCausalLM": "modeling.Own"}),
    ("pruned_heads", {"0": [1]}),
    ("per_layer_config", {"0": {"hidden_act": "gelu"}}),
    ("add_cross_attention", True),
    ("original_max_position_embeddings", 8192),  # transformers puts it above the table's
    ("embedding_multiplier", 12.0),
    ("a_key_of_tomorrow", False),
    ("tie_word_embeddings", "yes"),
    ("hidden_size", "48"),
    ("num_hidden_layers", 2.5),
    ("num_attention_heads", True),
    ("num_key_value_heads", 0),
    ("max_position_embeddings", -1),
    ("rms_norm_eps", "1e-5"),
    ("rope_theta", "10000"),
    ("rope_scaling", [8.0]),
]


@pytest.mark.parametrize(("key", "value"), OTHER_MODELS)
def test_a_config_that_says_something_else_is_refused_by_key_and_value(
    key: str, value: object
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"config.json: {key} is {value!r}")):
        from_hf_config(hf_config(**{key: value}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.rope_type is 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.rope_type is 'linear'"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "llama3"}},
            "'llama3', but rope_scaling.",
        ),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor is 4.0, a key that is not known"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": None}}, "rope_scaling lacks factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": "8"}}, "rope_scaling.factor is '8'; it must be"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
            "must be above low_freq_factor",
        ),
        ({"rope_scaling": LLAMA3_ROPE | {"mscale": 0.7}}, "rope_scaling.mscale is 0.7"),
        (
            {"rope_parameters": LLAMA3_ROPE | {"partial_rotary_factor": 0.5}, "rope_scaling": None},
            "rope_parameters.partial_rotary_factor is 0.5; only 1.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "but rope_scaling is {'rope_type': 'llama3'",
        ),
        (
            {"rope_scaling": {"rope_theta": 5.0}, "rope_theta": 7.0},
            "rope_theta is 7.0, but rope_scaling.rope_theta is 5.0",
        ),
    ],
)
def test_other_rotations_are_refused_by_key_and_value(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_hf_config(hf_config(**keys))


def test_keys_that_change_no_value_are_taken() -> None:
    """All that transformers writes of a Llama, by default and set, and what older versions wrote."""
    written = transformers.LlamaConfig.from_dict(hf_config()).to_dict()
    old = {"_name_or_path": "x", "transformers_version": "4.31.0", "torch_dtype": "float16"}
    old |= {"use_cache": False, "pretraining_tp": 2, "initializer_range": 0.1, "pad_token_id": 0}
    old |= {"attention_dropout": 0.1, "temperature": 0.6, "pruned_heads": {}, "hidden_act": "swish"}
    old |= {"sliding_window": None, "quantization_config": None, "id2label": {"0": "A"}}
    for config in (written, hf_config(**old), written | {"num_labels": 3, "is_decoder": True}):
        assert from_hf_config(config) == CASES[0]
    required = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    plain = {key: hf_config()[key] for key in ("model_type", "vocab_size", *required)}
    theirs = transformers.LlamaConfig(**plain)
    ours = from_hf_config(plain)
    assert (ours.norm_eps, ours.rope_theta) == (theirs.rms_norm_eps, 10_000.0)
    assert (ours.rope_scaling, ours.tie_embeddings) == (None, theirs.tie_word_embeddings)
    assert ours.n_kv_heads == theirs.num_key_value_heads
    nulls = {key: None for key in hf_config() if key not in plain}
    assert from_hf_config(plain | nulls) == ours


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.bias"):
        hf_name("layers.0.attention.bias")
    with pytest.raises(ValueError, match=r"q_proj\.bias"):
        fqn_of("model.layers.0.self_attn.q_proj.bias")
