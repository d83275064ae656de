"""The planner: a pure function from shapes, roles, world size and settings to who owns what; and the registry of
transports. Start at `shard.py`."""
