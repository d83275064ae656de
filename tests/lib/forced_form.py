"""Newton-Schulz in a form of the caller's choice, where the product picks one for each shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from matrixtitan.optim import newton_schulz
from matrixtitan.optim.products import Choice


@contextmanager
def forced_form(form: str) -> Iterator[None]:
    """Iterate in `form`, "standard" or "gram", with the products that a shape takes anyway.

    "auto" changes nothing.
    """
    choose = newton_schulz.choose

    def choose_form(x: Tensor) -> Choice:
        choice = choose(x)
        return choice if form == "auto" else choice._replace(form=form)

    with mock.patch.object(newton_schulz, "choose", choose_form):
        yield
