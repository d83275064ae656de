"""MatrixFSDP: ZeRO-3 whose shards are whole matrices. Imports torch and `matrixtitan.plan` only; start at `api.py`."""

from matrixtitan.fsdp.api import MatrixFSDP, MixedPrecisionPolicy, fully_shard

__all__ = ["MatrixFSDP", "MixedPrecisionPolicy", "fully_shard"]
