"""The planner: a pure function from shapes, roles, world size and settings to who owns what. Start
at `shard.py`."""
