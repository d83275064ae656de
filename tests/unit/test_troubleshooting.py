"""docs/troubleshooting.md: each command in its tables prints the message beside it, briefly.

Mistakes that stop before any process starts are made with run_train.sh itself. Mistakes that ranks
find are made in a process that has imported torch, which calls what torchrun would.
`tests/distributed/test_launch.py` goes the whole way.
"""

from __future__ import annotations

import email
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lib.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MOST_LINES = 6


class Mistake(NamedTuple):
    command: str
    message: str
    advice: str

    def is_in(self, screen: str) -> bool:
        parts = (re.escape(part.strip()) for part in self.message.split("…"))
        return re.search(".*".join(parts), " ".join(screen.split())) is not None


def table(number: int) -> list[Mistake]:
    """The rows of the table of commands with this number, from 0."""
    header = "| command | message | what to do |\n|---|---|---|\n"
    rows = PAGE.split(header)[number + 1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return [Mistake(command.strip("`"), message, advice) for command, message, advice in cells]


BEFORE, ON_RANKS = table(0), table(1)


def words(mistake: Mistake) -> tuple[dict[str, str], list[str]]:
    """A command's variables, and its arguments."""
    variables, _, arguments = mistake.command.partition("./run_train.sh")
    return dict(pair.split("=") for pair in variables.split()), shlex.split(arguments)


def test_the_page_has_the_common_mistakes() -> None:
    assert len({mistake.command for mistake in BEFORE + ON_RANKS}) >= 20
    assert all(mistake.advice for mistake in BEFORE + ON_RANKS)
    # a message of dots alone would be true of anything
    messages = [mistake.message.replace("…", "").strip() for mistake in BEFORE + ON_RANKS]
    assert all(len(message) > 25 for message in messages)


@pytest.mark.parametrize("mistake", BEFORE, ids=lambda mistake: mistake.command)
def test_a_mistake_before_any_process_starts(mistake: Mistake, tmp_path: Path) -> None:
    variables, arguments = words(mistake)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "NPROC", "NNODES", "NODE_", "MASTER_", "MATRIXTITAN_"))
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        [str(ROOT / "run_train.sh"), *arguments],
        cwd=tmp_path,
        env={**inherited, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    check(mistake, result.returncode, result.stdout + result.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: the files that they name, and a run that was saved."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "notes.txt").write_text("a few words\n")
    (folder / "broken.jsonl").write_text('{"text": "whole"}\n{"text": \n')
    for path in Path(email.__file__).parent.glob("*.py"):
        (folder / f"{path.stem}.email").write_text(path.read_text())
    save = ["--checkpoint.enable", "true", "--training.steps", "1", "--validation.enable", "false"]
    ((code, screen),) = run_distributed(train_main, 1, folder, save)
    assert code == 0, screen
    return folder


@pytest.mark.parametrize("mistake", ON_RANKS, ids=lambda mistake: mistake.command)
def test_a_mistake_that_ranks_find(mistake: Mistake, folder: Path) -> None:
    ((code, screen),) = run_distributed(train_main, 1, folder, words(mistake)[1])
    check(mistake, code, screen)


def test_ranks_tell_a_mistake_once_and_with_a_traceback_only_where_asked(
    folder: Path, tmp_path: Path
) -> None:
    flavor = next(mistake for mistake in ON_RANKS if "model.flavor 9B" in mistake.command)
    results = run_distributed(train_main, 2, folder, words(flavor)[1], tmp_path / "run/attempt_0")
    assert sorted(screen.count(" is unknown: ") for _, screen in results) == [0, 1]
    # started again after a restart
    again = run_distributed(train_main, 1, folder, [], tmp_path / "run/attempt_1")
    assert again == [(2, "")]
    traced = [*words(flavor)[1], "--debug.traceback", "true"]
    ((code, screen),) = run_distributed(train_main, 1, folder, traced, tmp_path / "other/attempt_0")
    assert (code, screen.splitlines()[0]) == (1, "Traceback (most recent call last):")


def train_main(folder: Path, arguments: list[str], attempt: Path | None = None) -> tuple[int, str]:
    """On a rank: do what `train.py` does with a command's arguments.

    Returns the exit status and what is on the screen.
    """
    import traceback

    import train

    rank = os.environ["RANK"]
    if attempt is not None:
        error_file = attempt / rank / "error.json"
        error_file.parent.mkdir(parents=True)
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    small = ["--data.sources", '[{type = "text", path = "*.email"}]', "--data.cache_dir", "cache"]
    os.chdir(folder)
    sys.argv = ["train.py", *small, "--data.num_workers", "0", *arguments]
    screen = Path(folder, f"screen-{os.getpid()}")
    with screen.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            code = train.main()
        except Exception:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
    return code, screen.read_text()


def check(mistake: Mistake, code: int, screen: str) -> None:
    assert code != 0, screen
    assert mistake.is_in(screen), screen
    assert "Traceback" not in screen
    assert len(screen.splitlines()) <= MOST_LINES, screen
