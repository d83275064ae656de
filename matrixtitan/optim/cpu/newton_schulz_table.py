"""Which form of Newton-Schulz a shape takes. Written by `tools/lab/ns_table.py`."""

from typing import Literal

FormEntry = tuple[Literal["standard", "gram"], int, int]

FORMS: dict[int, dict[float, FormEntry]] = {
    16: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("standard", 0, 0),
        3.0: ("standard", 0, 0),
        4.0: ("standard", 0, 0),
    },
    32: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("standard", 0, 0),
        3.0: ("standard", 0, 0),
        4.0: ("standard", 0, 0),
    },
    64: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("standard", 0, 0),
        3.0: ("standard", 0, 0),
        4.0: ("gram", 0, 0),
    },
    128: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("gram", 0, 0),
        3.0: ("gram", 0, 0),
        4.0: ("gram", 0, 0),
    },
    256: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("standard", 0, 0),
        3.0: ("gram", 2, 1),
        4.0: ("gram", 2, 0),
    },
    512: {
        1.0: ("standard", 2, 3),
        1.5: ("gram", 3, 2),
        2.0: ("gram", 1, 2),
        3.0: ("gram", 2, 2),
        4.0: ("gram", 3, 1),
    },
    768: {
        1.0: ("standard", 3, 3),
        1.5: ("gram", 3, 3),
        2.0: ("gram", 1, 3),
        3.0: ("gram", 3, 3),
        4.0: ("gram", 2, 3),
    },
    1024: {
        1.0: ("standard", 1, 3),
        1.5: ("gram", 1, 3),
        2.0: ("gram", 2, 2),
        3.0: ("gram", 2, 3),
        4.0: ("gram", 2, 3),
    },
}
"""short side -> long side / short side -> (form, depth of X X^T, depth of (R, R) products).

For float32 on the CPU, measured with one thread."""

BATCHED_FORMS: dict[int, dict[float, FormEntry]] = {
    16: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("standard", 0, 0),
        3.0: ("standard", 0, 0),
        4.0: ("standard", 0, 0),
    },
    32: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("standard", 0, 0),
        3.0: ("gram", 0, 0),
        4.0: ("gram", 0, 0),
    },
    64: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("standard", 0, 0),
        3.0: ("gram", 0, 0),
        4.0: ("gram", 0, 0),
    },
    128: {
        1.0: ("standard", 0, 0),
        1.5: ("standard", 0, 0),
        2.0: ("standard", 0, 0),
        3.0: ("gram", 0, 0),
        4.0: ("gram", 0, 0),
    },
}
"""The same for batches of equal shapes, which share the cost of a call."""

BATCH_ELEMENTS = 98304
"""Elements up to which equal shapes are multiplied as one batch."""

ONEDNN_ROWS = 128
"""The smallest short side that uses oneDNN's products, if they pay (see `onednn.py`)."""
