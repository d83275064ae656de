"""The types of data sources: which files a source has, and the records in them.

To read another format, such as Parquet, add one entry to `SOURCE_TYPES` at the end of this file: a
function that yields the records of an open file, and one that turns a record into text. The config,
`--help` and the tools take the types from there.

Owns finding files (a file, a folder, a glob, or the interpreter's own library), reading them plain
or gzipped, and the checks of a record. A bad record is a `BadRecord`, which names its file and
line. An empty text is not bad: `text_of` returns "", and callers leave it out and count it. Never
tokenises, and imports no torch. Next: `prepare.py`.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from matrixtitan.log import get_logger

logger = get_logger()

_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_PIECE_BYTES = 4 << 20
"""A longer text file is read and tokenised in pieces of about this size, each cut after a line. The
file stays one document.
"""


class BadRecord(ValueError):
    """A record that cannot be used; the message names the file and line and what is wrong."""


class Record(NamedTuple):
    """The bytes of a document, or of a piece of one: the first if `begins`, the last if `ends`."""

    path: Path
    line: int  # where the record begins, from 1
    raw: bytes
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class SourceType:
    """How sources of one type find their files and read text from them."""

    doc: str
    """What `--help` says of it."""
    records: Callable[[Path, BinaryIO, str], Iterator[Record]] | None
    """(path, open file, `field` of the source) -> its records. None: the files are token shards."""
    text: Callable[[Record, str], str] = lambda record, field: _decoded(record)
    """(record, `field` of the source) -> the record's text. Raises BadRecord."""
    suffixes: tuple[str, ...] = ("",)
    """The names of a folder's files that count end with one of these."""
    own_files: Callable[[str], list[Path]] | None = None
    """For a type that takes no path: key -> the files."""
    takes_field: bool = False
    """Whether the source's `field` means something."""
    skips_bad_records: bool = False
    """Whether bad records are left out whatever data.on_bad_record says."""


def path_problems(kind: str, path: Sequence[str]) -> Iterator[str]:
    """What is wrong with the path of a source of type `kind`; each sentence begins with its key."""
    if SOURCE_TYPES[kind].own_files is None and not any(path):
        yield f"path is empty; a source of type {kind} needs a path (files, folders or globs)"
    if SOURCE_TYPES[kind].own_files is not None and path:
        yield f"path is set, but a source of type {kind} takes no path"


def find_files(kind: str, path: str | Sequence[str], key: str = "data.sources") -> list[Path]:
    """The files of a source, in a fixed order. ValueError, naming `key`, if there are none.

    `path` is a file, a folder or a glob, or several of these. Of a folder all files below it count
    that are not hidden and have one of the type's suffixes. Symbolic links are followed, and a link
    that leads nowhere is an error. A file that is reached in several ways counts once, under its
    shortest name.
    """
    patterns = [path] if isinstance(path, str) else list(path)
    for problem in path_problems(kind, patterns):
        raise ValueError(f"{key}: {problem}")
    own_files = SOURCE_TYPES[kind].own_files
    try:
        if own_files is not None:
            return own_files(key)
        found: list[Path] = []
        for pattern in patterns:
            matched = _match(kind, pattern)
            if not matched:
                raise ValueError(f"{key}: no {kind} file at {pattern!r} (looked from {Path.cwd()})")
            found += matched
        return _once_each(found)
    except OSError as error:  # a folder that cannot be listed, a dangling or circular link
        raise ValueError(f"{key}: {error}") from None


def _match(kind: str, pattern: str) -> list[Path]:
    path = Path(pattern).expanduser().absolute()
    if path.is_file():
        return [path]
    if path.is_dir():
        below = _files_in(_folders([path], _enter_visible))
        return [file for file in below if file.name.endswith(SOURCE_TYPES[kind].suffixes)]
    return [file for file in _expand(path) if file.is_file()]


def _once_each(files: Iterable[Path]) -> list[Path]:
    """The files in order; of several names of one file the shortest."""
    # by folder, since resolving a file looks at every folder above it
    real_folders: dict[Path, str] = {}
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
    """What an absolute pattern matches, as in glob.glob with `recursive`.

    glob.glob itself passes over dangling links and unreadable folders, and follows a loop of links
    until the system stops it.
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
    """The roots and the folders below them for which `enter` is true.

    Each real folder comes once, by its shortest name.
    """
    entered: set[str] = set()
    level = list(roots)
    while level:
        below: list[Path] = []
        for folder in level:
            real = os.path.realpath(folder)
            if real in entered:  # by another link, or by a loop of links
                continue
            entered.add(real)
            yield folder
            below += [Path(entry.path) for entry in _entries(folder) if enter(entry)]
        level = below


def _enter_visible(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and _leads_somewhere(entry) and entry.is_dir()


def _files_in(folders: Iterable[Path]) -> Iterator[Path]:
    """The files in these folders that are not hidden."""
    for folder in folders:
        for entry in _entries(folder):
            if not entry.name.startswith(".") and _is_file(entry):
                yield Path(entry.path)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Like `entry.is_file`, which is false for a dangling link, but raises for a circular one."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _dangling(entry.path) from None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _leads_somewhere(entry: os.DirEntry[str]) -> bool:
    """True, or FileNotFoundError for a dangling link: a folder may be missing behind it."""
    if entry.is_symlink() and not os.path.exists(entry.path):
        raise _dangling(entry.path)
    return True


def _dangling(link: str | Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"{link} is a symbolic link to {os.readlink(link)!r}, which leads nowhere: mend the link "
        "or delete it"
    )


def stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files(key: str) -> list[Path]:
    """The library's modules, without what differs between machines.

    That is the library's tests, which not every system installs, and generated modules.
    """
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
            f"{key}: this interpreter has no library source in {folder}; give a source of another "
            "type"
        )
    return _once_each(files)


def read_records(kind: str, files: Sequence[Path], field: str) -> Iterator[Record | BadRecord]:
    """The records of the files, in order, as bytes. An empty file yields an empty record.

    A file that cannot be read yields a BadRecord. If reading breaks off within a document, an empty
    last piece ends the document.
    """
    records = SOURCE_TYPES[kind].records
    if records is None:
        raise RuntimeError(f"a source of type {kind} has tokens, not records of text")
    for path in files:
        ends = True
        try:
            with _open(path) as file:
                for record in records(path, file, field):
                    ends = record.ends
                    yield record
        except (OSError, EOFError, zlib.error) as error:  # zlib.error: a damaged .gz
            yield BadRecord(f"{path}: cannot be read: {error}")
            if not ends:
                yield Record(path, 0, b"", begins=False)


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _lines(path: Path, file: BinaryIO, field: str) -> Iterator[Record]:
    """A record for each line that is not blank; an empty record for a file of blank lines alone."""
    blank = True
    for number, raw in enumerate(file, start=1):
        if raw.strip():
            yield Record(path, number, raw)
            blank = False
    if blank:
        yield Record(path, 1, b"")


def _pieces(path: Path, file: BinaryIO, field: str) -> Iterator[Record]:
    """The pieces of one document, which is the whole file."""
    raw = file.read(_PIECE_BYTES)
    line, begins = 1, True
    while raw or begins:
        raw += file.readline() if len(raw) == _PIECE_BYTES else b""
        following = file.read(_PIECE_BYTES)
        yield Record(path, line, raw, begins, ends=not following)
        line, begins, raw = line + raw.count(b"\n"), False, following


def text_of(kind: str, record: Record, field: str) -> str:
    """The text of a record, "" where it is empty. Raises BadRecord if it cannot be read."""
    return SOURCE_TYPES[kind].text(record, field)


def _decoded(record: Record) -> str:
    try:
        text = record.raw.decode("utf-8-sig" if record.begins else "utf-8")
    except UnicodeDecodeError as error:
        line = record.line + record.raw[: error.start].count(b"\n")
        raise BadRecord(
            f"{record.path} line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8"
        ) from None
    return text


def _json_text(record: Record, field: str) -> str:
    text = _decoded(record)
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
    """The texts of a source, one by one, without empty texts. Logs how many are empty unless
    `quiet`.

    Raises the first bad record, unless the type skips bad records. ValueError, naming `key`, if no
    text is left.
    """
    num_texts = num_empty = 0
    for record in read_records(kind, files, field):
        try:
            if isinstance(record, BadRecord):
                raise record
            text = text_of(kind, record, field)
        except BadRecord:
            if not SOURCE_TYPES[kind].skips_bad_records:
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
    """The message for a source without any text."""
    skipped = f" and {num_skipped} bad records, which were skipped" if num_skipped else ""
    return (
        f"{key}: no text to learn from in {len(files)} files (the first: {files[0]}): they have "
        f"{num_empty} empty texts{skipped}"
    )


SOURCE_TYPES = {
    "python_stdlib": SourceType(
        "the Python interpreter's own library, without its tests",
        _pieces,
        own_files=_stdlib_files,
        skips_bad_records=True,
    ),
    "text": SourceType("UTF-8 text files, plain or .gz, with one document per file", _pieces),
    "jsonl": SourceType(
        "files with one JSON object per line, plain or .gz",
        _lines,
        _json_text,
        suffixes=(".jsonl", ".json", ".jsonl.gz", ".json.gz"),
        takes_field=True,
    ),
    "shards": SourceType(
        "token shards that tools/prepare_data.py wrote", records=None, suffixes=(".bin",)
    ),
}
"""What `type` of a source may be."""

TEXT_SOURCES = tuple(name for name, spec in SOURCE_TYPES.items() if spec.records is not None)
"""The types that are tokenised."""
