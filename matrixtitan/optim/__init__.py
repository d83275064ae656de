"""Optimizers for matrices that one rank holds whole, and the trainer's code around them.

`Muon`, `Shampoo` and `SOAP` are plain `torch.optim.Optimizer` classes. Read `muon.py` first, then
`build.py`.
"""

from matrixtitan.optim.muon import Muon
from matrixtitan.optim.one_optimizer import matrix_optimizer
from matrixtitan.optim.shampoo import Shampoo
from matrixtitan.optim.soap import SOAP

__all__ = ["SOAP", "Muon", "Shampoo", "matrix_optimizer"]
