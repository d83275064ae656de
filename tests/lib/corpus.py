"""Small corpora, a tokenizer of bytes, and configs for tests of the data path."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matrixtitan.config import (
    Config,
    DataConfig,
    DataSource,
    DebugConfig,
    TrainingConfig,
    ValidationConfig,
)
from matrixtitan.data.tokenizer import Tokenizer, load_tokenizer, write_ranks


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Token n is byte n; BOS is 256 and EOS 257."""
    path = folder / "bytes.tiktoken"
    write_ranks(path, [bytes([byte]) for byte in range(256)])
    return load_tokenizer(str(path), pattern="llama3")


def texts(count: int, seed: int = 0) -> list[str]:
    """Different short texts of 20 to 60 letters."""
    draw = random.Random(seed)
    return [
        f"{number}:" + "".join(draw.choices("abcdefgh ", k=draw.randint(20, 60)))
        for number in range(count)
    ]


def write_jsonl(path: Path, documents: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in documents))
    return path


def data_config(
    cache: Path,
    *sources: DataSource,
    global_batch_size: int = 12,
    local_batch_size: int = 1,
    seq_len: int = 16,
    validation: ValidationConfig | None = None,
    seed: int = 0,
    **data: Any,
) -> Config:
    data = {"num_workers": 0, "validation_fraction": 0.1} | data
    return Config(
        data=DataConfig(sources=sources, cache_dir=str(cache), **data),
        training=TrainingConfig(
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            seq_len=seq_len,
            steps=10,
        ),
        validation=validation or ValidationConfig(enable=True, steps=2),
        debug=DebugConfig(seed=seed),
    )
