"""Every optimizer against trajectories of the public reference implementations, number by number.

`data/` holds one file per case: for each shape RxC a weight, 12 gradients and the weights after each step, made by
running the reference (PyTorch 2.13, CPU, float32) with the options in cases.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from matrixtitan.optim import SOAP, Muon, Shampoo

DATA = Path(__file__).parent / "data"
CASES: dict[str, dict[str, Any]] = json.loads((DATA / "cases.json").read_text())
CLASSES: dict[str, type[torch.optim.Optimizer]] = {"muon": Muon, "soap": SOAP, "shampoo": Shampoo}


def largest_error(case: str, stacked: bool = False, **more: Any) -> float:
    """The largest difference of any weight after any step, over all shapes of a case.

    `stacked` runs each matrix as both slices of a stack.
    """
    options = dict(CASES[case])
    optimizer_class = CLASSES[options.pop("kind")]
    arrays = np.load(DATA / f"{case}.npz")
    worst = 0.0
    for key in arrays.files:
        shape, _, what = key.partition(".")
        if what != "weight0":
            continue
        weight = torch.from_numpy(arrays[key])
        copies = (2, 1, 1) if stacked else (1, 1)
        param = torch.nn.Parameter(weight.repeat(copies))
        optimizer = optimizer_class([param], **options, **more)
        for grad, expected in zip(
            arrays[f"{shape}.grads"], arrays[f"{shape}.weights"], strict=True
        ):
            param.grad = torch.from_numpy(grad).repeat(copies)
            optimizer.step()
            worst = max(worst, (param.detach() - torch.from_numpy(expected)).abs().max().item())
    return worst


def test_muon_with_bfloat16_iterations() -> None:
    assert largest_error("muon_keller", ns_dtype="bfloat16", ns_arithmetic="separate") <= 1e-6


@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
def test_muon_with_float32_iterations(form: str) -> None:
    assert largest_error("muon_keller", ns_dtype="float32", ns_form=form) <= 3e-3


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name]["kind"] != "muon"])
@pytest.mark.parametrize("stacked", [False, True], ids=["matrix", "stack"])
def test_soap_and_shampoo(case: str, stacked: bool) -> None:
    assert largest_error(case, stacked) <= 1e-5


def test_wrong_options_do_not_pass() -> None:
    """The tolerances tell one setting from another: a test that could not fail would show nothing."""
    assert largest_error("muon_keller", ns_dtype="float32", nesterov=False) > 3e-3
    assert largest_error("soap_f4", normalize_grads=True) > 1e-4
    assert largest_error("shampoo_f4", stagger=True) > 1e-4
