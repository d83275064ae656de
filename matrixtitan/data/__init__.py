"""From text to batches: tokenizer, token shards, the order of windows, the loader.

Reading order: `tokenizer.py`; `sources.py` (the types of sources: which files, which records);
`prepare.py` (text to shards, cached); `shards.py` (the file format); `order.py` (which window comes
when); `dataset.py`; `dataloader.py` (what the trainer calls). Knows no model, optimizer or process
group.
"""
