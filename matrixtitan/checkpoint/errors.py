"""What can go wrong with a checkpoint, as two exceptions. Both take one message, so that they
survive pickling."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file or key and what to do."""


class CorruptCheckpointError(CheckpointError):
    """A complete checkpoint's bytes are not those that were written; the message names the file."""
