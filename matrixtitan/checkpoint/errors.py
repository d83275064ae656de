"""The two errors of checkpoints. Each takes one message, so that it can be pickled."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file or key."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a complete checkpoint are not those that were written."""
