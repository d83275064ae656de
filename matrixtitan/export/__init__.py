"""A model's weights between our checkpoints, Hugging Face's safetensors and torch.save files.

`open_weights` sees a format from its files and gives `Weights`, which read one tensor at a time.
Each `write_*` writes such weights in one format. No file that is read can run code. Start reading
at `weights.py`; `matrixtitan convert_checkpoint` and `matrixtitan generate` are the users.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from matrixtitan.export.checkpoint import open_matrixtitan, write_matrixtitan
from matrixtitan.export.huggingface import open_huggingface, write_huggingface
from matrixtitan.export.torch_file import open_torch, write_torch
from matrixtitan.export.weights import DTYPES, StoredModel, Weights

__all__ = [
    "DTYPES",
    "StoredModel",
    "Weights",
    "open_weights",
    "write_huggingface",
    "write_matrixtitan",
    "write_torch",
]


def open_weights(
    path: Path,
    step: int | None = None,
    tokenizer: str | None = None,
    tokenizer_pattern: str | None = None,
) -> Weights:
    """The weights at `path`, whatever their format.

    `step` chooses one of our checkpoints in a folder of them. `tokenizer` and `tokenizer_pattern`
    override what is recorded. Raises ValueError or CheckpointError, which names the file and what
    is wrong with it.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    huggingface = any(path.glob("*.safetensors*")) or any(path.glob("pytorch_model*.bin*"))
    if step is not None and (path.is_file() or huggingface):
        raise ValueError(f"--step is for a folder of checkpoints, which {path} is not")
    if path.is_file():
        weights = open_torch(path)
    elif huggingface:
        weights = open_huggingface(path)
    else:
        weights = open_matrixtitan(path, step)
    model = weights.model
    if tokenizer is not None:
        model = dataclasses.replace(model, tokenizer_path=tokenizer, tokenizer_pattern="")
    if tokenizer_pattern is not None:
        if model.tokenizer_path is None:
            raise ValueError(
                f"--tokenizer-pattern {tokenizer_pattern}: of which file? Give it with --tokenizer"
            )
        model = dataclasses.replace(model, tokenizer_pattern=tokenizer_pattern)
    return dataclasses.replace(weights, model=model)
