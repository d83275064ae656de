"""Which files a source of text has, and the records in them.

Owns finding files (a file, folder or glob; the interpreter's own library), reading them plain or gzipped, and the
checks of a record: a bad one is a `BadRecord` that names its file and line. An empty text is not bad: `text_of` gives
"", and callers leave it out and count it. Never tokenises. Next file: `prepare.py`.
"""

from __future__ import annotations

import fnmatch
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from matrixtitan.log import get_logger

logger = get_logger()

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
    begins: bool = True
    ends: bool = True


def find_files(kind: str, path: str | Sequence[str], key: str = "data.sources") -> list[Path]:
    """Files of a source in a fixed order. ValueError names `key` where nothing is there.

    `path` is a file, a folder (all files below it that are not hidden; of JSONL and shards those with a fitting
    suffix) or a glob, or several of them. "python_stdlib" takes none. Symbolic links are followed. A file that is
    reached in several ways counts once, under its shortest name; a link that leads nowhere is an error.
    """
    try:
        if kind == "python_stdlib":
            return _stdlib_files(key)
        patterns = [path] if isinstance(path, str) else list(path)
        if not any(patterns):
            raise ValueError(
                f'{key}: a source of type "{kind}" needs a path (a file, folder or glob)'
            )
        found: list[Path] = []
        for pattern in patterns:
            matched = _match(kind, pattern)
            if not matched:
                raise ValueError(f"{key}: no {kind} file at {pattern!r} (looked from {Path.cwd()})")
            found += matched
        return _once_each(found)
    except OSError as error:  # a folder that cannot be listed, a dangling link
        raise ValueError(f"{key}: {error}") from None


def _match(kind: str, pattern: str) -> list[Path]:
    path = Path(pattern).expanduser().absolute()
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = _SUFFIXES.get(kind, ("",))
        below = _files_in(_folders([path], _enter_visible))
        return [file for file in below if file.name.endswith(suffixes)]
    return [file for file in _expand(path) if file.is_file()]


def _once_each(files: Iterable[Path]) -> list[Path]:
    """The files in order, without those that are another one's by a longer name."""
    real_folders: dict[Path, str] = {}  # resolving each file would look at every folder above it
    by_real_path: dict[str, Path] = {}
    for file in sorted(set(files), key=lambda file: (len(file.parts), file)):
        if file.is_symlink():
            real = os.path.realpath(file)
        else:
            if file.parent not in real_folders:
                real_folders[file.parent] = os.path.realpath(file.parent)
            real = os.path.join(real_folders[file.parent], file.name)
        by_real_path.setdefault(real, file)
    return sorted(by_real_path.values())


def _expand(pattern: Path) -> list[Path]:
    """What an absolute pattern matches, as for glob.glob with `recursive`.

    Not glob.glob, which passes over dangling links and unreadable folders, and goes round a loop of links until the
    system stops it.
    """
    parts = pattern.parts[1:] + (("*",) if pattern.name == "**" else ())
    found = [Path(pattern.anchor)]
    for part in parts:
        folders = [path for path in found if path.is_dir()]
        if part == "**":
            found = list(_folders(folders, _enter_visible))
        elif glob.has_magic(part):
            found = [
                Path(entry.path)
                for folder in folders
                for entry in _entries(folder)
                if fnmatch.fnmatch(entry.name, part)
                and (part.startswith(".") or not entry.name.startswith("."))
                and _leads_somewhere(entry)
            ]
        else:
            found = [folder / part for folder in folders if os.path.lexists(folder / part)]
            for path in found:
                if not path.exists():
                    raise _dangling(path)
    return found


def _folders(roots: Iterable[Path], enter: Callable[[os.DirEntry[str]], bool]) -> Iterator[Path]:
    """The roots and the folders below that `enter` allows, each real folder once, by its shortest name."""
    entered: set[str] = set()
    level = list(roots)
    while level:
        below: list[Path] = []
        for folder in level:
            real = os.path.realpath(folder)
            if real in entered:  # by another link, or a loop of them
                continue
            entered.add(real)
            yield folder
            below += [Path(entry.path) for entry in _entries(folder) if enter(entry)]
        level = below


def _enter_visible(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and _leads_somewhere(entry) and entry.is_dir()


def _files_in(folders: Iterable[Path]) -> Iterator[Path]:
    """The files that are not hidden."""
    for folder in folders:
        for entry in _entries(folder):
            if not entry.name.startswith(".") and entry.is_file():
                yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _leads_somewhere(entry: os.DirEntry[str]) -> bool:
    """True; FileNotFoundError for a dangling link, behind which a folder may be missing."""
    if entry.is_symlink() and not os.path.exists(entry.path):
        raise _dangling(entry.path)
    return True


def _dangling(link: str | Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"{link} is a symbolic link to {os.readlink(link)!r}, which leads nowhere: mend the link or delete it"
    )


def stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files(key: str) -> list[Path]:
    """The library's modules without its tests (not every system installs them) and what was generated on this
    machine."""
    folder = stdlib_folder()
    below = _folders([folder], lambda entry: entry.name not in _STDLIB_LEFT_OUT and entry.is_dir())
    files = [
        file
        for file in _files_in(below)
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")
        and file.stat().st_size > 0
    ]
    if not files:
        raise ValueError(
            f"{key}: this interpreter has no library source in {folder}; give a source of another type"
        )
    return _once_each(files)


def read_records(kind: str, files: Sequence[Path]) -> Iterator[Record | BadRecord]:
    """Records of the files in order, as bytes; a file that cannot be read yields a BadRecord, an empty one an empty
    record.

    Where one breaks off within a document, an empty piece ends that.
    """
    for path in files:
        ends = True
        try:
            with _open(path) as file:
                for record in _lines(path, file) if kind == "jsonl" else _pieces(path, file):
                    ends = record.ends
                    yield record
        except (OSError, EOFError, zlib.error) as error:  # gzip's errors are among them
            yield BadRecord(f"{path}: cannot be read: {error}")
            if not ends:
                yield Record(path, 0, b"", begins=False)


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path, file: BinaryIO) -> Iterator[Record]:
    """One document a line; blank lines count for the line numbers only, unless there is nothing else."""
    blank = True
    for number, raw in enumerate(file, start=1):
        if raw.strip():
            yield Record(path, number, raw)
            blank = False
    if blank:
        yield Record(path, 1, b"")


def _pieces(path: Path, file: BinaryIO) -> Iterator[Record]:
    """One document a file."""
    raw = file.read(_PIECE_BYTES)
    line, begins = 1, True
    while raw or begins:
        raw += file.readline() if len(raw) == _PIECE_BYTES else b""
        following = file.read(_PIECE_BYTES)
        yield Record(path, line, raw, begins, ends=not following)
        line, begins, raw = line + raw.count(b"\n"), False, following


def text_of(kind: str, record: Record, field: str) -> str:
    """The text of a record, "" where there is none. BadRecord if it is not UTF-8, not JSON, or has no text in
    `field`."""
    try:
        text = record.raw.decode("utf-8-sig" if record.begins else "utf-8")
    except UnicodeDecodeError as error:
        line = record.line + record.raw[: error.start].count(b"\n")
        raise BadRecord(
            f"{record.path} line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8"
        ) from None
    if kind != "jsonl":
        return text
    if not text.strip():  # a file of blank lines, or of a byte-order mark alone
        return ""
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
    if not isinstance(value[field], str):
        raise BadRecord(
            f"{where}: field {field!r} is not a text (it is a {type(value[field]).__name__})"
        )
    return value[field]


def read_texts(
    kind: str,
    files: Sequence[Path],
    field: str = "text",
    key: str = "data.sources",
    *,
    quiet: bool = False,
) -> Iterator[str]:
    """The texts of a source, one by one, without empty ones, whose number is logged unless `quiet`.

    The first bad record is raised, except that the library's are left out. ValueError, naming `key`, if no text is
    left.
    """
    num_texts = num_empty = 0
    for record in read_records(kind, files):
        try:
            if isinstance(record, BadRecord):
                raise record
            text = text_of(kind, record, field)
        except BadRecord:
            if kind != "python_stdlib":
                raise
            continue
        if text:
            num_texts += 1
            yield text
        else:
            num_empty += record.begins and record.ends
    if not num_texts:
        raise ValueError(no_text(key, files, num_empty, 0))
    if num_empty and not quiet:
        logger.info("%s: %d empty texts left out", key, num_empty)


def no_text(key: str, files: Sequence[Path], num_empty: int, num_skipped: int) -> str:
    """What to say of a source in which nothing is left."""
    skipped = f" and {num_skipped} bad records, which were skipped" if num_skipped else ""
    return (
        f"{key}: no text to learn from in {len(files)} files (the first: {files[0]}): they have {num_empty} empty "
        f"texts{skipped}"
    )
