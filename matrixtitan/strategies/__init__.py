"""The data-parallel strategies of the trainer: `matrix_fsdp`, and what to compare it with.

Start at `base.py`, the interface that all of them have.
"""
