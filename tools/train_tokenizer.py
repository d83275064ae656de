"""Train a byte-level BPE tokenizer and write it as a tiktoken rank file that gives the same tokens.

    python tools/train_tokenizer.py --output my.tiktoken --vocab-size 32768 --type text --path 'corpus/**/*.txt'

Without --path it trains on the running interpreter's standard library; so the tokenizer that ships was made. The file
holds vocab_size - 2 ranks: `load_tokenizer` puts BOS and EOS after them. It knows the file by its mark,
`my.tiktoken.meta.json`: keep the two together. Needs the `tools` extra (`tokenizers`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
from matrixtitan.log import get_logger, init_logger
from tools.hf_tokenizer import characters_of_bytes
from tools.in_place import in_place

logger = get_logger()

PATTERN = "llama3"
NUM_SPECIAL_TOKENS = 2
LEAST_VOCAB, MOST_VOCAB = 256 + NUM_SPECIAL_TOKENS, 10**7  # for more the trainer runs out of memory


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-pair training; the result has vocab_size - 2 tokens, ids in the order of the merges."""
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

    ValueError for a bad argument or input, an output that exists, or a difference.
    """
    if not LEAST_VOCAB <= args.vocab_size <= MOST_VOCAB:
        raise ValueError(
            f"--vocab-size {args.vocab_size} is not from {LEAST_VOCAB} (the 256 bytes, BOS and EOS) to {MOST_VOCAB}"
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
                f"--vocab-size {args.vocab_size}: the text gives {len(tokens)} tokens and {NUM_SPECIAL_TOKENS} are "
                "added; give more text or choose that size"
            )
        write_ranks(unchecked, tokens)
        written = load_tokenizer(str(unchecked), PATTERN)
        if written.n_words != args.vocab_size:
            raise ValueError(
                f"--vocab-size {args.vocab_size} would be taken for {written.family.name}, which is known by "
                "its size; choose another"
            )
        count = characters = 0
        again = read_texts(kind, files, args.field, "--path", quiet=True)
        for text in map(valid_unicode, again):
            ids = written.encode(text)
            if ids != [i for piece in cut_long_runs(text) for i in trained.encode(piece).ids]:
                raise ValueError(
                    f"{args.output}: tiktoken and the trainer split a text in different tokens: {text[:200]!r}"
                )
            count, characters = count + len(ids), characters + len(text)
        write_mark(mark, PATTERN, written.fingerprint)
    print(
        f"{args.output}: {args.vocab_size} tokens, {characters / count:.2f} characters a token on its text"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="rank file to make")
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="with BOS and EOS (default 4096)"
    )
    parser.add_argument("--type", choices=("text", "jsonl"), default="text")
    parser.add_argument(
        "--path", nargs="+", help="files, folders or globs (default: the standard library)"
    )
    parser.add_argument(
        "--field", default="text", help="the field of a JSONL record (default text)"
    )
    try:
        train_file(parser.parse_args(argv))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    init_logger()
    main()
