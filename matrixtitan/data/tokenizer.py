"""Text to token ids and back, by tiktoken, from a rank file.

A rank file has a base64 token and its rank in each line: the format of Llama 3's `tokenizer.model`
and of GPT's `.tiktoken` files. It contains nothing but tokens, so how it splits text into words,
and its special tokens, must come from elsewhere. A known family is recognised by its number of
ranks. A file of `tools/train_tokenizer.py` has a mark beside it. For any other file the user names
the pattern.

Owns all of this, and the small tokenizer that ships with the package. Downloads nothing. Next:
`sources.py`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken

from matrixtitan.config import missing_tokenizer, tokenizer_file
from matrixtitan.options import not_one_of

EMBEDDED_PATH = Path(__file__).parent / "assets" / "python_4096.tiktoken"

LLAMA3_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_O200K_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_O200K_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_WORD}*{_O200K_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_WORD}+{_O200K_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

PATTERNS = {
    "llama3": LLAMA3_PATTERN,
    "gpt2": _GPT2_PATTERN,
    "o200k": _O200K_PATTERN,
    # Llama 3's with digits one by one: https://huggingface.co/Qwen/Qwen2-0.5B (tokenizer.json)
    "qwen2": LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
}
"""What `model.tokenizer_pattern` may name. A user cannot give a regular expression of their own:
tiktoken silently drops text that an expression does not match.
"""

_TRAINER = "tools/train_tokenizer.py"

# The regex engine of tiktoken overflows its stack on a very long run of one character class.
_LONGEST_RUN = 25_000
_LONG_RUN = re.compile(rf"\S{{{_LONGEST_RUN}}}|\s{{{_LONGEST_RUN}}}")


@dataclass(frozen=True)
class Family:
    """How the rank files of one origin split text, and their special tokens ({text: id})."""

    name: str
    pattern: str
    special_tokens: dict[str, int]
    bos: str
    eos: str


def _llama3_special_tokens(first_id: int) -> dict[str, int]:
    """Llama 3's 256 special tokens: ten have names, in these places; the others are reserved."""
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(251)]
    names = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *reserved[:4],
        "<|start_header_id|>",
        "<|end_header_id|>",
    ]
    names += [reserved[4], "<|eot_id|>", *reserved[5:]]
    return {name: first_id + offset for offset, name in enumerate(names)}


def _family_of(num_ranks: int) -> Family | None:
    """The published family that has this number of ranks, or None."""
    gpt = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
    if num_ranks == 128_000:
        return Family(
            "llama3",
            LLAMA3_PATTERN,
            _llama3_special_tokens(num_ranks),
            "<|begin_of_text|>",
            "<|end_of_text|>",
        )
    # GPT-2 and r50k; p50k, whose ranks leave out the id of the special token
    if num_ranks in (50_256, 50_280):
        return Family("gpt2", _GPT2_PATTERN, {"<|endoftext|>": 50_256}, **gpt)
    if num_ranks == 100_256:
        special = {"<|endoftext|>": 100_257, "<|fim_prefix|>": 100_258, "<|fim_middle|>": 100_259}
        special |= {"<|fim_suffix|>": 100_260, "<|endofprompt|>": 100_276}
        return Family("cl100k", LLAMA3_PATTERN, special, **gpt)
    if num_ranks == 199_998:
        return Family(
            "o200k", _O200K_PATTERN, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}, **gpt
        )
    return None


def _other_family(num_ranks: int, pattern: str) -> Family:
    """The family of a rank file that is of no published one: BOS and EOS follow the last rank."""
    special = {"<|begin_of_text|>": num_ranks, "<|end_of_text|>": num_ranks + 1}
    return Family("small", PATTERNS[pattern], special, "<|begin_of_text|>", "<|end_of_text|>")


class Tokenizer:
    """Byte-level BPE over `ranks` ({token bytes: id}; the id is its merge priority too).

    Special tokens in a text are encoded as ordinary text, so no document can forge an end of text.
    `n_words` (= `vocab_size`) is the smallest vocabulary that a model needs.
    """

    def __init__(self, ranks: dict[bytes, int], family: Family, path: str = "") -> None:
        self.path = path
        self.family = family
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            family.name,
            pat_str=family.pattern,
            mergeable_ranks=ranks,
            special_tokens=family.special_tokens,
        )
        self.bos_id = family.special_tokens[family.bos]
        self.eos_id = family.special_tokens[family.eos]
        self.n_words = self._encoding.n_vocab

    @property
    def vocab_size(self) -> int:
        return self.n_words

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits, computed from all that decides how a text is encoded."""
        digest = hashlib.sha256(
            repr((self.family.pattern, sorted(self.family.special_tokens.items()))).encode()
        )
        digest.update(repr((self.bos_id, self.eos_id)).encode())
        for token, rank in sorted(self._ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d " % (rank, len(token)) + token)
        return digest.hexdigest()

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Token ids of `text`, with BOS before and EOS after it where asked for."""
        return [self.bos_id] * bos + self.encode_array(text).tolist() + [self.eos_id] * eos

    def encode_array(self, text: str) -> np.ndarray:
        """Token ids of `text` as (T,) uint32. Mostly runs without the interpreter lock."""
        pieces = [self._encode_piece(piece) for piece in cut_long_runs(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _encode_piece(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encoding.encode_to_numpy(valid_unicode(text), disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Bytes that are not UTF-8 (half of a character) become U+FFFD."""
        return self._encoding.decode(list(ids))


def valid_unicode(text: str) -> str:
    """`text` with U+FFFD in place of lone surrogates, which JSON can contain."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_long_runs(text: str) -> Iterator[str]:
    """`text` in the pieces that are encoded one by one.

    All pieces but the last end with a run of the longest length that is allowed.
    """
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    if start < len(text) or start == 0:
        yield text[start:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """{token: rank} of a rank file. ValueError, naming file and line, if it is not a rank file."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            value = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"tokenizer file {path}, line {number}: expected a base64 token and its rank. A "
                "rank file is wanted: Llama 3's original/tokenizer.model or a .tiktoken file, "
                "not a tokenizer.json or a SentencePiece model"
            ) from None
        if token in ranks:
            raise ValueError(
                f"tokenizer file {path}, line {number}: the token {token!r} came before, on rank "
                f"{ranks[token]}"
            )
        ranks[token] = value
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"tokenizer file {path} is not complete: it has no token for {len(missing)} of the "
            "256 bytes"
        )
    if len(set(ranks.values())) != len(ranks):
        raise ValueError(f"tokenizer file {path}: two tokens have the same rank")
    return ranks


def write_ranks(path: Path, tokens: Sequence[bytes]) -> None:
    """Write a rank file; the rank of a token is its place in `tokens`."""
    path.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    )


def mark_file(path: Path) -> Path:
    """Where a rank file's mark is: beside it, since rank files have room for tokens only."""
    return path.with_name(f"{path.name}.meta.json")


def write_mark(path: Path, pattern: str, fingerprint: str) -> None:
    """Write a mark to `path`: a rank file of ours splits text by `pattern`.

    `fingerprint` says which rank file.
    """
    mark = {"made_by": _TRAINER, "pattern": pattern, "fingerprint": fingerprint}
    path.write_text(json.dumps(mark, indent=1) + "\n")


def _read_mark(path: Path) -> tuple[str, str]:
    """(pattern, fingerprint) from a mark that `write_mark` wrote; ValueError for anything else."""
    try:
        mark = json.loads(path.read_bytes())
        made_by, pattern = str(mark["made_by"]), str(mark["pattern"])
        fingerprint = str(mark["fingerprint"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not what {_TRAINER} writes beside its files ({error!r}): put the right "
            "one there, or delete it and name the pattern with `--model.tokenizer_pattern NAME`"
        ) from error
    if made_by != _TRAINER or pattern not in PATTERNS:
        raise ValueError(
            f"{path} says made_by {made_by!r} and pattern {pattern!r}; known are {_TRAINER!r} and "
            f"{', '.join(PATTERNS)}"
        )
    return pattern, fingerprint


def load_tokenizer(path: str = "", pattern: str = "") -> Tokenizer:
    """The tokenizer of a rank file, or of a folder that contains `tokenizer.model`.

    The empty path is the tokenizer that ships here (4,096 tokens). `pattern` is a key of
    `PATTERNS`, which names how text is split. The empty pattern is that of the file's family, or of
    its mark. ValueError, with what to do, for a missing file, a file that is not a rank file, and a
    file whose pattern is unknown.
    """
    if pattern and pattern not in PATTERNS:
        raise ValueError(not_one_of("model.tokenizer_pattern", pattern, PATTERNS))
    for problem in missing_tokenizer(path):
        raise ValueError(problem)
    file = tokenizer_file(path) if path else EMBEDDED_PATH
    ranks = read_ranks(file)
    family = _family_of(len(ranks))
    expected_fingerprint = None
    if family is not None and pattern:
        family = replace(family, pattern=PATTERNS[pattern])
    elif family is None:
        if not pattern:
            pattern, expected_fingerprint = _marked_pattern(file, len(ranks))
        family = _other_family(len(ranks), pattern)
    special_ids = set(family.special_tokens.values())
    if special_ids & set(ranks.values()):
        raise ValueError(
            f"tokenizer file {file}: its ranks have gaps or take the special tokens' ids "
            f"{min(special_ids)}.."
        )
    tokenizer = Tokenizer(ranks, family, str(file))
    if expected_fingerprint not in (None, tokenizer.fingerprint):
        raise ValueError(
            f"{mark_file(file)} is the mark of another rank file than {file}: put the right one "
            "there, or delete it and name the pattern with `--model.tokenizer_pattern NAME`"
        )
    return tokenizer


def _marked_pattern(file: Path, num_ranks: int) -> tuple[str, str]:
    """(pattern, fingerprint) from the mark of `file`; ValueError if it has no mark."""
    mark = mark_file(file)
    if not mark.is_file():
        raise ValueError(
            f"tokenizer file {file}: nothing says how it splits text. No known family has "
            f"{num_ranks} tokens, and {mark.name}, which {_TRAINER} writes beside its files, is "
            "not there. Name the pattern that the file was trained with, "
            "`--model.tokenizer_pattern NAME` (of a tool: `--tokenizer-pattern NAME`): "
            f"{', '.join(PATTERNS)}. For a file of an older {_TRAINER} it is llama3"
        )
    return _read_mark(mark)


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """ValueError if `tokenizer` has ids for which a model of `vocab_size` has no embedding."""
    if tokenizer.n_words > vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.path} has {tokenizer.n_words} tokens, the model's "
            f"vocabulary {vocab_size}. Give the model a vocabulary of at least "
            f"{tokenizer.n_words}, or choose a smaller tokenizer with model.tokenizer_path"
        )
