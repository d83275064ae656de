"""Time a whole Muon step of a model's matrices on this CPU against a loop over the matrices.

    python tools/lab/bench_muon.py --flavor debug
    python tools/lab/bench_muon.py --flavor 150M --rounds 3

Both use one thread, float32, 5 quintic steps, and the same momentum and update. The loop's
iteration is that of torch.optim.Muon, in float32. Steps alternate, and medians are compared.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from statistics import median

import torch
from torch import Tensor, nn

import checkout  # noqa: F401
from matrixtitan.optim import Muon
from models import build_model, family
from ns_table import plain


def matrices(flavor: str) -> list[nn.Parameter]:
    """The model's hidden matrices, with random values and gradients."""
    with torch.device("meta"):
        model = build_model("llama3", flavor, vocab_size=4096, max_seq_len=256)
    params = []
    for name, meta in model.named_parameters():
        if meta.ndim == 2 and name.startswith("layers."):
            param = nn.Parameter(torch.randn(meta.shape) * 0.02)
            param.grad = torch.randn(meta.shape)
            params.append(param)
    return params


def loop_step(params: list[nn.Parameter], buffers: list[Tensor], lr: float = 0.02) -> None:
    """One Muon step, matrix by matrix, in the standard form."""
    with torch.no_grad():
        for param, buffer in zip(params, buffers, strict=True):
            assert param.grad is not None
            buffer.lerp_(param.grad, 0.05)
            update = param.grad.lerp(buffer, 0.95)
            scale = max(1, param.size(0) / param.size(1)) ** 0.5
            param.add_(plain(update), alpha=-lr * scale)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--flavor",
        choices=tuple(family("llama3").flavors),
        default="debug",
        help="model.flavor of llama3 (default debug)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind (default 15)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; it must be at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    params = matrices(arguments.flavor)
    print(
        ", ".join(
            f"{n} of {s[0]}x{s[1]}" for s, n in Counter(tuple(p.shape) for p in params).items()
        )
    )
    buffers = [torch.zeros_like(param) for param in params]
    optimizer = Muon(params, lr=0.02, weight_decay=0.0)
    times: dict[str, list[float]] = {"loop": [], "ours": []}
    for _ in range(arguments.rounds + 1):
        for name, record in times.items():
            start = time.perf_counter()
            if name == "loop":
                loop_step(params, buffers)
            else:
                optimizer.step()
            record.append(time.perf_counter() - start)
    loop, ours = (median(record[1:]) for record in times.values())
    print(
        f"{arguments.flavor}: loop {loop * 1e3:.1f} ms, ours {ours * 1e3:.1f} ms, "
        f"ratio {loop / ours:.2f}"
    )


if __name__ == "__main__":
    main()
