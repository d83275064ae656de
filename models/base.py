"""The protocol between a model family and the rest of the program.

A family is a class: its class attributes describe the family, and an instance is one model. The
trainer, `parallelize`, the planner's tools and the converters use what is declared here and nothing
else of a model, so a new family needs no change outside `models/`. Families are registered in
`models/__init__.py`. Next: `llama.py`, a family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn


class Flavor(Protocol):
    """A size of a family: a frozen dataclass with all that its model's shape depends on.

    Only the vocabulary and the sequence length come from elsewhere. Fields are numbers, texts,
    booleans or dataclasses of them, so that a checkpoint can hold the flavor as JSON.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def tie_embeddings(self) -> bool:
        """Whether embedding and output head are one matrix, unless model.tie_embeddings is set."""


class HuggingFace(Protocol):
    """A family's weights and config.json in Hugging Face's format; a module can implement it.

    Functions are pure and take one whole tensor at a time, so that a converter streams. They only
    rename and reorder: a round trip is exact to the bit in any dtype. `flavor` is the family's own.
    """

    MODEL_TYPE: str
    """`model_type` in config.json."""

    def hf_name(self, fqn: str) -> str:
        """Hugging Face's name of parameter `fqn`."""

    def fqn_of(self, name: str) -> str:
        """Our name of Hugging Face's tensor `name`; ValueError if the model has no such tensor."""

    def is_redundant(self, name: str) -> bool:
        """Whether tensor `name` follows from config.json, so that it is skipped."""

    def to_hf(self, fqn: str, tensor: Tensor, flavor: Any) -> tuple[str, Tensor]:
        """Hugging Face's name and contiguous tensor for our whole parameter `fqn`."""

    def from_hf(self, name: str, tensor: Tensor, flavor: Any) -> tuple[str, Tensor]:
        """Our name and contiguous tensor for Hugging Face's whole tensor `name`: undoes `to_hf`."""

    def to_hf_config(
        self, flavor: Any, *, vocab_size: int, max_seq_len: int, tie_embeddings: bool
    ) -> dict[str, Any]:
        """The contents of config.json."""

    def from_hf_config(self, config: Mapping[str, Any]) -> Flavor:
        """The flavor that config.json describes; ValueError if the family cannot represent it."""


class LanguageModel(nn.Module, ABC):
    """A causal language model: token ids to logits, or to the summed loss.

    Usually built under `torch.device("meta")`; each rank then calls `init_rows` for the rows that
    it owns, and `init_buffers` once. A subclass's constructor calls this class's first, sets the
    attributes below and draws no values. Parameters are 1D, 2D matrices of their own, or 3D stacks
    of matrices (E, R, C): fused matrices would be orthogonalised as one.
    """

    flavors: ClassVar[Mapping[str, Any]]
    """Name, as `model.flavor` takes it -> `Flavor`."""
    published_vocab_size: ClassVar[int | None] = None
    """Entries of the tokenizer that the family was published with. `tools/plan.py` assumes it where
    the config's tokenizer file is missing."""

    tok_embeddings: nn.Embedding
    """The token embedding, (vocab_size, C)."""
    layers: nn.ModuleDict
    """The blocks in forward order, by "0", "1", ... Activation checkpointing and torch.compile
    replace their `forward`. Blocks that do not depend on their index share one compiled graph."""
    tail_patterns: tuple[str, ...]
    """Full names, with * and ?, of the 2D and 3D parameters that AdamW steps: the embedding and the
    output head. All other 2D parameters, and each slice of a 3D one, go to the matrix optimizer."""
    head_dim: int = 0
    """Rows of a query, key or value projection that make one head, for rules that step a head at a
    time. 0: the family has no heads, and such rules are refused."""
    head_patterns: tuple[str, ...] | None = None
    """Full names, with * and ?, of the projections whose rows are heads. Such a rule is refused for
    any other parameter. None: the family does not say, and `head_dim` must divide the rows."""
    num_parameters: int
    """Parameters of the whole model, a tied embedding counted once. It is counted in the
    constructor: sharding later leaves each rank with its own rows only."""

    def __init__(
        self,
        flavor: Any,
        *,
        vocab_size: int,
        max_seq_len: int,
        tie_embeddings: bool | None = None,
    ) -> None:
        """`tie_embeddings` None keeps the flavor's own choice."""
        super().__init__()
        if vocab_size < 1 or max_seq_len < 1:
            raise ValueError(
                f"vocab_size and max_seq_len must be positive, got {vocab_size} and {max_seq_len}"
            )
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.tie_embeddings = flavor.tie_embeddings if tie_embeddings is None else tie_embeddings

    @abstractmethod
    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V); with labels, the SUM of the token losses.

        labels (B, T) int64, where -100 counts as nothing; the sum is a float32 scalar, and the
        trainer divides it by the tokens of the global batch. T is at most `max_seq_len`.
        """

    @abstractmethod
    def unit_names(self) -> list[list[str]]:
        """The modules of each unit, in forward order: gathered together, freed together.

        Every parameter is in exactly one unit. A parameter that two modules use, such as a tied
        embedding, needs both modules in one unit.
        """

    @abstractmethod
    def init_rows(
        self, fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor, seed: int
    ) -> None:
        """Fill `out` in place with rows [start, start + len(out)) of `fqn`'s initial value.

        A function of (seed, fqn, row) alone, so that every plan and every number of ranks starts
        from the same weights (`initialization.fill_rows`). ValueError for an unknown `fqn`.
        """

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """Matrix FLOPs of forward and backward per token, for MFU; recomputation is not counted.

        Only products that the token takes part in count: an expert's parameters count by the share
        of tokens that are routed to it.
        """

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute, on `device`, every buffer that is in no state dict. Default: there is none."""

    def init_weights(self, seed: int) -> None:
        """Fill every parameter and buffer in place: for a model that is whole on one device."""
        with torch.no_grad():
            for fqn, param in self.named_parameters():
                self.init_rows(fqn, tuple(param.shape), 0, param, seed)
        self.init_buffers(self.tok_embeddings.weight.device)

    @classmethod
    @abstractmethod
    def flavor_from(cls, fields: Mapping[str, Any]) -> Flavor:
        """The flavor that `dataclasses.asdict` turned into `fields`, read back from JSON."""

    @classmethod
    def huggingface(cls) -> HuggingFace | None:
        """The family in Hugging Face's format, imported when asked for; None: not supported."""
        return None
