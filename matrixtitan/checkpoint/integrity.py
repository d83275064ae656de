"""SHA-256 checksums of every stored tensor chunk and every side file, in `checksums.json`.

Each rank hashes the chunks that it wrote. Whoever reads a chunk hashes the bytes before anything
interprets them. So a reader at any world size verifies exactly what it uses. `checksums.json`
contains a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from matrixtitan.checkpoint.errors import CorruptCheckpointError

CHECKSUMS_FILE = "checksums.json"

Chunk = tuple[str, int, int]
"""(file name, offset in bytes, length in bytes)."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of_range(file: BinaryIO, offset: int, length: int) -> str:
    """SHA-256 of `length` bytes from `offset`, or of fewer if the file ends before."""
    sha = hashlib.sha256()
    file.seek(offset)
    while length > 0:
        # 4 MiB: large enough for full speed, small enough for any host
        block = file.read(min(length, 1 << 22))
        if not block:
            break
        sha.update(block)
        length -= len(block)
    return sha.hexdigest()


@dataclass
class Checksums:
    """The checksums of the tensor chunks in data files, and of the small files beside them."""

    chunks: dict[Chunk, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        by_file: dict[str, list[list[Any]]] = {}
        for (name, offset, length), value in sorted(self.chunks.items()):
            by_file.setdefault(name, []).append([offset, length, value])
        body = {"chunks": by_file, "files": self.files}
        return json.dumps({"sha256_of_the_rest": _body_digest(body), **body}, indent=1).encode()

    @staticmethod
    def read(folder: Path) -> Checksums:
        """The checksums of a complete checkpoint. CorruptCheckpointError if the file is damaged or
        gone.
        """
        path = folder / CHECKSUMS_FILE
        try:
            content = json.loads(path.read_bytes())
            body = {"chunks": content["chunks"], "files": content["files"]}
            if content["sha256_of_the_rest"] != _body_digest(body):
                raise CorruptCheckpointError(f"{path} is damaged: it does not match its own digest")
            chunks = {
                (name, offset, length): value
                for name, items in body["chunks"].items()
                for offset, length, value in items
            }
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{path} is missing, so nothing of this checkpoint can be verified"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{path} is damaged: {error}") from error
        return Checksums(chunks, dict(body["files"]))

    def read_file(self, folder: Path, name: str) -> bytes:
        """The verified content of one small file."""
        path = folder / name
        if name not in self.files:
            raise CorruptCheckpointError(f"{path} has no checksum in {CHECKSUMS_FILE}")
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing") from None
        if digest(data) != self.files[name]:
            raise CorruptCheckpointError(
                f"{path} is damaged: its content does not match its checksum"
            )
        return data

    def verify_chunk(self, folder: Path, chunk: Chunk, data: bytes) -> None:
        """CorruptCheckpointError unless `data` is what was written as `chunk`."""
        name, offset, length = chunk
        where = f"{folder / name}: bytes {offset} to {offset + length}"
        expected = self.chunks.get(chunk)
        if expected is None:
            raise CorruptCheckpointError(f"{where} have no checksum in {CHECKSUMS_FILE}")
        if len(data) < length:
            raise CorruptCheckpointError(f"{where} are cut short: the file ends before")
        if digest(data) != expected:
            raise CorruptCheckpointError(f"{where} are damaged: they do not match their checksum")

    def damaged(self, folder: Path) -> Iterator[str]:
        """A line for each file or chunk that was changed or lost. Reads the whole checkpoint."""
        for name in self.files:
            try:
                self.read_file(folder, name)
            except CorruptCheckpointError as error:
                yield str(error)
        for chunk, expected in self.chunks.items():
            name, offset, length = chunk
            try:
                with (folder / name).open("rb") as file:
                    matches = digest_of_range(file, offset, length) == expected
            except FileNotFoundError:
                matches = False
            if not matches:
                yield f"{folder / name}: bytes {offset} to {offset + length} are damaged or missing"


def _body_digest(body: dict[str, Any]) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())
