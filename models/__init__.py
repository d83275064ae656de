"""The model families that can be trained, by the name that `model.name` takes.

A new family is a subclass of `base.LanguageModel` and a line in FAMILIES; the config, the trainer,
the planner's tools and the converters read what the class declares. The other modules here import
torch and nothing else of the project. This file imports torch only when a family is asked for,
because the config reads FAMILIES in processes without torch. Next: `base.py`.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.base import HuggingFace, LanguageModel

FAMILIES: dict[str, str] = {"llama3": "models.llama:Llama"}
"""Name -> "module:Class" of the family's `LanguageModel`, imported when it is asked for."""


def family(name: str) -> type[LanguageModel]:
    """The class of the family `name`.

    Raises ValueError for a name that is not in FAMILIES, RuntimeError for an entry that is wrong.
    """
    if name not in FAMILIES:
        raise ValueError(f"model.name {name!r} is unknown{_suggest(name, FAMILIES)}")
    from models.base import LanguageModel

    entry = FAMILIES[name]
    try:
        found = pkgutil.resolve_name(entry)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"model family {name!r}: {entry} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, LanguageModel)):
        raise RuntimeError(f"model family {name!r}: {entry} is no models.base.LanguageModel")
    return found


def build_model(
    name: str,
    flavor: str,
    *,
    vocab_size: int,
    max_seq_len: int,
    tie_embeddings: bool | None = None,
) -> LanguageModel:
    """The model of family `name` (key model.name) and size `flavor` (model.flavor), without values.

    Call it under `torch.device("meta")` to allocate nothing. `tie_embeddings` None keeps the
    flavor's own choice. Raises ValueError for a name or flavor that does not exist.
    """
    chosen = family(name)
    if flavor not in chosen.flavors:
        hint = _suggest(flavor, chosen.flavors)
        raise ValueError(f"model.flavor {flavor!r} of {name} is unknown{hint}")
    return chosen(
        chosen.flavors[flavor],
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        tie_embeddings=tie_embeddings,
    )


def huggingface_of(name: str) -> HuggingFace:
    """How the family `name` is written in Hugging Face's format; ValueError if it cannot be."""
    hf = family(name).huggingface()
    if hf is None:
        raise ValueError(
            f"models of the family {name} cannot be converted from or to Hugging Face's format: "
            f"its class, {FAMILIES[name]}, defines no huggingface()"
        )
    return hf


def family_of_model_type(model_type: object) -> str:
    """The family whose Hugging Face models have this `model_type` in config.json.

    Raises ValueError, which lists the known types, if there is none.
    """
    known: dict[str, str] = {}
    for name in FAMILIES:
        hf = family(name).huggingface()
        if hf is not None:
            known.setdefault(hf.MODEL_TYPE, name)
    if not isinstance(model_type, str) or model_type not in known:
        raise ValueError(
            f"config.json: model_type is {model_type!r}; only {' or '.join(map(repr, known))} can "
            "be converted"
        )
    return known[model_type]


def _suggest(wrong: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.4)
    hint = f": did you mean {near[0]!r}?" if near else ":"
    return f"{hint} known are {', '.join(known)}"
