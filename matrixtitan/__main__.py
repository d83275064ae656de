"""`matrixtitan NAME ...` or `python -m matrixtitan NAME ...` starts `matrixtitan/tools/NAME.py`."""

from __future__ import annotations

import ast
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from matrixtitan.extras import CheckoutNeeded

TOOLS = Path(__file__).parent / "tools"


def main(argv: Sequence[str] | None = None) -> int:
    try:
        code = _start(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        # `| head` has read enough. Python flushes standard output again at exit: without a reader
        # that would fail too. See the note on SIGPIPE in Python's documentation of `signal`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _is_stdout_closed() -> bool:
    """Whether the process that reads this one's standard output is gone."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _start(argv: Sequence[str] | None) -> int:
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    tools = {path.stem: path for path in sorted(TOOLS.glob("[a-z]*.py"))}
    if name in ("-h", "--help"):
        print("usage: matrixtitan NAME ...     (matrixtitan NAME --help lists its arguments)\n")
        for tool, path in tools.items():
            print(f"  {tool:20} {summary(path)}")
        return 0
    if name not in tools:
        print(f"matrixtitan: no tool {name!r}; choose from {', '.join(tools)}", file=sys.stderr)
        return 2
    try:
        code: int = import_module(f"matrixtitan.tools.{name}").main(arguments)
    except CheckoutNeeded as error:
        print(f"matrixtitan: {error}", file=sys.stderr)
        return 2
    return code


def summary(path: Path) -> str:
    """The first line of a module's docstring, read without importing the module."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
