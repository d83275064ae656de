"""The planner: a pure function from shapes, roles, world size and settings to who owns what.

The package also has the registry of transports, since their prices are pure too. It imports neither
torch nor any other part of the project. Start at `shard.py`, the words that all other parts use.
"""
