"""From text to batches: tokenizer, token shards, the order of windows, the loader.

Reading order: `tokenizer.py`, `sources.py` (which files, which records), `prepare.py` (text to
shards, cached), `shards.py` (the file format), `order.py` (which window comes when), `dataset.py`,
`dataloader.py` (what a trainer calls). Nothing here knows of models, optimizers or process groups.
"""
