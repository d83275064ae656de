"""MatrixForm: which matrices lie in one parameter, where it is not simply one matrix (R, C).

Owns that description alone, in pure Python. `fsdp/roles.py` finds it from the module that the
parameter belongs to, `LocalParam` carries it, and `optim/` cuts the parameter by it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How the matrices (out features, in features) of one parameter are stored.

    A parameter (E, R, C) is a stack of E matrices of this form. One of four or more dimensions, a
    convolution's (out, in, *kernel), is the matrix (out, the product of the rest).
    """

    transposed: bool = False
    """The stored matrix is (in features, out features), as in GPT-2's Conv1D."""
    rows: tuple[int, ...] = ()
    """Out features of each of the matrices that are fused along that dimension, such as those of
    query, key and value, or gate and up. Empty: the parameter is one matrix."""
