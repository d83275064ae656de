"""matrixtitan: an LLM pretrainer whose ZeRO-3 shards are whole matrices. Start reading at
`train.py`.
"""

__version__ = "0.1.0"
