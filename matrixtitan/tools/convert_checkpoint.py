"""Convert weights between our checkpoints, Hugging Face's and torch.save files.

    ./run_train.sh --checkpoint.enable true  # which saves to outputs/debug/checkpoint
    matrixtitan convert_checkpoint outputs/debug/checkpoint debug-hf --to huggingface
    matrixtitan convert_checkpoint Llama-3.1-8B llama-8b --to matrixtitan \\
        --tokenizer Llama-3.1-8B/original/tokenizer.model
    matrixtitan convert_checkpoint outputs/debug/checkpoint debug.pt --to torch

The input's format is seen from its files. Start a run from `llama-8b` with
`--checkpoint.initial_load_path llama-8b`. Values are never rounded unless --dtype asks for it. No
file that is read can run code. Memory holds one tensor for --to matrixtitan, one file for --to
huggingface and the model for --to torch. Hugging Face's formats need the `tools` extra.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matrixtitan.checkpoint import CheckpointError
from matrixtitan.data.tokenizer import PATTERNS
from matrixtitan.export import (
    DTYPES,
    open_weights,
    write_huggingface,
    write_matrixtitan,
    write_torch,
)
from matrixtitan.extras import need
from matrixtitan.tools import make_parser
from models import family


def convert(options: argparse.Namespace) -> str:
    """Convert, and return lines that say what was written.

    Raises ValueError or CheckpointError, which names what cannot be converted.
    """
    if options.to == "huggingface":
        need("safetensors", "tokenizers")
    weights = open_weights(
        options.input, options.step, options.tokenizer, options.tokenizer_pattern
    )
    if options.dtype:
        weights = weights.cast(DTYPES[options.dtype])
    if options.to == "huggingface":
        if not options.max_shard_gb > 0:
            raise ValueError(f"--max-shard-gb is {options.max_shard_gb}; it must be positive")
        write_huggingface(weights, options.output, options.max_shard_gb * 1e9)
    elif options.to == "torch":
        write_torch(weights, options.output)
    else:
        write_matrixtitan(weights, options.output)
    lines = [f"{options.output}: {len(weights.dtypes)} tensors"]
    if options.to == "matrixtitan":
        flavor = weights.model.flavor_name()
        file = f"{family(weights.model.family).__module__.replace('.', '/')}.py"
        lines.append(
            f"its shape is --model.flavor {flavor}"
            if flavor
            else f"to train from it, add its shape to {file}: {weights.model.flavor}"
        )
    if options.to == "huggingface" and weights.model.tokenizer_path is None:
        lines.append(
            "no tokenizer is written: the input names none (--tokenizer gives its rank file)"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("input", type=Path, help="a checkpoint, a run's folder, or a file")
    parser.add_argument("output", type=Path, help="a new folder, or a new file for --to torch")
    parser.add_argument("--to", choices=("huggingface", "matrixtitan", "torch"), required=True)
    parser.add_argument(
        "--step", type=int, help="which step of our checkpoints (default: the newest)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="dtype to round to (default: as stored)"
    )
    parser.add_argument(
        "--tokenizer", help="rank file, if the input names none or its file has moved"
    )
    parser.add_argument(
        "--tokenizer-pattern",
        choices=tuple(PATTERNS),
        help="as model.tokenizer_pattern, for a rank file of no known family",
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="upper limit on a safetensors file (default 5)",
    )
    try:
        print(convert(parser.parse_args(argv)))
    except (ValueError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")
    return 0
