"""Tokenise text into token shards ahead of a run, on all cores.

    matrixtitan prepare_data --type jsonl --path 'corpus/*.jsonl.gz' --field text \\
        --tokenizer tokenizer.model --output shards/corpus

A run reads the shards with `--data.sources '[{type="shards", path="shards/corpus"}]'` and the same
tokenizer. The output folder appears when all shards are in it. A killed call leaves a `.writing`
folder. The next call with the same output stops and asks to delete it, since another call may still
be writing there. For a very large corpus, make one call per part, on any number of machines, and
give all the folders as the source's path.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matrixtitan.config import DataConfig
from matrixtitan.data.prepare import SHARD_TOKENS, TextSource, tokenize
from matrixtitan.data.sources import TEXT_SOURCES
from matrixtitan.data.tokenizer import PATTERNS, load_tokenizer
from matrixtitan.in_place import in_place
from matrixtitan.log import init_logger
from matrixtitan.tools import make_parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--output", type=Path, required=True, help="new folder")
    parser.add_argument("--type", choices=TEXT_SOURCES, default="text")
    parser.add_argument("--path", nargs="*", default=[], help="files, folders or globs")
    parser.add_argument(
        "--field", default="text", help="the field of a JSONL record (default text)"
    )
    parser.add_argument("--tokenizer", default="", help="rank file (default: the one that ships)")
    parser.add_argument(
        "--tokenizer-pattern",
        choices=tuple(PATTERNS),
        default="",
        help="as model.tokenizer_pattern, for a rank file of no known family",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=DataConfig().validation_fraction,
        help="share of the documents held out (default %(default)s)",
    )
    parser.add_argument("--on-bad-record", choices=("error", "skip"), default="error")
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=SHARD_TOKENS,
        help="tokens per file (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="at least 1 (default: one per core)")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> None:
    """Raises ValueError for unusable text or an existing output, OSError for a failed write."""
    if not 0 <= args.validation_fraction <= 1:
        raise ValueError(f"--validation-fraction {args.validation_fraction} is not from 0 to 1")
    if args.shard_tokens < 1 or (args.threads is not None and args.threads < 1):
        raise ValueError("--shard-tokens and --threads must be at least 1")
    tokenizer = load_tokenizer(args.tokenizer, args.tokenizer_pattern)
    with in_place(args.output) as building:
        building.mkdir()
        counts = tokenize(
            TextSource(args.type, args.path, args.field, key="--path"),
            tokenizer,
            building,
            validation_fraction=args.validation_fraction,
            on_bad_record=args.on_bad_record,
            shard_tokens=args.shard_tokens,
            num_threads=args.threads,
        )
        (building / "counts.json").write_text(json.dumps(asdict(counts)))
    print(f"{args.output}: {counts}")


def main(argv: Sequence[str]) -> int:
    init_logger()
    try:
        prepare(parse_arguments(argv))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    return 0
