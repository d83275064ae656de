"""`Checkpointer` saves and loads a run; `StoredCheckpoint` opens one to read, without a process
group.
"""

from matrixtitan.checkpoint.checkpointer import Checkpointer
from matrixtitan.checkpoint.errors import CheckpointError, CorruptCheckpointError
from matrixtitan.checkpoint.reading import StoredCheckpoint
from matrixtitan.checkpoint.state import TrainState

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "CorruptCheckpointError",
    "StoredCheckpoint",
    "TrainState",
]
