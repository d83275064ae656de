"""Llama between this repo's layout and Hugging Face's: names, order of Q and K rows, config.json.

Owns the mapping of one tensor at a time, by pure functions, so that a converter streams: it reads
and writes no file and holds no model. Every mapping only renames and reorders, so a round trip is
exact to the bit in any dtype. Read `layers.py` for why Q and K rows differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.layers import RopeScaling
from models.llama import LlamaFlavor

_TOP_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_TOP_FQNS = {name: fqn for fqn, name in _TOP_NAMES.items()}
_LAYER_FQNS = {name: fqn for fqn, name in _LAYER_NAMES.items()}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_ROTATED = ("attention.wq.weight", "attention.wk.weight")


def hf_name(fqn: str) -> str:
    """Hugging Face's name of parameter `fqn`. A tied model has no head.output.weight to ask for."""
    name = _translate(fqn, r"layers\.(\d+)\.(.+)", "model.layers", _TOP_NAMES, _LAYER_NAMES)
    if name is None:
        raise ValueError(f"{fqn} is not a parameter of a Llama model")
    return name


def fqn_of(name: str) -> str:
    """Our name of Hugging Face's tensor `name`."""
    fqn = _translate(name, r"model\.layers\.(\d+)\.(.+)", "layers", _TOP_FQNS, _LAYER_FQNS)
    if fqn is None:
        raise ValueError(
            f"{name} is not a tensor of a Hugging Face Llama model (biases, adapters and quantised "
            "weights are not supported)"
        )
    return fqn


def to_hf(fqn: str, tensor: Tensor, flavor: LlamaFlavor) -> tuple[str, Tensor]:
    """Hugging Face's name and contiguous tensor for our whole parameter `fqn`."""
    if fqn.endswith(_ROTATED):
        pairs = tensor.unflatten(0, (-1, flavor.head_dim // 2, 2))  # (H, D/2, 2, C)
        tensor = pairs.transpose(1, 2).flatten(0, 2)
    return hf_name(fqn), tensor.contiguous()


def from_hf(name: str, tensor: Tensor, flavor: LlamaFlavor) -> tuple[str, Tensor]:
    """Our name and contiguous tensor for Hugging Face's whole tensor `name`: undoes `to_hf`."""
    fqn = fqn_of(name)
    if fqn.endswith(_ROTATED):
        halves = tensor.unflatten(0, (-1, 2, flavor.head_dim // 2))  # (H, 2, D/2, C)
        tensor = halves.transpose(1, 2).flatten(0, 2)
    return fqn, tensor.contiguous()


def to_hf_config(
    flavor: LlamaFlavor, *, vocab_size: int, max_seq_len: int, tie_embeddings: bool
) -> dict[str, Any]:
    """The contents of config.json, in the keys that transformers has read since Llama 3.1."""
    scaling = flavor.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": flavor.dim,
        "intermediate_size": flavor.ffn_hidden_dim,
        "num_hidden_layers": flavor.n_layers,
        "num_attention_heads": flavor.n_heads,
        "num_key_value_heads": flavor.n_kv_heads,
        "head_dim": flavor.head_dim,
        "rms_norm_eps": flavor.norm_eps,
        "rope_theta": flavor.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "max_position_embeddings": max_seq_len,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def from_hf_config(config: Mapping[str, Any]) -> LlamaFlavor:
    """The flavor that a config.json describes; ValueError where this model cannot be that one."""
    if config.get("model_type") != "llama":  # first: other models' keys have other names
        raise ValueError(
            f"config.json: model_type is {config.get('model_type')!r}; only 'llama' can be converted"
        )
    missing = [key for key in _REQUIRED if not config.get(key)]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    expected = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
    }
    for key, value in expected.items():
        if config.get(key) not in (value, None):
            raise ValueError(
                f"config.json: {key} is {config[key]!r}; only {value!r} can be converted"
            )
    # transformers 5 writes one table, rope_parameters; before that there were two keys.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return LlamaFlavor(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        ffn_hidden_dim=config["intermediate_size"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        rope_scaling=_rope_scaling(rope),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"config.json: rope_type {kind!r} is not supported, only llama3 is")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope["original_max_position_embeddings"],
    )


def _translate(
    name: str,
    layer_pattern: str,
    layer_prefix: str,
    top: Mapping[str, str],
    layer: Mapping[str, str],
) -> str | None:
    match = re.fullmatch(layer_pattern, name)
    if match is None:
        return top.get(name)
    inner = layer.get(match[2])
    return None if inner is None else f"{layer_prefix}.{match[1]}.{inner}"
