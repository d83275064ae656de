"""Every optimizer against trajectories of the public reference implementations, number by number.

`data/` holds one file per case: for each shape RxC a weight, 12 gradients and the weights after
each step. The reference made them with the options in cases.json (PyTorch 2.13, CPU, float32).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from matrixtitan.optim import SOAP, Muon, Shampoo
from tests.lib import references
from tests.lib.forced_form import forced_form
from tests.lib.keller_muon import KellerMuon

DATA = Path(__file__).parent / "data"
CASES: dict[str, dict[str, Any]] = json.loads((DATA / "cases.json").read_text())
OUR_NAMES = {"epsilon": "eps", "max_preconditioner_dim": "max_precond_dim"}
"""Where the reference calls an option otherwise."""
CLASSES: dict[str, type[torch.optim.Optimizer]] = {"muon": Muon, "soap": SOAP, "shampoo": Shampoo}


def largest_error(
    case: str,
    stacked: bool = False,
    optimizer_class: type[torch.optim.Optimizer] | None = None,
    **more: Any,
) -> float:
    """The largest difference of any weight after any step, over all shapes of a case.

    `stacked` runs each matrix as both slices of a stack. `optimizer_class` replaces the case's.
    """
    options = {OUR_NAMES.get(key, key): value for key, value in CASES[case].items()}
    named = CLASSES[options.pop("kind")]
    optimizer_class = optimizer_class or named
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
    assert largest_error("muon_keller", optimizer_class=KellerMuon) <= 1e-6


@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
def test_muon_with_float32_iterations(form: str) -> None:
    with forced_form(form):
        assert largest_error("muon_keller", ns_dtype="float32") <= 3e-3


def rounding_of_the_recording(case: str) -> float:
    """How far a recorded two-sided SOAP trajectory lies from the exact one in float64.

    soap_f4's first factor has eigenvalues so near each other that float32 turns its eigenvectors by
    1e-4. How much depends on the CPU: on another CPU the reference itself is as far from its
    recording.
    """
    options = {key: value for key, value in CASES[case].items() if key != "kind"}
    arrays = np.load(DATA / f"{case}.npz")
    worst = 0.0
    for shape in {key.partition(".")[0] for key in arrays.files}:
        exact = references.soap(
            torch.from_numpy(arrays[f"{shape}.weight0"]),
            torch.from_numpy(arrays[f"{shape}.grads"]),
            lr=options["lr"],
            betas=options["betas"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            frequency=options["precondition_frequency"],
        )
        recorded = torch.from_numpy(arrays[f"{shape}.weights"])
        worst = max(worst, (torch.stack(exact) - recorded).abs().max().item())
    return worst


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name]["kind"] != "muon"])
@pytest.mark.parametrize("stacked", [False, True], ids=["matrix", "stack"])
def test_soap_and_shampoo(case: str, stacked: bool) -> None:
    tolerance = 1e-5
    if case in ("soap_f1", "soap_f4"):
        rounding = rounding_of_the_recording(case)
        assert rounding < 5e-5
        tolerance = max(tolerance, rounding)
    assert largest_error(case, stacked) <= tolerance


def test_wrong_options_do_not_pass() -> None:
    """The tolerances tell settings apart: a test that could not fail would show nothing."""
    assert largest_error("muon_keller", ns_dtype="float32", nesterov=False) > 3e-3
    assert largest_error("soap_f4", normalize_grads=True) > 1e-4
    assert largest_error("shampoo_f4", stagger=True) > 1e-4
