"""From a command line to a Config: the file, `--section.key value` overrides, strict types.

Owns parsing. A mistake raises ConfigError, which names the key and where it stands. Next:
`checks.py`, for the checks that types cannot make.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli

from matrixtitan.config.checks import require_valid
from matrixtitan.config.errors import ConfigError
from matrixtitan.config.schema import Config, OptimizerConfig
from matrixtitan.config.show import help_text, to_toml, type_name
from matrixtitan.options import Options, did_you_mean, hints_of, not_one_of
from matrixtitan.rules import RULES

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "train_configs"


class Where(NamedTuple):
    """Where a key's value came from."""

    file: str
    overridden: frozenset[str] = frozenset()

    def of(self, name: str) -> str:
        key = name.partition("[")[0]
        return "command line" if key in self.overridden else self.file


def load_config(argv: Sequence[str]) -> Config:
    """The config of a command line: `--config NAME`, then `--section.key value` overrides.

    `--help` and `--print-config` print and raise SystemExit(0). Raises ConfigError.
    """
    arguments = split_arguments(argv)
    if any(name == "help" for name, _ in arguments):
        print(help_text())
        raise SystemExit(0)
    names = [value for name, value in arguments if name == "config"]
    path = find_config(names[-1] if names else "debug")
    tables = _read_toml(path)
    overrides = [pair for pair in arguments if pair[0] not in ("config", "print-config")]
    for name, text in overrides:
        _override(tables, name, text)
    where = Where(str(path), frozenset(name for name, _ in overrides))
    config = _config_from(tables, where)
    require_valid(config, f"{path} with the command line's overrides" if overrides else str(path))
    if any(name == "print-config" for name, _ in arguments):
        print(to_toml(config), end="")
        raise SystemExit(0)
    return config


def find_config(name: str) -> Path:
    """`name` as a path, then under train_configs/, each with or without `.toml`."""
    candidates = [
        folder / f"{name}{suffix}" for folder in (Path(), CONFIG_FOLDER) for suffix in ("", ".toml")
    ]
    for path in candidates:
        if path.is_file():
            return path
    shipped = sorted(path.stem for path in CONFIG_FOLDER.glob("*.toml"))
    near = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"--config {name}: no such file, and train_configs/ has {', '.join(shipped)}{hint}"
    )


def config_from_dict(data: Mapping[str, Any], where: str) -> Config:
    """A Config from nested tables; `where` names their file in errors. Does not `require_valid`."""
    return _config_from(data, Where(where))


def upgraded(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a config that an older release saved, with the names and keys of today.

    In older releases the rules' options stood in [optimizer] itself. Keys that no longer exist are
    left out, and keys that are new have their defaults.
    """
    tables = {section: dict(table) for section, table in saved.items()}
    optimizer = tables.get("optimizer", {})
    rule = RULES.get(optimizer.get("name", ""))
    if rule is not None:
        table = optimizer.get(rule.name, optimizer)
        optimizer[rule.name] = _keys_of(rule(), table)
    default = Config()
    return {
        section: _keys_of(getattr(default, section), tables.get(section, {}))
        | ({rule.name: optimizer[rule.name]} if section == "optimizer" and rule else {})
        for section in hints_of(Config)
    }


def _keys_of(default: Options, table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `default`: the values that `table` has, and the defaults of the others."""
    return {
        key: table.get(key, getattr(default, key))
        for key in hints_of(type(default))
        if key != "rule"
    }


def key_hints() -> dict[str, Any]:
    """The type of every key that can be set, by "section.key", in order."""
    found: dict[str, Any] = {}
    for section, cls in hints_of(Config).items():
        found |= {f"{section}.{k}": hint for k, hint in hints_of(cls).items() if k != "rule"}
    for name, rule in RULES.items():
        found |= {f"optimizer.{name}.{k}": hint for k, hint in hints_of(rule).items()}
    return found


def all_keys() -> list[str]:
    """Every key that can be set: "section.key", and "optimizer.RULE.key"."""
    return list(key_hints())


# --- tables to dataclasses ------------------------------------------------------------------------


def _config_from(tables: Mapping[str, Any], where: Where) -> Config:
    sections = hints_of(Config)
    built: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in sections:
            hint = did_you_mean(section, sections)
            raise ConfigError(f"{where.of(section)}: unknown section [{section}]{hint}")
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{where.of(section)}: {section} is {table!r}; it must be a table: write its keys "
                f"below a line [{section}]"
            )
        if section == "optimizer":
            built[section] = _optimizer_from(table, where)
        else:
            built[section] = _from_table(sections[section], table, section, where)
    return Config(**built)


def _optimizer_from(table: Mapping[str, Any], where: Where) -> OptimizerConfig:
    """[optimizer], with its rule from the rule's own table, [optimizer.NAME]."""
    own = {key: value for key, value in table.items() if key not in RULES}
    rules = {key: value for key, value in table.items() if key in RULES}
    config: OptimizerConfig = _from_table(OptimizerConfig, own, "optimizer", where)
    for name, options in rules.items():
        at = f"optimizer.{name}"
        if name != config.name:
            keys = [f"{at}.{key}" for key in options] or [f"[{at}]"]
            raise ConfigError(
                f"{where.of(keys[0])}: {', '.join(keys)} has no effect: optimizer.name is "
                f"{config.name}. Remove it, or set optimizer.name to {name}"
            )
        config = dataclasses.replace(config, rule=_from_table(RULES[name], options, at, where))
    return config


def _from_table(cls: type[Any], table: Mapping[str, Any], prefix: str, where: Where) -> Any:
    hints = {name: hint for name, hint in hints_of(cls).items() if name != "rule"}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where.of(prefix)}: {prefix} must be a table, not {table!r}")
    for name in table:
        if name not in hints:
            full = f"{prefix}.{name}"
            raise ConfigError(f"{where.of(full)}: unknown key {full}{_instead(full, list(hints))}")
    values = {
        name: _convert(value, hints[name], f"{prefix}.{name}", where)
        for name, value in table.items()
    }
    try:
        return cls(**values)
    except ValueError as error:
        full = f"{prefix}.{str(error).partition(' ')[0]}"
        raise ConfigError(f"{where.of(full)}: {prefix}.{error}") from None


def _convert(value: Any, hint: Any, name: str, where: Where) -> Any:
    """`value` as the type `hint`, strictly: an int may be a float, and one value a list of one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if option is type(None):
                if value is None:
                    return None
                continue
            try:
                return _convert(value, option, name, where)
            except ConfigError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{where.of(name)}: {not_one_of(name, value, arguments)}")
    elif origin is tuple:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        return tuple(
            _convert(item, arguments[0], f"{name}[{i}]", where) for i, item in enumerate(items)
        )
    elif dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return _from_table(typing.cast(type[Any], hint), value, name, where)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                # a whole number that no float can hold
                number = math.nan
            if not math.isnan(number):
                return number
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where.of(name)}: {name} must be {type_name(hint)}, not {value!r}")


# --- the command line -----------------------------------------------------------------------------


def split_arguments(argv: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) pairs of `--name value` and `--name=value`; flags have an empty value."""
    pairs: list[tuple[str, str]] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument in ("--help", "-h", "--print-config"):
            pairs.append(("help" if argument == "-h" else argument[2:], ""))
            continue
        if not argument.startswith("--"):
            raise ConfigError(
                f"{argument!r} belongs to no option; write --section.key value, and quote values "
                "with spaces"
            )
        name, equals, value = argument[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} lacks a value")
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs


def _override(tables: dict[str, Any], name: str, text: str) -> None:
    """Set the key `name` of the nested tables to the value that `text` means."""
    hints = key_hints()
    if name not in hints:
        section = name.partition(".")[0]
        cls = hints_of(Config).get(section)
        keys = [k for k in hints_of(cls) if k != "rule"] if cls else []
        raise ConfigError(f"command line: unknown key --{name}{_instead(name, keys)}")
    *path, key = name.split(".")
    table = tables
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            # a mistake of the file, which the conversion reports
            return
    table[key] = _parse_value(text, hints[name], name)


def _parse_value(text: str, hint: Any, name: str) -> Any:
    """An override's text as a TOML value, or as it is where the key takes nothing but text."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    if hint is str or typing.get_origin(hint) is Literal:
        return text
    try:
        return tomli.loads(f"value = {text}")["value"]
    except ValueError:
        # a TOMLDecodeError, or a number with more digits than Python reads
        if text.startswith(("[", "{")):
            raise ConfigError(
                f"command line: --{name} {text!r} is no TOML value; lists are ['a', 'b']"
            ) from None
        return {"True": True, "False": False}.get(text, text)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        # a TOMLDecodeError, a UnicodeDecodeError, or a number with more digits than Python reads
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


# --- what an unknown name may have meant ----------------------------------------------------------


def _instead(name: str, keys: Sequence[str]) -> str:
    """What to write instead of an unknown key of a table that has `keys`."""
    key = name.rpartition(".")[2]
    moved = [f"optimizer.{rule}.{key}" for rule, cls in RULES.items() if key in hints_of(cls)]
    if name == f"optimizer.{key}" and moved:
        return f"; it is {' or '.join(moved)}"
    near = difflib.get_close_matches(name, all_keys(), n=1, cutoff=0.85)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(keys)}" if keys else ""
