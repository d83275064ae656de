"""The programs that a user runs: `matrixtitan NAME` calls `main(argv)` of `NAME.py` here.

The first line of a program's docstring is its line in `matrixtitan --help`.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def make_parser(module: str, docstring: str | None) -> ArgumentParser:
    """A parser of a program's arguments, from the `__name__` and `__doc__` of its module."""
    return ArgumentParser(
        prog=f"matrixtitan {module.rpartition('.')[2]}",
        description=docstring,
        formatter_class=RawDescriptionHelpFormatter,
    )
