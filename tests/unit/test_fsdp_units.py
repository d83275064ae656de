"""Which units `fully_shard` finds in a model, and which role and form each weight gets."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from matrixtitan.fsdp import fully_shard
from matrixtitan.fsdp.roles import decide, layers_as_one
from matrixtitan.fsdp.units import find_units
from matrixtitan.plan.cost import matrices_in_block
from matrixtitan.plan.matrix_form import MatrixForm
from matrixtitan.plan.planner import make_plan
from matrixtitan.plan.shard import ParamSpec
from tests.lib.toy import Block, batch, make_toy, toy_units


def transformers_model(name: str) -> Any:
    """A tiny model of the class `name`, with weights on the default device."""
    import transformers

    small: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0}
    small |= {"bos_token_id": 1, "eos_token_id": 2}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    dense = {"hidden_size": 32, "intermediate_size": 48, **layers}
    mixture = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    grouped = {"num_key_value_heads": 2, "head_dim": 8}
    halves = {f"{half}_{key}": n for half in ("encoder", "decoder") for key, n in HALF.items()}
    settings: dict[str, dict[str, Any]] = {
        "LlamaForCausalLM": {**small, **dense, "num_key_value_heads": 2},
        "Qwen3MoeForCausalLM": {**small, **dense, **grouped, **mixture},
        "GptOssForCausalLM": {
            **small,
            **dense,
            **grouped,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "GPT2LMHeadModel": {**small, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        "BertForMaskedLM": {**small, **dense, "max_position_embeddings": 32},
        "ViTForImageClassification": {**dense, "image_size": 8, "patch_size": 4, "num_labels": 5},
        "T5ForConditionalGeneration": {
            **small,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
        "WhisperForConditionalGeneration": {
            **small,
            **halves,
            "d_model": 32,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
        },
        "MambaForCausalLM": {
            **small,
            "hidden_size": 32,
            "state_size": 4,
            "num_hidden_layers": 2,
        },
    }
    cls = getattr(transformers, name)
    return cls(cls.config_class(**settings[name]))


HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return transformers_model(name)


FOUND = {
    "LlamaForCausalLM": ["model.embed_tokens", "model.layers.0", "model.layers.1"],
    "Qwen3MoeForCausalLM": ["model.embed_tokens", "model.layers.0", "model.layers.1"],
    "GPT2LMHeadModel": ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1"],
    "BertForMaskedLM": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"],
    "ViTForImageClassification": ["vit.embeddings", "vit.layers.0", "vit.layers.1"],
    "T5ForConditionalGeneration": [
        "shared",
        "encoder.embed_tokens",
        "encoder.block.0",
        "encoder.block.1",
        "decoder.embed_tokens",
        "decoder.block.0",
        "decoder.block.1",
    ],
    "WhisperForConditionalGeneration": [
        "model.encoder.embed_positions",
        "model.encoder.layers.0",
        "model.encoder.layers.1",
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.layers.0",
        "model.decoder.layers.1",
    ],
    "MambaForCausalLM": ["backbone.embeddings", "backbone.layers.0", "backbone.layers.1"],
}


@pytest.mark.parametrize("name", FOUND)
def test_the_units_that_are_found(name: str) -> None:
    assert find_units(on_meta(name)) == [[unit] for unit in FOUND[name]]


def test_a_model_of_plain_modules_has_its_lists_elements_as_units() -> None:
    assert find_units(make_toy()) == [["embed"], ["blocks.0"], ["blocks.1"], ["blocks.2"]]
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    assert find_units(nn.TransformerEncoder(layer, 2)) == [["layers.0"], ["layers.1"]]
    mixed = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(Block(), Block()))
    assert find_units(mixed) == [["2.0"], ["2.1"]]


def test_units_by_names_classes_and_a_callable() -> None:
    toy = make_toy()
    blocks = [[f"blocks.{i}"] for i in range(3)]
    assert find_units(toy, toy_units()) == toy_units()
    assert find_units(toy, Block) == find_units(toy, [Block]) == blocks
    assert find_units(toy, (Block, nn.Embedding)) == [["embed"], *blocks]
    assert find_units(toy, lambda name, module: name.endswith(".1")) == [["blocks.1"]]
    wrong: list[tuple[Any, str]] = [
        ((nn.Conv2d,), "units names the class Conv2d, which no module has"),
        ([Block, ["embed"]], "units mixes classes and names"),
        (["embed"], "units has the entry 'embed'; give each unit as a list"),
        (lambda name, module: False, "the callable chooses no module"),
    ]
    for units, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            find_units(toy, units)


def names_of_units(model: nn.Module, units: Any = None, **options: Any) -> list[str]:
    return [unit.name for unit in fully_shard(model, units=units, **options).units]


def test_units_that_share_a_weight_are_joined() -> None:
    toy = make_toy(tied=True)
    blocks = [f"blocks.{i}" for i in range(3)]
    assert names_of_units(toy, toy_units()) == ["(root)", "embed+norm+head", *blocks]
    toy(*batch(0)).backward()
    # the root unit holds the head, so that the unit of the embedding is part of it
    assert names_of_units(make_toy(tied=True)) == ["(root)", *blocks]


def test_ignored_and_empty_parameters_are_not_sharded() -> None:
    toy: Any = make_toy()
    toy.norm.register_parameter("empty", nn.Parameter(torch.zeros(0, 16)))
    ignored = toy.blocks[1].up.weight
    sharded = fully_shard(toy, ignored_params=[ignored])
    names = {param.fqn for param in sharded.local_parameters()}
    assert names == set(dict(toy.named_parameters())) - {"norm.empty", "blocks.1.up.weight"}
    toy(*batch(0)).backward()
    assert toy.blocks[1].up.weight is ignored
    plain: Any = make_toy()
    plain(*batch(0)).backward()
    torch.testing.assert_close(ignored.grad, plain.blocks[1].up.weight.grad)


TAILS = {
    "LlamaForCausalLM": {"model.embed_tokens.weight", "lm_head.weight"},
    "Qwen3MoeForCausalLM": {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.*.mlp.gate.weight",
    },
    "GptOssForCausalLM": {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.*.mlp.router.weight",
        "model.layers.*.mlp.experts.gate_up_proj_bias",
        "model.layers.*.mlp.experts.down_proj_bias",
    },
    "GPT2LMHeadModel": {"transformer.wte.weight", "transformer.wpe.weight"},
    "BertForMaskedLM": {
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
    },
    "ViTForImageClassification": {
        "vit.embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.embeddings.patch_embeddings.projection.weight",
        "classifier.weight",
    },
    "T5ForConditionalGeneration": {
        "shared.weight",
        "encoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight",
        "decoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight",
    },
    "WhisperForConditionalGeneration": {
        "model.encoder.conv1.weight",
        "model.encoder.conv2.weight",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_tokens.weight",
        "model.decoder.embed_positions.weight",
    },
    "MambaForCausalLM": {
        "backbone.embeddings.weight",
        "backbone.layers.*.mixer.A_log",
        "backbone.layers.*.mixer.conv1d.weight",
    },
}
"""The parameters of two or more dimensions that are no hidden matrices."""

FORMS = {
    "Qwen3MoeForCausalLM": {
        "model.layers.*.mlp.experts.gate_up_proj": MatrixForm(rows=(24, 24)),
    },
    "GptOssForCausalLM": {
        # gate and up alternate, so that they are one matrix
        "model.layers.*.mlp.experts.gate_up_proj": MatrixForm(transposed=True),
        "model.layers.*.mlp.experts.down_proj": MatrixForm(transposed=True),
    },
    "GPT2LMHeadModel": {
        "transformer.h.*.attn.c_attn.weight": MatrixForm(transposed=True, rows=(32, 32, 32)),
        "transformer.h.*.attn.c_proj.weight": MatrixForm(transposed=True),
        "transformer.h.*.mlp.c_fc.weight": MatrixForm(transposed=True),
        "transformer.h.*.mlp.c_proj.weight": MatrixForm(transposed=True),
    },
}
"""The matrices whose form is not the plain one."""


@pytest.mark.parametrize("name", TAILS)
def test_the_roles_and_forms_that_are_found(name: str) -> None:
    model = on_meta(name)
    params = dict(model.named_parameters())
    decisions = decide(model, params)
    large = {fqn for fqn, param in params.items() if param.dim() > 1}
    tails = {layers_as_one(fqn) for fqn in large if decisions[fqn].role == "tail"}
    assert tails == TAILS[name]
    assert not any(decision.doubtful for decision in decisions.values())
    assert {decisions[fqn].role for fqn in set(params) - large} <= {"tail"}
    forms = {layers_as_one(fqn): decision.form for fqn, decision in decisions.items()}
    special = {fqn: form for fqn, form in forms.items() if form != MatrixForm()}
    assert special == FORMS.get(name, {})


class Experts(nn.Module):
    """Stacks whose orientation only the hidden size tells."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.hidden_size = 8
        up, down = ((8, 24), (12, 8)) if transposed else ((24, 8), (8, 12))
        self.gate_up = nn.Parameter(torch.ones(2, *up))
        self.down = nn.Parameter(torch.ones(2, *down))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_orientation_of_experts_by_the_hidden_size(transposed: bool) -> None:
    experts = Experts(transposed)
    decisions = decide(experts, dict(experts.named_parameters()))
    assert decisions["gate_up"].form == MatrixForm(transposed, (12, 12))
    assert decisions["down"].form == MatrixForm(transposed)


class Odd(nn.Module):
    """Weights that no rule knows, and some that patterns name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv2d(3, 8, 2)
        self.conv1d = nn.Conv1d(3, 8, 2)
        self.up = nn.Linear(8, 12)


def test_an_unknown_weight_goes_to_the_tail_and_is_named_once() -> None:
    with pytest.warns(UserWarning, match=r"1 weight\(s\) of an unknown kind .*: table; ") as seen:
        local = {param.fqn: param for param in fully_shard(Odd()).local_parameters()}
    assert len(seen) == 1
    matrices = {fqn for fqn, param in local.items() if param.role == "matrix"}
    assert matrices == {"attention.in_proj_weight", "attention.out_proj.weight", "up.weight"}
    assert local["attention.in_proj_weight"].form == MatrixForm(rows=(8, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(Odd(), tail_patterns=["table"])
        sharded = fully_shard(Odd(), matrix_patterns=["table", "conv.weight"])
    local = {param.fqn: param for param in sharded.local_parameters()}
    assert local["table"].role == local["conv.weight"].role == "matrix"
    assert local["conv.weight"].block_rows == 8


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"matrix_patterns": ["tabel"]}, "matrix_patterns: 'tabel' matches no parameter"),
        ({"tail_patterns": ["tabel"]}, "tail_patterns: 'tabel' matches no parameter"),
        ({"matrix_patterns": ["up.bias"]}, "up.bias has 1 dimension(s)"),
        ({"matrix_patterns": ["conv1d.weight"]}, "conv1d.weight is a 1D convolution's filter"),
        (
            {"tail_patterns": ["table"], "matrix_patterns": ["table"]},
            "table matches tail_patterns and matrix_patterns",
        ),
    ],
    ids=str,
)
def test_a_pattern_that_cannot_hold_is_refused(patterns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fully_shard(Odd(), **patterns)


def test_a_convolution_that_is_a_matrix_is_priced_whole() -> None:
    spec = ParamSpec("conv", (8, 3, 2, 2), "matrix", "u", 8)
    assert matrices_in_block(spec) == (1, 8, 12)
    (shard,) = make_plan([spec], 4).shards
    assert shard.is_whole


SUMMARY = """\
MatrixFSDP over 1 rank(s)
  5 units: (root), embed, 3 x blocks.*
  matrices: 6 parameters, 576 elements
  tail (AdamW): 13 parameters, 472 elements (1 embedding, 11 1D, 1 output head)
"""


def test_a_report_says_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    sharded = fully_shard(make_toy())
    assert capsys.readouterr().err == SUMMARY
    assert str(sharded) == sharded.summary() == SUMMARY.rstrip("\n")
    fully_shard(make_toy(), report=False)
    assert capsys.readouterr().err == ""
    odd = fully_shard(Odd(), tail_patterns=["conv*"], report=False)
    assert odd.summary().endswith("  of an unknown kind, in the tail: table")
