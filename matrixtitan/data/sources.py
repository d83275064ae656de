"""Which files a source of text has, and the records in them.

Owns finding files (a file, folder or glob; the interpreter's own library), reading them plain or gzipped, and the
checks of a record: a bad one is a `BadRecord` that names its file and line. Never tokenises. Next file: `prepare.py`.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

TEXT_SOURCES = ("python_stdlib", "text", "jsonl")

_SUFFIXES = {"jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"), "shards": (".bin",)}
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_PIECE_BYTES = 4 << 20
"""A longer text file is read and tokenised in pieces of about this size, cut after a line; it stays one document."""


class BadRecord(ValueError):
    """A record that cannot be used; the message names the file and line and what is wrong."""


class Record(NamedTuple):
    """Bytes of one document, or of a piece of it: `begins` and `ends` say whether
    it is its first and last."""

    path: Path
    line: int  # where it begins, from 1
    raw: bytes
    document: int  # index in the source
    begins: bool = True
    ends: bool = True


def find_files(kind: str, path: str | Sequence[str], key: str = "data.sources") -> list[Path]:
    """Files of a source in a fixed order. ValueError names `key` where nothing is there.

    `path` is a file, a folder (all files below it that are not hidden; of JSONL and shards those with a fitting
    suffix) or a glob, or several of them. "python_stdlib" takes none.
    """
    if kind == "python_stdlib":
        return _stdlib_files(key)
    patterns = [path] if isinstance(path, str) else list(path)
    if not any(patterns):
        raise ValueError(f'{key}: a source of type "{kind}" needs a path (a file, folder or glob)')
    found: set[Path] = set()
    for pattern in patterns:
        matched = _match(kind, pattern)
        if not matched:
            raise ValueError(f"{key}: no {kind} file at {pattern!r} (looked from {Path.cwd()})")
        found.update(matched)
    return sorted(found)


def _match(kind: str, pattern: str) -> list[Path]:
    expanded = Path(pattern).expanduser()
    if expanded.is_file():
        return [expanded.absolute()]
    if expanded.is_dir():
        below = sorted(expanded.absolute().rglob("*"))
        return [
            file
            for file in below
            if file.is_file() and _is_wanted(kind, file.relative_to(expanded.absolute()))
        ]
    matches = (Path(name).absolute() for name in glob.glob(str(expanded), recursive=True))
    return [file for file in matches if file.is_file()]


def _is_wanted(kind: str, relative: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and relative.name.endswith(_SUFFIXES.get(kind, ("",)))


def stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files(key: str) -> list[Path]:
    """The library's modules without its tests (not every system installs them) and what was generated on this
    machine."""
    folder = stdlib_folder()
    files: list[Path] = []
    for below, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _STDLIB_LEFT_OUT]  # not walked into
        modules = (
            Path(below, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )
        files += [module for module in modules if module.stat().st_size > 0]
    if not files:
        raise ValueError(
            f"{key}: this interpreter has no library source in {folder}; give a source of another type"
        )
    return sorted(files)


def read_records(kind: str, files: Sequence[Path]) -> Iterator[Record | BadRecord]:
    """Records of the files in order, as bytes; a file that cannot be read, or is empty, yields a BadRecord.

    Where one breaks off within a document, an empty piece ends that.
    """
    document = 0
    for path in files:
        ends = True
        try:
            with _open(path) as file:
                for record in (
                    _lines(path, file, document)
                    if kind == "jsonl"
                    else _pieces(path, file, document)
                ):
                    ends = record.ends
                    document = record.document + ends
                    yield record
        except (OSError, EOFError, zlib.error) as error:  # gzip's errors are among them
            yield BadRecord(f"{path}: cannot be read: {error}")
            if not ends:
                yield Record(path, 0, b"", document, begins=False)
                document += 1
        except BadRecord as error:
            yield error


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path, file: BinaryIO, document: int) -> Iterator[Record]:
    """One document a line; blank lines count for the line numbers only."""
    first = document
    for number, raw in enumerate(file, start=1):
        if raw.strip():
            yield Record(path, number, raw, document)
            document += 1
    if document == first:
        raise BadRecord(f"{path}: the file is empty")


def _pieces(path: Path, file: BinaryIO, document: int) -> Iterator[Record]:
    """One document a file."""
    raw = file.read(_PIECE_BYTES)
    if not raw:
        raise BadRecord(f"{path}: the file is empty")
    line, begins = 1, True
    while raw:
        raw += file.readline() if len(raw) == _PIECE_BYTES else b""
        following = file.read(_PIECE_BYTES)
        yield Record(path, line, raw, document, begins, ends=not following)
        line, begins, raw = line + raw.count(b"\n"), False, following


def text_of(kind: str, record: Record, field: str) -> str:
    """The text of a record. BadRecord if it is not UTF-8, not JSON, or has no text in `field`."""
    try:
        text = record.raw.decode("utf-8-sig" if record.begins else "utf-8")
    except UnicodeDecodeError as error:
        line = record.line + record.raw[: error.start].count(b"\n")
        raise BadRecord(
            f"{record.path} line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8"
        ) from None
    if kind != "jsonl":
        return text
    where = f"{record.path} line {record.line}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict) or field not in value:
        has = (
            f"it has {', '.join(sorted(value))}"
            if isinstance(value, dict)
            else f"it is a {type(value).__name__}"
        )
        raise BadRecord(
            f"{where}: no field {field!r} ({has}); the source's `field` says which to read"
        )
    if not isinstance(value[field], str) or not value[field]:
        raise BadRecord(f"{where}: field {field!r} is not a text or is empty")
    return value[field]


def read_texts(kind: str, files: Sequence[Path], field: str = "text") -> Iterator[str]:
    """The texts of a source, one by one; the first bad record is raised, except
    that the library's are left out."""
    for record in read_records(kind, files):
        try:
            if isinstance(record, BadRecord):
                raise record
            yield text_of(kind, record, field)
        except BadRecord:
            if kind != "python_stdlib":
                raise
