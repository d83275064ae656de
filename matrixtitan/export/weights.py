"""A model and its weights, wherever they are stored: what the formats translate from and to.

Owns the model's description in a run's config and the check that stored tensors are exactly those
of the model. It reads and writes no file; next: `checkpoint.py`, `huggingface.py`, `torch_file.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import family
from models.base import Flavor, LanguageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoredModel:
    """What is needed to build a model. `tokenizer_path` is None where no tokenizer is recorded."""

    flavor: Flavor
    vocab_size: int
    max_seq_len: int
    tie_embeddings: bool
    tokenizer_path: str | None = None
    tokenizer_pattern: str = ""
    special_ids: Mapping[str, Any] | None = None
    """Hugging Face's bos_token_id and eos_token_id."""
    family: str = "llama3"

    def build(self) -> LanguageModel:
        """The model without values, on the current default device."""
        return family(self.family)(
            self.flavor,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            tie_embeddings=self.tie_embeddings,
        )

    def flavor_name(self) -> str | None:
        """The value of model.flavor for this shape. model.tie_embeddings is a key of its own."""
        for name, flavor in family(self.family).flavors.items():
            tied = dataclasses.replace(flavor, tie_embeddings=self.flavor.tie_embeddings)
            if tied == self.flavor:
                return name
        return None

    def to_config(self) -> dict[str, Any]:
        """The two sections of a run's config that describe the model, with its whole shape."""
        model = {
            "name": self.family,
            "flavor": self.flavor_name(),
            "shape": dataclasses.asdict(self.flavor),
            "tie_embeddings": self.tie_embeddings,
            "tokenizer_path": self.tokenizer_path,
            "tokenizer_pattern": self.tokenizer_pattern,
            "special_ids": self.special_ids,
        }
        return {"model": model, "training": {"seq_len": self.max_seq_len}}


@dataclass(frozen=True)
class Weights:
    """A model's weights: `read(fqn)` gives one whole tensor, on the CPU."""

    model: StoredModel
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        with torch.device("meta"):
            return {name: param.shape for name, param in self.model.build().named_parameters()}

    def cast(self, dtype: torch.dtype) -> Weights:
        dtypes = dict.fromkeys(self.dtypes, dtype)
        return Weights(self.model, dtypes, lambda fqn: self.read(fqn).to(dtype))


def model_of(config: Any, shapes: Mapping[str, torch.Size], where: Path) -> StoredModel:
    """The model of a run's config, or of what `StoredModel.to_config` gave."""
    if "tok_embeddings.weight" not in shapes:
        raise ValueError(f"{where} holds no language model: there is no tok_embeddings.weight")
    try:
        section = config["model"]
        flavor, tied = _flavor_of(section), section.get("tie_embeddings")
        return StoredModel(
            flavor,
            vocab_size=shapes["tok_embeddings.weight"][0],
            max_seq_len=config["training"]["seq_len"],
            tie_embeddings=flavor.tie_embeddings if tied is None else tied,
            tokenizer_path=section["tokenizer_path"],
            tokenizer_pattern=section.get("tokenizer_pattern", ""),
            special_ids=section.get("special_ids"),
            family=section["name"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: its config names no model that models/ knows ({error}); add it there"
        ) from error


def _flavor_of(section: Mapping[str, Any]) -> Flavor:
    known, shape = family(section["name"]), section.get("shape")
    return known.flavors[section["flavor"]] if shape is None else known.flavor_from(shape)


def checked(weights: Weights, stored: Mapping[str, torch.Size], where: Path) -> Weights:
    """`weights`, if the stored tensors are exactly those of its model; ValueError otherwise."""
    expected = weights.shapes
    for problem, names in {
        "lacks": expected.keys() - stored.keys(),
        "holds what its model has no place for:": stored.keys() - expected.keys(),
    }.items():
        if names:
            raise ValueError(f"{where} {problem} {min(names)} ({len(names)} tensors)")
    for fqn, shape in expected.items():
        if stored[fqn] != shape:
            raise ValueError(
                f"{where}: {fqn} is {tuple(stored[fqn])}, but its config says {tuple(shape)}"
            )
        if weights.dtypes[fqn] not in DTYPES.values():
            raise ValueError(
                f"{where}: {fqn} is stored in a type other than {', '.join(DTYPES)}, which is not "
                "read; if the weights are quantised, convert the ones before quantisation"
            )
    return weights
