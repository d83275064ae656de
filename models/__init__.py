"""The models that can be trained, by name and flavor. Imports torch only; read `llama.py` next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from models.llama import LLAMA3_FLAVORS, Llama, LlamaFlavor

MODELS: dict[str, dict[str, LlamaFlavor]] = {"llama3": LLAMA3_FLAVORS}


def build_model(
    name: str,
    flavor: str,
    *,
    vocab_size: int,
    max_seq_len: int,
    tie_embeddings: bool | None = None,
) -> Llama:
    """The model `name` (key model.name) in size `flavor` (model.flavor), its values not yet set.

    Call it under `torch.device("meta")` to allocate nothing. `tie_embeddings` None keeps the
    flavor's own choice. Raises ValueError for a name or flavor that does not exist.
    """
    if name not in MODELS:
        raise ValueError(f"model.name {name!r} is unknown{_suggest(name, MODELS)}")
    flavors = MODELS[name]
    if flavor not in flavors:
        raise ValueError(f"model.flavor {flavor!r} of {name} is unknown{_suggest(flavor, flavors)}")
    shape = flavors[flavor]
    return Llama(
        shape,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        tie_embeddings=shape.tie_embeddings if tie_embeddings is None else tie_embeddings,
    )


def _suggest(wrong: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.4)
    hint = f": did you mean {near[0]!r}?" if near else ":"
    return f"{hint} known are {', '.join(known)}"
