"""Generate text from a checkpoint, to read what a model has learned.

    ./run_train.sh --checkpoint.enable true
    matrixtitan generate --checkpoint outputs/debug/checkpoint --prompt "def " \\
        --max-new-tokens 100 --temperature 0.8

The model is built from the config saved with the checkpoint, and every tensor is verified as it is
read. Converted checkpoints and Hugging Face folders work too; give --tokenizer where they name
none. Each token costs a whole forward pass over the last seq_len tokens, without a cache, so this
is for reading samples and not for serving.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from matrixtitan.checkpoint import CheckpointError
from matrixtitan.data.tokenizer import PATTERNS, Tokenizer, check_vocab, load_tokenizer
from matrixtitan.export import DTYPES, Weights, open_weights
from matrixtitan.tools import make_parser
from models.base import LanguageModel

BOUNDS = {
    "max_new_tokens": (1, inf),
    "temperature": (0, 1e6),
    "top_k": (0, inf),
    "seed": (-1e18, 1e18),  # 64 bits
}


@torch.no_grad()
def load_model(weights: Weights, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """The model on `device`, its weights cast to `dtype` one at a time."""
    with torch.device("meta"):
        model = weights.model.build().to(dtype)
    model.to_empty(device=device)
    for fqn, param in model.named_parameters():
        param.copy_(weights.read(fqn))
    model.init_buffers(device)
    return model.eval()


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    eos_id: int | None = None,
) -> Iterator[int]:
    """New token ids after `tokens`, until there are `max_new_tokens` or the model gives `eos_id`.

    `eos_id` itself is not yielded. Temperature 0 takes the likeliest token. `top_k` 0 samples from
    the whole vocabulary. The same seed gives the same tokens.
    """
    device = model.tok_embeddings.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    context = list(tokens)
    for _ in range(max_new_tokens):
        window = torch.tensor([context[-model.max_seq_len :]], device=device)  # (1, T)
        logits = model(window)[0, -1].float()  # (V,)
        token = int(_choose(logits, temperature, top_k, generator))
        if token == eos_id:
            return
        context.append(token)
        yield token


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    if not logits.isfinite().all():
        raise ValueError(
            "the model's output is not finite: its weights are not, or --dtype is too narrow for it"
        )
    if temperature < 1e-6:  # in float32 the division below could overflow
        return logits.argmax()
    if 0 < top_k < logits.numel():
        lowest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def _tokenizer_of(weights: Weights) -> Tokenizer:
    path = weights.model.tokenizer_path
    if path is None:
        raise ValueError(
            "the checkpoint does not name its tokenizer: give its rank file with --tokenizer "
            '("" is the one that ships here)'
        )
    tokenizer = load_tokenizer(path, weights.model.tokenizer_pattern)
    check_vocab(tokenizer, weights.model.vocab_size)
    return tokenizer


def _device(name: str) -> torch.device:
    try:
        probe = torch.zeros((), device=name)
        probe.item()  # an error on "meta", which holds no values
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch built without it
        why = str(error).partition("\n")[0]
        raise ValueError(f"--device {name!r} cannot be used: {why}") from error
    return probe.device


def run(options: argparse.Namespace) -> str:
    """The prompt and its continuation. Raises ValueError or CheckpointError for wrong options."""
    for name, (least, most) in BOUNDS.items():
        if not least <= getattr(options, name) <= most:
            and_most = f" and at most {most:g}" if most < inf else ""
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least:g}{and_most}")
    weights = open_weights(
        options.checkpoint, options.step, options.tokenizer, options.tokenizer_pattern
    )
    tokenizer = _tokenizer_of(weights)
    model = load_model(weights, _device(options.device), DTYPES[options.dtype])
    # a document begins with BOS in training
    prompt = tokenizer.encode(options.prompt, bos=True)
    new_tokens = generate(
        model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        eos_id=tokenizer.eos_id,
    )
    return tokenizer.decode([*prompt[1:], *new_tokens])


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="step-N, a folder of steps, or other weights"
    )
    parser.add_argument("--step", type=int, help="which step of the folder (default: the newest)")
    parser.add_argument("--prompt", default="", help="the beginning of the text")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token"
    )
    parser.add_argument("--top-k", type=int, default=50, help="sample from the k likeliest; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="rank file, if the checkpoint's is missing")
    parser.add_argument(
        "--tokenizer-pattern",
        choices=tuple(PATTERNS),
        help="as model.tokenizer_pattern, for a rank file of no known family",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="to compute in")
    try:
        print(run(parser.parse_args(argv)))
    except (ValueError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")
    return 0
