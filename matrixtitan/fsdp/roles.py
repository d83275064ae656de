"""Which optimizer a weight goes to, and how its matrices are stored, from what the weight is.

Owns the rules from a module's type, class name and place to a Decision. A weight that no rule knows
goes to the tail and is marked as doubtful. Shapes alone decide nothing, since a table of positions
has the shape of a matrix. Next: `assignment.py`, which makes the planner's input of the decisions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from matrixtitan.plan.matrix_form import MatrixForm
from matrixtitan.plan.roles import check_patterns
from matrixtitan.plan.shard import Plan, Role

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
HEAD_NAMES = frozenset(
    {"classifier", "embed_out", "head", "lm_head", "logits", "output", "output_layer"}
    | {"output_projection", "proj_out", "qa_outputs", "score", "unembed", "unembedding"}
)
"""Names of a Linear outside the repeated layers that give logits."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs of Hugging Face call the number of experts."""
TAIL_NAMES = ("A_log", "*_token", "*pos*embed*", "bias", "*_bias")
"""Patterns of the last part of a parameter's name."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a weight is. `doubtful`: no rule knows it, so that it went to the tail."""

    role: Role
    form: MatrixForm
    reason: str
    doubtful: bool = False


@dataclass(frozen=True)
class _Place:
    """One place where a parameter hangs. `name` is the module's."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def in_layers(self) -> bool:
        """Whether the module lies in a list of modules, as repeated layers do."""
        return any(part.isdigit() for part in self.name.split("."))


def decide(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    tail_patterns: Sequence[str] = (),
    matrix_patterns: Sequence[str] = (),
) -> dict[str, Decision]:
    """The role and form of each of `params`, which are those of `model` by full name.

    The patterns are those of `fnmatch.fnmatchcase`, and override all rules. A shared parameter has
    its first name. Where a shared parameter is an embedding or an output head in one place, it goes
    to the tail.

    Raises ValueError for a pattern that matches nothing, for a parameter that both kinds of
    patterns match, and for one that `matrix_patterns` matches and that cannot be a matrix.
    """
    check_patterns("tail_patterns", tail_patterns, list(params))
    check_patterns("matrix_patterns", matrix_patterns, list(params))
    places: dict[nn.Parameter, list[_Place]] = {}
    for name, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(param, []).append(_Place(name, module, attribute))
    known = _Known(model)
    decisions = {}
    for fqn, param in params.items():
        to_tail = any(fnmatchcase(fqn, pattern) for pattern in tail_patterns)
        to_matrix = any(fnmatchcase(fqn, pattern) for pattern in matrix_patterns)
        if to_tail and to_matrix:
            raise ValueError(
                f"{fqn} matches tail_patterns and matrix_patterns: narrow one of the patterns"
            )
        form = next((f for place in places[param] if (f := known.form(place, param))), None)
        if to_tail:
            decision = Decision("tail", MatrixForm(), "tail_patterns")
        elif to_matrix:
            _check_named_matrix(fqn, param, places[param][0])
            decision = Decision("matrix", form or MatrixForm(), "matrix_patterns")
        elif reason := next((r for place in places[param] if (r := known.tail(place, param))), ""):
            decision = Decision("tail", MatrixForm(), reason)
        elif form:
            decision = Decision("matrix", form, type(places[param][0].module).__name__)
        else:
            doubtful = param.dim() in (2, 3)
            reason = f"no rule for a {type(places[param][0].module).__name__}"
            decision = Decision("tail", MatrixForm(), reason, doubtful)
        decisions[fqn] = decision
    return decisions


def _check_named_matrix(fqn: str, param: nn.Parameter, place: _Place) -> None:
    """ValueError for a parameter that `matrix_patterns` must not name."""
    if param.dim() < 2:
        raise ValueError(
            f"matrix_patterns: {fqn} has {param.dim()} dimension(s); a matrix has two or more"
        )
    if param.dim() == 3 and isinstance(place.module, CONVOLUTIONS):
        raise ValueError(
            f"matrix_patterns: {fqn} is a 1D convolution's filter, of shape {tuple(param.shape)}, "
            "which an optimizer would read as a stack of matrices; leave it in the tail"
        )


class _Known:
    """What the rules need to know of the whole model: its configs and its output heads."""

    def __init__(self, model: nn.Module) -> None:
        configs: dict[int, Any] = {}
        self.heads: set[nn.Module] = set()
        for module in model.modules():
            if (config := getattr(module, "config", None)) is not None:
                configs[id(config)] = config
            get_head = getattr(module, "get_output_embeddings", None)
            if callable(get_head):
                # a model of Hugging Face without an output head may have the method all the same
                with suppress(NotImplementedError, AttributeError):
                    head = get_head()
                    if isinstance(head, nn.Module):
                        self.heads.add(head)

        def integers(*names: str) -> set[int]:
            values = (getattr(config, key, None) for config in configs.values() for key in names)
            return {value for value in values if isinstance(value, int)}

        self.vocabularies = integers("vocab_size")
        self.labels = integers("num_labels")
        self.experts = integers(*EXPERT_COUNTS)

    def tail(self, place: _Place, param: nn.Parameter) -> str:
        """Why the parameter of `place` is no hidden matrix; empty where nothing says so."""
        module = place.module
        if param.dim() < 2:
            return "1D"
        if isinstance(module, EMBEDDINGS):
            return "embedding"
        if module in self.heads or self._is_head(place):
            return "output head"
        if self._is_router(place, param):
            return "router"
        if isinstance(module, CONVOLUTIONS):
            return "convolution"
        for pattern in TAIL_NAMES:
            if fnmatchcase(place.attribute, pattern):
                return f"named {pattern}"
        return ""

    def _is_head(self, place: _Place) -> bool:
        module = place.module
        if not isinstance(module, nn.Linear) or place.in_layers:
            return False
        is_top = "." not in place.name
        return (
            place.last_name in HEAD_NAMES
            or module.out_features in self.vocabularies
            or (is_top and module.out_features in self.labels)
        )

    def _is_router(self, place: _Place, param: nn.Parameter) -> bool:
        name, cls = place.last_name, type(place.module).__name__
        if cls.endswith("Router") or name == "router":
            return True
        # a gate of one row weighs the shared expert
        is_gate = name.endswith("gate") or cls.endswith("Gate")
        return is_gate and (param.shape[0] in self.experts or param.shape[0] == 1)

    def form(self, place: _Place, param: nn.Parameter) -> MatrixForm | None:
        """How the matrices of a weight are stored; None for a weight that no rule knows."""
        module, attribute, cls = place.module, place.attribute, type(place.module).__name__
        if isinstance(module, nn.MultiheadAttention):
            if attribute == "in_proj_weight":
                return MatrixForm(rows=(param.shape[0] // 3,) * 3)
            return MatrixForm() if re.fullmatch("[qkv]_proj_weight", attribute) else None
        if isinstance(module, nn.Linear):
            return MatrixForm() if attribute == "weight" and param.dim() == 2 else None
        if cls == "Conv1D" and hasattr(module, "nf") and attribute == "weight":
            return _fused_attention(place.last_name, *param.shape)
        if cls.endswith("Experts") and param.dim() == 3:
            return _experts(module, attribute, param)
        return None


def _fused_attention(name: str, in_features: int, out_features: int) -> MatrixForm:
    """The form of GPT-2's Conv1D: `c_attn` fuses query, key and value, or key and value."""
    parts, rest = divmod(out_features, in_features)
    fused = name == "c_attn" and parts in (2, 3) and not rest
    return MatrixForm(transposed=True, rows=(in_features,) * parts if fused else ())


def _experts(module: nn.Module, attribute: str, param: nn.Parameter) -> MatrixForm | None:
    """The form of a stack of experts' matrices; None where its orientation cannot be told.

    Hugging Face says the orientation and whether gate and up follow each other
    (`is_concatenated`) or alternate, as in GPT-OSS. Alternating rows are taken as one matrix.
    Otherwise the side of hidden size is the input, or the output of a matrix named "down".
    """
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:
        transposed = _transposed_by_size(module, attribute, param)
    if transposed is None:
        return None
    out_features = param.shape[2 if transposed else 1]
    fused = "gate_up" in attribute and getattr(module, "is_concatenated", True)
    return MatrixForm(transposed, (out_features // 2,) * 2 if fused else ())


def _transposed_by_size(module: nn.Module, attribute: str, param: nn.Parameter) -> bool | None:
    config = getattr(module, "config", None)
    hidden = None
    for owner in (module, config):
        for name in ("hidden_size", "hidden_dim"):
            hidden = hidden or getattr(owner, name, None)
    first, second = (size == hidden for size in param.shape[1:])
    if first == second:
        return None
    is_down = "down" in attribute
    return second if is_down else first


# --- what people read ----------------------------------------------------------------------------


def doubtful_names(decisions: Mapping[str, Decision]) -> list[str]:
    """The parameters that no rule knows; layers count as one name."""
    return list(dict.fromkeys(layers_as_one(fqn) for fqn, d in decisions.items() if d.doubtful))


def layers_as_one(name: str) -> str:
    """`name` with a star for each number in it, as a pattern of all layers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def doubt(decisions: Mapping[str, Decision]) -> str | None:
    """The warning about parameters that no rule knows; None where there are none."""
    names = doubtful_names(decisions)
    if not names:
        return None
    return (
        f"fully_shard: {len(names)} weight(s) of an unknown kind go to the tail (AdamW): "
        f"{', '.join(names)}; tail_patterns=[...] confirms that by name, and "
        "matrix_patterns=[...] makes them matrices"
    )


def summary(plan: Plan, units: Sequence[str], decisions: Mapping[str, Decision]) -> str:
    """What was chosen, in a few lines. Layers count as one name.

    `decisions` are empty for a plan that the caller gave.
    """
    names = Counter(layers_as_one(unit) for unit in units)
    listed = [f"{count} x {name}" if count > 1 else name for name, count in names.items()]
    lines = [
        f"MatrixFSDP over {plan.world_size} rank(s)",
        f"  {len(units)} units: {', '.join(listed)}",
    ]
    for role, title in (("matrix", "matrices"), ("tail", "tail (AdamW)")):
        shards = [shard for shard in plan.shards if shard.role == role]
        elements = sum(shard.numel for shard in shards)
        lines.append(f"  {title}: {len(shards)} parameters, {elements:,} elements")
    reasons = Counter(decision.reason for decision in decisions.values() if decision.role == "tail")
    if reasons:
        lines[-1] += f" ({', '.join(f'{count} {reason}' for reason, count in reasons.items())})"
    if doubtful := doubtful_names(decisions):
        lines.append(f"  of an unknown kind, in the tail: {', '.join(doubtful)}")
    return "\n".join(lines)
