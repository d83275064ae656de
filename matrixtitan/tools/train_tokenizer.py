"""Train a byte-level BPE tokenizer and write it as a tiktoken rank file.

    matrixtitan train_tokenizer --output my.tiktoken --vocab-size 32768 --path 'corpus/**/*.txt'

The file is checked to give the trainer's tokens on the whole text. Without --path the text is the
running interpreter's standard library, from which the tokenizer that ships was made. The file holds
vocab_size - 2 ranks, and `load_tokenizer` puts BOS and EOS after them. `load_tokenizer` knows the
file by its mark, `my.tiktoken.meta.json`: keep the two together. Needs the `tools` extra.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matrixtitan.data.sources import find_files, read_texts
from matrixtitan.data.tokenizer import (
    PATTERNS,
    cut_long_runs,
    load_tokenizer,
    mark_file,
    valid_unicode,
    write_mark,
    write_ranks,
)
from matrixtitan.export.tokenizer import characters_of_bytes
from matrixtitan.extras import need
from matrixtitan.in_place import in_place
from matrixtitan.log import get_logger, init_logger
from matrixtitan.tools import make_parser

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = get_logger()

PATTERN = "llama3"
NUM_SPECIAL_TOKENS = 2
LEAST_VOCAB, MOST_VOCAB = 256 + NUM_SPECIAL_TOKENS, 10**7  # with more, out of memory


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-pair training; the result has vocab_size - 2 tokens, ids in the order of the merges."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[PATTERN]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens_in_rank_order(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every token, by id."""
    byte_of = {character: byte for byte, character in enumerate(characters_of_bytes())}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(byte_of[character] for character in token) for token, _ in vocabulary]


def train_file(args: argparse.Namespace) -> None:
    """Train, write, and compare the file's tokens with the trainer's on the whole text.

    Raises ValueError for a wrong argument or input, an existing output, or different tokens.
    """
    if not LEAST_VOCAB <= args.vocab_size <= MOST_VOCAB:
        raise ValueError(
            f"--vocab-size {args.vocab_size} is not from {LEAST_VOCAB} (the 256 bytes, BOS and "
            f"EOS) to {MOST_VOCAB}"
        )
    kind = args.type if args.path else "python_stdlib"
    files = find_files(kind, args.path or "", key="--path")
    logger.info("--path: %s files", f"{len(files):,}")
    with in_place(mark_file(args.output)) as mark, in_place(args.output) as unchecked:
        texts = read_texts(kind, files, args.field, "--path")
        trained = train(map(valid_unicode, texts), args.vocab_size)
        tokens = tokens_in_rank_order(trained)
        if len(tokens) + NUM_SPECIAL_TOKENS != args.vocab_size:
            raise ValueError(
                f"--vocab-size {args.vocab_size}: the text gives {len(tokens)} tokens, and BOS and "
                f"EOS are added; give more text, or --vocab-size {len(tokens) + NUM_SPECIAL_TOKENS}"
            )
        write_ranks(unchecked, tokens)
        written = load_tokenizer(str(unchecked), PATTERN)
        if written.n_words != args.vocab_size:
            raise ValueError(
                f"--vocab-size {args.vocab_size} would be taken for {written.family.name}, which "
                "is known by its size; choose another size"
            )
        count = characters = 0
        again = read_texts(kind, files, args.field, "--path", quiet=True)
        for text in map(valid_unicode, again):
            ids = written.encode(text)
            if ids != [i for piece in cut_long_runs(text) for i in trained.encode(piece).ids]:
                raise ValueError(
                    f"{args.output}: tiktoken and the trainer split a text in different tokens: "
                    f"{text[:200]!r}"
                )
            count, characters = count + len(ids), characters + len(text)
        write_mark(mark, PATTERN, written.fingerprint)
    print(
        f"{args.output}: {args.vocab_size} tokens, {characters / count:.2f} characters per token "
        "on its text"
    )


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--output", type=Path, required=True, help="new rank file")
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="including BOS and EOS (default 4096)"
    )
    parser.add_argument("--type", choices=("text", "jsonl"), default="text")
    parser.add_argument(
        "--path", nargs="+", help="files, folders or globs (default: the standard library)"
    )
    parser.add_argument(
        "--field", default="text", help="the field of a JSONL record (default text)"
    )
    options = parser.parse_args(argv)
    init_logger()
    try:
        need("tokenizers")
        train_file(options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    return 0
