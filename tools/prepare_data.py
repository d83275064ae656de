"""Tokenise text into token shards ahead of a run, on all cores.

    python tools/prepare_data.py --type jsonl --path 'corpus/*.jsonl.gz' --field text \\
        --tokenizer tokenizer.model --output shards/corpus

A run then reads them with `--data.sources '[{type="shards", path="shards/corpus"}]'` and the same tokenizer. The
output folder appears when all shards are in it; a killed call leaves only a `.writing` folder, which the next one asks
to have deleted, since it may be that of a call under way. Very large corpora: one call per part, on as many machines
as you like, and a source with all the folders as its path.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matrixtitan.config import DataConfig
from matrixtitan.data.prepare import SHARD_TOKENS, TextSource, tokenize
from matrixtitan.data.sources import TEXT_SOURCES
from matrixtitan.data.tokenizer import PATTERNS, load_tokenizer
from matrixtitan.log import init_logger
from tools.in_place import in_place


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--type", choices=TEXT_SOURCES, default="text")
    parser.add_argument("--path", nargs="*", default=[], help="files, folders or globs")
    parser.add_argument(
        "--field", default="text", help="the field of a JSONL record (default text)"
    )
    parser.add_argument("--tokenizer", default="", help="rank file; the one that ships if left out")
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
        "--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens a file (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="1 or more (default: one per core)")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> None:
    """ValueError for text that cannot be used, or an output folder that exists; OSError where it cannot be written."""
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


def main(argv: list[str] | None = None) -> None:
    init_logger()
    try:
        prepare(parse_arguments(argv))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
