"""MatrixFSDP: ZeRO-3 whose shards are whole matrices. Start at `api.py`.

It imports torch and `matrixtitan.plan` only, so that it can be lifted out.
"""

from matrixtitan.fsdp.api import MatrixFSDP, fully_shard
from matrixtitan.fsdp.mixed_precision import MixedPrecisionPolicy

__all__ = ["MatrixFSDP", "MixedPrecisionPolicy", "fully_shard"]
