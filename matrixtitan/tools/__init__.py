"""The programs that a user runs: `matrixtitan NAME` calls `main(argv)` of `NAME.py` here.

The first line of a program's docstring is its line in `matrixtitan --help`.
"""
