"""`matrixtitan NAME ...` or `python -m matrixtitan NAME ...` starts `matrixtitan/tools/NAME.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

TOOLS = Path(__file__).parent / "tools"


def main(argv: Sequence[str] | None = None) -> int:
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
    code: int = import_module(f"matrixtitan.tools.{name}").main(arguments)
    return code


def summary(path: Path) -> str:
    """The first line of a module's docstring, read without importing the module."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
