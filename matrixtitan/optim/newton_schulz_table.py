"""Which form of Newton-Schulz each shape takes. Written by `tools/ns_table.py`; do not edit by hand."""

from typing import Literal

FormEntry = tuple[Literal["standard", "gram"], int]

BLOCKED_TABLE: dict[int, dict[float, FormEntry]] = {
    16: {1.0: ("standard", 1), 2.0: ("gram", 1), 3.0: ("gram", 1)},
    128: {1.0: ("standard", 1), 2.0: ("gram", 1), 3.0: ("gram", 1)},
    256: {1.0: ("standard", 2), 2.0: ("gram", 2), 3.0: ("gram", 2)},
    512: {1.0: ("standard", 4), 2.0: ("gram", 4), 3.0: ("gram", 4)},
}
"""short side -> long side over short side -> (form, row blocks of a symmetric product), float32 on the CPU."""

BATCH_LIMIT: dict[str, int] = {"cpu": 64, "cuda": 2048}
"""The largest short side for which equal shapes are multiplied as one batch."""
