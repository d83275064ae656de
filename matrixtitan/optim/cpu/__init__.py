"""Newton-Schulz's arithmetic on CPUs, behind the hook that is `products.Backend`. Read `backend.py` first."""

from matrixtitan.optim.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
