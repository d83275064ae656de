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
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

# Every key of config.json falls in one of the groups below, or is refused. Their meaning is that of transformers'
# LlamaConfig and PreTrainedConfig, versions 4.28 to 5: https://huggingface.co/docs/transformers/model_doc/llama
_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_WHOLE_NUMBERS = (*_REQUIRED, "num_key_value_heads", "max_position_embeddings")
_READ = frozenset(
    {
        *_WHOLE_NUMBERS,
        "model_type",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "bos_token_id",
        "eos_token_id",
    }
)
_LLAMA3_ROPE = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
"""In the order of RopeScaling's fields."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "architectures": (["LlamaForCausalLM"],),
    "hidden_act": ("silu", "swish"),  # two names of one function
    "tie_word_embeddings": (False, True),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "pruned_heads": ({},),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
}
"""Keys that are not read, with the values under which the model is ours."""
_HARMLESS_BY_USE = {
    "where the file comes from, how it is to be loaded": (
        "_name_or_path name_or_path _commit_hash transformers_version torch_dtype dtype "
        "attn_implementation _attn_implementation _attn_implementation_autoset"
    ),
    "training: initial values, regularisation, memory": (
        "initializer_range attention_dropout gradient_checkpointing"
    ),
    "the same products in other pieces, a cache, the form of outputs": (
        "pretraining_tp chunk_size_feed_forward use_cache is_decoder output_attentions "
        "output_hidden_states return_dict use_return_dict torchscript use_bfloat16 tf_legacy_loss"
    ),
    "text in and out; heads of other tasks, whose tensors are refused": (
        "pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix finetuning_task "
        "task_specific_params id2label label2id num_labels problem_type"
    ),
    "generation, which older files keep here": (
        "max_length min_length do_sample early_stopping num_beams num_beam_groups "
        "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
        "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
        "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
        "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
        "begin_suppress_tokens"
    ),
}
_HARMLESS = frozenset(" ".join(_HARMLESS_BY_USE.values()).split())
"""Keys that change nothing of what the weights compute."""
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


def is_rotary_buffer(name: str) -> bool:
    """Whether `name` is the rotary table of an old checkpoint, which follows from config.json."""
    return _ROTARY_BUFFER.fullmatch(name) is not None


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
    """The flavor that a config.json describes; ValueError where this model cannot be that one.

    A key that is neither read nor known to be harmless is refused, because it may change what the
    model computes, and nothing after the conversion would show it.
    """
    if config.get("model_type") != "llama":  # first: other models' keys have other names
        raise ValueError(
            f"config.json: model_type is {config.get('model_type')!r}; only 'llama' can be converted"
        )
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    for key in _WHOLE_NUMBERS:
        _check_number(key, config.get(key), int)
    _check_number("rms_norm_eps", config.get("rms_norm_eps"), float)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    _refuse_others(config, {**_ONLY, "head_dim": (head_dim,)}, _READ | _HARMLESS)
    theta, scaling = _rope_of(config)
    return LlamaFlavor(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        ffn_hidden_dim=config["intermediate_size"],
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps") or 1e-6,
    )


def _refuse_others(
    table: Mapping[str, Any],
    only: Mapping[str, tuple[Any, ...]],
    known: frozenset[str],
    prefix: str = "",
) -> None:
    """ValueError, with key and value, unless every key is `known`, has a value in `only`, or is null (not set)."""
    for key, value in table.items():
        if value is None or key in known or value in only.get(key, ()):
            continue
        if key in only:
            wanted = " or ".join(map(repr, only[key]))
            raise ValueError(
                f"config.json: {prefix}{key} is {value!r}; only {wanted} can be converted"
            )
        raise ValueError(
            f"config.json: {prefix}{key} is {value!r}, a key that is not known here and may change what the model "
            "computes. If it does not, remove it from config.json"
        )


def _check_number(key: str, value: Any, kind: type[int] | type[float]) -> None:
    """ValueError unless `value` is null or a positive number of that kind."""
    number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if value is None or (number and 0 < value < float("inf")):
        return
    wanted = "whole number" if kind is int else "number"
    raise ValueError(f"config.json: {key} is {value!r}; it must be a positive {wanted}")


def _rope_of(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """theta and scaling: transformers 5 writes one table, rope_parameters; before that there were two keys."""
    tables = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    for key in tables:
        if not isinstance(config[key], Mapping):
            raise ValueError(f"config.json: {key} is {config[key]!r}; it must be a table")
    table = config[tables[0]] if tables else {}
    prefix = f"{tables[0]}." if tables else ""
    kind = _one_value(
        {f"{prefix}rope_type": table.get("rope_type"), f"{prefix}type": table.get("type")},
        default="default",
    )
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"config.json: {prefix}rope_type is {kind!r}; only 'default' and 'llama3' can be converted"
        )
    if len(tables) == 2:
        _one_value({key: dict(config[key]) for key in tables}, default=None)
    read = frozenset(_LLAMA3_ROPE if kind == "llama3" else ()) | {"rope_theta", "rope_type", "type"}
    _refuse_others(table, {"partial_rotary_factor": (1.0,)}, read, prefix)
    theta = _one_value(
        {"rope_theta": config.get("rope_theta"), f"{prefix}rope_theta": table.get("rope_theta")},
        default=10_000.0,
    )
    _check_number("rope_theta", theta, float)
    if kind == "default":
        return float(theta), None
    missing = [key for key in _LLAMA3_ROPE if table.get(key) is None]
    if missing:
        raise ValueError(f"config.json: {prefix[:-1]} lacks {', '.join(missing)}")
    for key in _LLAMA3_ROPE:
        _check_number(prefix + key, table[key], int if key.startswith("original") else float)
    if table["high_freq_factor"] <= table["low_freq_factor"]:
        raise ValueError(
            f"config.json: {prefix}high_freq_factor is {table['high_freq_factor']}; it must be above low_freq_factor, "
            f"{table['low_freq_factor']}"
        )
    return float(theta), RopeScaling(*(table[key] for key in _LLAMA3_ROPE))


def _one_value(named: Mapping[str, Any], default: Any) -> Any:
    """The value that one or several keys give, null being none; ValueError if they differ."""
    given = {key: value for key, value in named.items() if value is not None}
    first, *others = given.values() or [default]
    if any(other != first for other in others):
        differing = ", but ".join(f"{key} is {value!r}" for key, value in given.items())
        raise ValueError(f"config.json: {differing}; remove the one that does not hold")
    return first


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
