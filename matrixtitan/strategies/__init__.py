"""The ways to train data-parallel that the trainer knows: ours and what people use today. Start at `base.py`."""
