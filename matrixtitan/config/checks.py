"""What cannot work on any machine: the problems of every section, and those between sections.

The checks of one section stand with it in `schema.py`, those of a rule in `matrixtitan/rules/`.
Here are the checks that need two sections or the disk. No torch, no process group.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matrixtitan.config.errors import ConfigError
from matrixtitan.config.schema import Config, OptimizerConfig
from matrixtitan.rules import AdamWRule, MuonRule

EMBEDDED_OVERRIDES = """--model.tokenizer_path "" --data.sources '[{type = "python_stdlib"}]'"""
"""Overrides that run any config on the tokenizer and data that every machine has."""

TOKENIZER_NAME = "tokenizer.model"
"""The name of the rank file in a folder."""


def require_valid(config: Config, where: str) -> None:
    """ConfigError with every problem, each with the prefix `where`, the file's name."""
    problems = list(problems_of(config))
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))


def problems_of(config: Config) -> Iterator[str]:
    """A sentence for each problem; each begins with its "section.key"."""
    for section in dataclasses.fields(config):
        table = getattr(config, section.name)
        found = (
            table.problems_in(config.training.steps)
            if section.name == "lr_scheduler"
            else table.problems()
        )
        yield from (f"{section.name}.{problem}" for problem in found)
    yield from _without_effect(config)
    if config.parallelism.strategy == "fsdp2":
        yield from problems_with_fsdp2(config.optimizer)
    if config.parallelism.dry_run_world_size and config.checkpoint.enable:
        yield (
            "checkpoint.enable: a dry run (parallelism.dry_run_world_size) has no weights worth "
            "saving; set it to false"
        )
    yield from _missing_files(config)


def problems_with_fsdp2(optimizer: OptimizerConfig) -> Iterator[str]:
    """A sentence if the strategy fsdp2, which cuts matrices by rows, cannot run the optimizer.

    It runs Muon, whose updates it exchanges, and AdamW, which is elementwise.
    """
    if not isinstance(optimizer.rule, (MuonRule, AdamWRule)):
        yield (
            f"optimizer.name {optimizer.name} needs whole matrices in every step, and "
            "parallelism.strategy fsdp2 exchanges momenta only: use matrix_fsdp"
        )


def _without_effect(config: Config) -> Iterator[str]:
    """A sentence for each key that was changed and has no effect.

    The keys beside a section's `enable` are exempt: they may be set while it is false.
    """
    values: dict[str, Any] = {
        f"{section}.{key}": value
        for section, table in dataclasses.asdict(config).items()
        for key, value in table.items()
    }
    for section in dataclasses.fields(config):
        table = getattr(config, section.name)
        yield from (f"{section.name}.{text}" for text in table.without_effect(values))
    optimizer = config.optimizer
    prefix = f"optimizer.{optimizer.name}."
    yield from (prefix + text for text in optimizer.rule.without_effect(values))


def tokenizer_file(path: str) -> Path:
    """The rank file that `model.tokenizer_path` means: the file, or tokenizer.model in a folder."""
    file = Path(path).expanduser()
    return file / TOKENIZER_NAME if file.is_dir() else file


def missing_tokenizer(path: str) -> Iterator[str]:
    """A sentence if `model.tokenizer_path` is set and there is no such file."""
    if path and not tokenizer_file(path).is_file():
        yield (
            f"model.tokenizer_path: there is no file {str(tokenizer_file(path))!r}. Put the "
            "model's tiktoken rank file there (for Llama 3, the original/tokenizer.model of its "
            "model repository), or set the key to where it is, or to a folder that contains "
            f"{TOKENIZER_NAME}. {_EMBEDDED}"
        )


_EMBEDDED = f"To run on the embedded tokenizer and data instead, add {EMBEDDED_OVERRIDES}"


def _missing_files(config: Config) -> Iterator[str]:
    yield from missing_tokenizer(config.model.tokenizer_path)
    for index, source in enumerate(config.data.sources):
        for path in source.path:
            file = Path(path).expanduser()
            # the first match is enough; loops of symbolic links can have endlessly many
            if not (file.exists() or any(glob.iglob(str(file), recursive=True))):
                yield (
                    f"data.sources[{index}].path: nothing matches {path!r}. Put your {source.type} "
                    f"files there, or set the key to a file, folder or glob. {_EMBEDDED}"
                )
