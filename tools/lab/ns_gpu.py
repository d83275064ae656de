"""Time Newton-Schulz and whole Muon steps on a GPU in bfloat16, against torch.optim.Muon's.

    python tools/lab/ns_gpu.py                every form and shape, batches, Llama 8B's matrices
    python tools/lab/ns_gpu.py --seconds 0.5  longer samples

Calls alternate, and medians are compared. "Rate" is a call's FLOP/s as a share of the FLOP/s of an
8192 x 8192 x 8192 product in the same run. `products.choose_by_flops` and
`batching.GPU_BATCH_ELEMENTS` should follow the first two tables; so far they follow FLOP counts and
a guess.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import checkout  # noqa: F401
from matrixtitan.optim import Muon
from matrixtitan.optim import newton_schulz as ns
from matrixtitan.optim.batching import orthogonalize
from matrixtitan.optim.cpu.strips import Strips
from matrixtitan.optim.newton_schulz import make_newton_schulz
from matrixtitan.optim.products import WHOLE, Choice
from matrixtitan.plan.cost import newton_schulz_flops
from ns_table import alternating_medians

SHAPES = ((1024, 1024), (1024, 4096), (2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336))
LLAMA_8B_BLOCK = (
    ("wq, wo", (4096, 4096), 2),
    ("wk, wv", (1024, 4096), 2),
    ("w1, w3", (14336, 4096), 2),
    ("w2", (4096, 14336), 1),
)
DEPTHS = (0, 1, 2, 3)
BATCHES = (
    (256, 256),
    (256, 768),
    (512, 512),
    (512, 2048),
    (1024, 1024),
    (1024, 4096),
    (2048, 2048),
)


def gpu_medians(candidates: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median seconds of each candidate, called in turn for about `seconds` each.

    A call's time includes its kernels.
    """

    def finished(candidate: Callable[[], object]) -> None:
        candidate()
        torch.cuda.synchronize()

    return alternating_medians(
        [partial(finished, c) for c in candidates], seconds * len(candidates)
    )


def product_rate(seconds: float) -> float:
    """FLOP/s of one large bfloat16 product."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / gpu_medians([lambda: left @ right], 4 * seconds)[0]


def forms(seconds: float) -> None:
    """Print the time of every form and depth for every shape."""
    print(
        "| shape | "
        + " | ".join(f"{form} {depth}" for form in ("standard", "gram") for depth in DEPTHS)
        + " |"
    )
    print("|---" * (1 + 2 * len(DEPTHS)) + "|")
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        settings = make_newton_schulz()
        choices = [
            Choice(form, Strips(d, d) if d else WHOLE)
            for form in ("standard", "gram")
            for d in DEPTHS
        ]  # type: ignore[arg-type]
        times = gpu_medians(
            [partial(ns.iterate, x, settings, choice) for choice in choices], seconds
        )
        print(
            f"| {rows}x{cols} | " + " | ".join(f"{1e3 * t:.3f}" for t in times) + " |", flush=True
        )


def batches(seconds: float) -> None:
    """Print the time of eight equal matrices, one by one and as one batch."""
    print("\n| shape | 8 alone ms | as a batch ms | ratio |\n|---|---|---|---|")
    for rows, cols in BATCHES:
        matrices = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        alone = make_newton_schulz(batch=False)

        def batched(matrices: list[Tensor] = matrices) -> None:
            ns.orthogonalize_one(torch.stack(matrices), make_newton_schulz()).unbind()

        one, many = gpu_medians([partial(orthogonalize, matrices, alone), batched], seconds)
        print(
            f"| {rows}x{cols} | {1e3 * one:.3f} | {1e3 * many:.3f} | {one / many:.2f} |", flush=True
        )


def llama_8b(seconds: float, rate: float, blocks: int = 4) -> None:
    """Print the time of whole steps on the matrices of a few blocks of Llama 8B."""
    print(
        f"\n| matrices of {blocks} blocks | torch.optim.Muon ms | ours ms | ratio "
        "| rate of theirs / ours |\n|---|---|---|---|---|"
    )
    everything: list[tuple[tuple[int, int], int]] = []
    for name, shape, count in LLAMA_8B_BLOCK:
        everything.append((shape, count * blocks))
        row(name, [(shape, count * blocks)], seconds, rate)
    row("all", everything, seconds, rate)


def row(name: str, shapes: list[tuple[tuple[int, int], int]], seconds: float, rate: float) -> None:
    params: list[list[nn.Parameter]] = [[], []]
    standard = cheapest = 0
    for shape, count in shapes:
        standard += count * newton_schulz_flops(*shape, form="standard")
        cheapest += count * newton_schulz_flops(*shape)
        for _ in range(count):
            start, grad = (torch.randn(shape, device="cuda") * 0.02 for _ in range(2))
            for copies in params:
                param = nn.Parameter(start.clone())
                param.grad = grad
                copies.append(param)
    theirs = torch.optim.Muon(params[0], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = Muon(params[1], lr=1e-3, weight_decay=0.1, scale="match_rms_adamw")
    before, after = gpu_medians([theirs.step, ours.step], seconds)
    label = (
        ", ".join(f"{count} of {shape[0]}x{shape[1]}" for shape, count in shapes)
        if len(shapes) == 1
        else "together"
    )
    print(
        f"| {name}: {label} | {1e3 * before:.2f} | {1e3 * after:.2f} | {before / after:.2f} "
        f"| {standard / before / rate:.0%} / {cheapest / after / rate:.0%} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="time per candidate (default 0.3)"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; tools/lab/ns_table.py --report is for CPUs")
    torch.manual_seed(0)
    rate = product_rate(arguments.seconds)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: "
        f"8192^3 product {rate / 1e12:.0f} TFLOP/s\n"
    )
    forms(arguments.seconds)
    batches(arguments.seconds)
    llama_8b(arguments.seconds, rate)


if __name__ == "__main__":
    main()
