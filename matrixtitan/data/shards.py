"""The token shard: a file with a header of 256 bytes, then token ids in uint16 or uint32.

Owns the format, its checks, and the view of several shards as one stream of tokens. Shards are
memory-mapped, so opening is instant and processes share the pages. Does not decide which token goes
where. Next: `order.py`.

The header: magic, version, bytes per token, split (0 training, 1 held out), number of tokens,
number of documents, the tokenizer's fingerprint, and the SHA-256 of the tokens. All numbers and
token ids are little-endian.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import itertools
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

HEADER_BYTES = 256
_MAGIC = b"MTTOKENS"
_VERSION = 1
_HEADER = struct.Struct("<8sIIIIQQ32s32s")
_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class ShardHeader(NamedTuple):
    dtype: np.dtype
    split: Split
    num_tokens: int
    num_documents: int
    # the tokenizer's fingerprint, 64 hex digits
    tokenizer: str
    content: str  # SHA-256 of the tokens, 64 hex digits

    def to_bytes(self) -> bytes:
        packed = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.dtype.itemsize,
            SPLITS.index(self.split),
            0,
            self.num_tokens,
            self.num_documents,
            bytes.fromhex(self.tokenizer),
            bytes.fromhex(self.content),
        )
        return packed.ljust(HEADER_BYTES, b"\0")


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest dtype that holds every id below `vocab_size`."""
    return _DTYPES[2] if vocab_size <= 1 << 16 else _DTYPES[4]


def read_header(path: Path) -> ShardHeader:
    """The header of a shard. ValueError, naming the file, if it is not a whole shard."""
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
        raise ValueError(f"{path} is not a token shard; tools/prepare_data.py makes them from text")
    _, version, width, split, _, tokens, documents, tokenizer, content = _HEADER.unpack_from(raw)
    if version != _VERSION or width not in _DTYPES or split >= len(SPLITS):
        raise ValueError(
            f"{path} is a token shard of format version {version}, this program reads version "
            f"{_VERSION}; make it again with tools/prepare_data.py"
        )
    expected = HEADER_BYTES + tokens * width
    if path.stat().st_size != expected:
        raise ValueError(
            f"{path} is cut short or damaged: its header promises {expected} bytes, it has "
            f"{path.stat().st_size}; copy or make it again"
        )
    return ShardHeader(
        _DTYPES[width], SPLITS[split], tokens, documents, tokenizer.hex(), content.hex()
    )


class ShardWriter:
    """Appends the tokens of one split to `folder/<split>-00000.bin`, -00001.bin and so on.

    A file has at most `max_tokens` tokens. Its header is written last and makes it complete.
    Without any token no file is made.
    """

    def __init__(
        self, folder: Path, split: Split, tokenizer: str, dtype: np.dtype, max_tokens: int
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"a shard needs room for at least one token, not {max_tokens}")
        self.num_tokens = 0
        self.num_documents = 0
        self._folder, self._split, self._tokenizer = folder, split, tokenizer
        self._dtype, self._max_tokens = dtype, max_tokens
        self._file_number = 0
        self._tokens_in_file = self._documents_in_file = 0
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def append(self, tokens: np.ndarray, num_documents: int) -> None:
        """Append `tokens` (T,): documents or pieces. `num_documents` documents begin here."""
        self.num_tokens += len(tokens)
        self.num_documents += num_documents
        while len(tokens):
            file = self._file or self._open()
            room = self._max_tokens - self._tokens_in_file
            self._write(file, tokens[:room], num_documents)
            tokens, num_documents = tokens[room:], 0
            if self._tokens_in_file == self._max_tokens:
                self.close()

    def close(self) -> None:
        """Complete the current file, on the disk."""
        if self._file is None:
            return
        header = ShardHeader(
            self._dtype,
            self._split,
            num_tokens=self._tokens_in_file,
            num_documents=self._documents_in_file,
            tokenizer=self._tokenizer,
            content=self._digest.hexdigest(),
        )
        self._file.seek(0)
        self._file.write(header.to_bytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def _open(self) -> BinaryIO:
        self._file = (self._folder / f"{self._split}-{self._file_number:05d}.bin").open("wb")
        self._file.write(b"\0" * HEADER_BYTES)
        self._file_number += 1
        self._tokens_in_file = self._documents_in_file = 0
        self._digest = hashlib.sha256()
        return self._file

    def _write(self, file: BinaryIO, tokens: np.ndarray, num_documents: int) -> None:
        raw = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        file.write(raw)
        self._digest.update(raw)
        self._tokens_in_file += len(tokens)
        self._documents_in_file += num_documents


class TokenStream:
    """The tokens of several shards, one shard after the other, as one sequence.

    ValueError if another tokenizer than that of `fingerprint` made a shard.
    """

    def __init__(self, paths: Sequence[Path], fingerprint: str) -> None:
        headers = [read_header(path) for path in paths]
        for path, header in zip(paths, headers, strict=True):
            if header.tokenizer != fingerprint:
                raise ValueError(
                    f"{path} was made by another tokenizer (fingerprint {header.tokenizer[:12]}) "
                    f"than the run's ({fingerprint[:12]}): set model.tokenizer_path to that one, "
                    "or make the shards again with tools/prepare_data.py"
                )
        self.content = hashlib.sha256(
            "".join(header.content for header in headers).encode()
        ).hexdigest()
        self.num_documents = sum(header.num_documents for header in headers)
        self._arguments = (list(paths), fingerprint)
        self._shards = [
            _map_tokens(path, header)
            for path, header in zip(paths, headers, strict=True)
            if header.num_tokens
        ]
        self._starts = [0, *itertools.accumulate(len(shard) for shard in self._shards)]

    def __reduce__(self) -> tuple[type[TokenStream], tuple[list[Path], str]]:
        """A loader's worker opens the files again: a pickled map would be a copy of all tokens."""
        return TokenStream, self._arguments

    def __len__(self) -> int:
        return self._starts[-1]

    def num_windows(self, seq_len: int) -> int:
        """Number of windows of seq_len + 1 tokens.

        Each window begins with the last token of the window before. What is left at the end is not
        read.
        """
        return max(0, (len(self) - 1) // seq_len)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as (count,) int64."""
        out = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            position = start + filled
            number = bisect.bisect_right(self._starts, position) - 1
            piece = self._shards[number][position - self._starts[number] :][: count - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
        return out


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


def _map_tokens(path: Path, header: ShardHeader) -> np.ndarray:
    """The tokens of a shard as a read-only memory map, which ends when nothing refers to it.

    Python's mmap, and so np.memmap, keeps a file descriptor for each map (from 3.13 on it need
    not). A corpus of more shards than `ulimit -n` could then not be opened. The system call itself
    needs the descriptor only while it runs.
    """
    num_bytes = HEADER_BYTES + header.num_tokens * header.dtype.itemsize
    with path.open("rb") as file:
        address = _LIBC.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"cannot be mapped into memory: {os.strerror(number)} (limits: ulimit -v, and "
            "vm.max_map_count for the number of shards; fewer, larger shards need fewer maps)",
            str(path),
        )
    mapped = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(mapped, _LIBC.munmap, address, num_bytes)
    read_only = memoryview(mapped).toreadonly()
    return np.frombuffer(read_only, header.dtype, header.num_tokens, HEADER_BYTES)
