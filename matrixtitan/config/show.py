"""A config as text: TOML that loads to the same config, nested tables, and `--help`."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from matrixtitan.config.schema import Config
from matrixtitan.options import LARGEST, Options, hints_of
from matrixtitan.rules import RULES


def tables(config: Config) -> dict[str, dict[str, Any]]:
    """{"section": {"key": value}}; the options of the rule stand in a table of its name."""
    found = dataclasses.asdict(config)
    found["optimizer"][config.optimizer.name] = found["optimizer"].pop("rule")
    return found


def to_toml(config: Config) -> str:
    """The whole config as TOML. A key that is none becomes a comment: TOML has no null."""
    lines = []
    for section in dataclasses.fields(config):
        table = getattr(config, section.name)
        lines += [f"[{section.name}]", *_toml_lines(table), ""]
        if section.name == "optimizer":
            lines += [f"[optimizer.{table.name}]", *_toml_lines(table.rule), ""]
    return "\n".join(lines)


def _toml_lines(table: Options) -> Iterator[str]:
    for option in dataclasses.fields(table):
        value = getattr(table, option.name)
        if value is None:
            yield f"# {option.name} is none"
        elif option.name != "rule":
            yield f"{option.name} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """A key's value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML escapes the same characters as JSON, and DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if dataclasses.is_dataclass(value):
        keys = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        inner = (f"{name} = {toml_value(item)}" for name, item in keys if item is not None)
        return "{" + ", ".join(inner) + "}"
    return repr(value)


def help_text() -> str:
    """`--help`: every key with its type, default, range, meaning, and what it needs to act."""
    lines = [
        "usage: ./run_train.sh [--config NAME] [--section.key value ...] [--print-config]",
        "",
        "--config NAME    a TOML file, or one of train_configs/ (default: debug)",
        "--print-config   print the resolved config and stop",
        "",
    ]
    for header, cls in option_tables().items():
        # a key of a table in a list is no option of its own: the list is overridden as a whole
        prefix = "" if header.startswith("[[") else f"--{header.strip('[]')}."
        lines += [header, *_help_lines(prefix, cls), ""]
    return "\n".join(lines)


def option_tables() -> dict[str, type[Options]]:
    """Every table that a file may have, by its TOML header."""
    found: dict[str, type[Options]] = {}
    for section, cls in hints_of(Config).items():
        found[f"[{section}]"] = cls
        for key, hint in hints_of(cls).items():
            (item, *_) = typing.get_args(hint) or (None,)
            if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(item):
                found[f"[[{section}.{key}]]"] = typing.cast(type[Options], item)
        if section == "optimizer":
            found |= {f"[optimizer.{name}]": rule for name, rule in RULES.items()}
    return found


def _help_lines(prefix: str, cls: type[Options]) -> Iterator[str]:
    for option in dataclasses.fields(cls):
        if "doc" not in option.metadata:
            continue
        kind = type_name(hints_of(cls)[option.name])
        default = "none" if option.default is None else toml_value(option.default)
        bounds = f", {option.metadata['range']}" if option.metadata["range"] else ""
        yield f"  {prefix}{option.name}  ({kind}{bounds}, default {default})"
        yield f"      {option.metadata['doc']}"
        if option.metadata["needs"]:
            yield f"      acts with {option.metadata['needs']}"


def type_name(hint: Any) -> str:
    """A type in the words of `--help`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(option) for option in arguments)
    if origin is Literal:
        return "|".join(str(option) or '""' for option in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if hint is type(None):
        return "none"
    if dataclasses.is_dataclass(hint):
        return "table"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[hint]


def markdown() -> str:
    """docs/configuration.md: every table and key."""
    lines = [
        "# Configuration",
        "",
        "Every key of a config file. This page is generated from the code by",
        "`python -m matrixtitan.config > docs/configuration.md`.",
        "",
        "A run reads one TOML file. `--config` takes a path, or a name in `train_configs/`. Any "
        "key can",
        "be overridden on the command line: `--section.key value`. Text keys take the text as it "
        "is;",
        "other values are TOML. A list of tables is overridden as a whole:",
        "",
        "```",
        './run_train.sh --config debug --optimizer.tail_betas "[0.9, 0.98]" \\',
        """    --data.sources '[{type = "jsonl", path = "corpus/*.jsonl.gz"}]'""",
        "```",
        "",
        "- An unknown key, a wrong type, a value out of range, or an impossible combination is "
        "refused",
        "  before any process starts.",
        "- A key that was changed and has no effect is refused too. The column *acts with* says "
        "which",
        "  other key it needs. The keys of a section that has an `enable` key may be set while it "
        "is",
        "  false.",
        f"- A whole number without an upper limit of its own is at most {LARGEST}.",
        "- Of a key that is given twice on the command line, the last value counts.",
        "- `--print-config` prints the config that a command line results in. `--help` prints "
        "this page",
        "  as text.",
        "- The resolved config is saved as `config.toml` in the run's folder.",
        "",
    ]
    for header, cls in option_tables().items():
        lines += [f"## {header}", "", "| key | type | default | meaning | acts with |"]
        lines += ["|---|---|---|---|---|", *_markdown_rows(cls), ""]
    return "\n".join(lines)


def _markdown_rows(cls: type[Options]) -> Iterator[str]:
    for option in dataclasses.fields(cls):
        if "doc" not in option.metadata:
            continue
        bounds = f", {option.metadata['range']}" if option.metadata["range"] else ""
        kind = f"{type_name(hints_of(cls)[option.name])}{bounds}".replace("|", " or ")
        default = "none" if option.default is None else f"`{toml_value(option.default)}`"
        doc, needs = option.metadata["doc"], option.metadata["needs"] or ""
        yield f"| `{option.name}` | {kind} | {default} | {doc} | {needs} |"
