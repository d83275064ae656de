"""Does this interpreter have what pyproject.toml asks for? `tools/setup_env.sh` asks it of an active one.

    python tools/check_environment.py [EXTRA ...]

Reads the installed packages' metadata and imports none of them. Exit status 1, and what to do, if something is missing.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def release(version: str) -> list[int]:
    """The leading numbers of a version: "2.13.0a1+cu130" gives [2, 13, 0]."""
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in match.group().split(".")] if match else []


def shortcomings(requirements: list[str]) -> list[str]:
    """Those `name>=minimum` that are not met."""
    unmet = []
    for requirement in requirements:
        name, _, minimum = requirement.partition(">=")
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(requirement)
            continue
        if release(installed) < release(minimum):
            unmet.append(requirement)
    return unmet


def main(extras: list[str]) -> int:
    instead = (
        "or set MATRIXTITAN_PYTHON=python3.11 (a Python 3.11 or newer) to build .venv beside it"
    )
    if sys.version_info < (3, 11):  # noqa: UP036 - an active environment may be older
        version = ".".join(map(str, sys.version_info[:3]))
        message = (
            f"the active Python ({sys.executable}) is {version}; activate one that is at least 3.11"
        )
        print(f"{message}, {instead}", file=sys.stderr)
        return 1
    import tomllib  # new in 3.11

    project = tomllib.loads(PYPROJECT.read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    unmet = shortcomings(requirements)
    if unmet:
        quoted = " ".join(f"'{requirement}'" for requirement in unmet)
        print(
            f"the active environment has torch, so it is used as it is, but it lacks {', '.join(unmet)}.\n"
            f"Install them there:  {sys.executable} -m pip install {quoted}\n"
            f"{instead}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
