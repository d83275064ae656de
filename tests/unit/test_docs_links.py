"""README and docs: links and anchors lead somewhere, and the files that the pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_import_order import LAYERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
SCRIPT = re.compile(r"(?:^|[\s`'(])((?:tools|tests)/[\w./-]+\.(?:py|sh))\b")
PATH = re.compile(r"`((?:matrixtitan|models|tools|tests|train_configs|docs)/[\w./*-]*)`")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    return found


def missing_files(page: Path) -> list[str]:
    text = page.read_text()
    return sorted(
        path for path in {*SCRIPT.findall(text), *PATH.findall(text)} if not list(ROOT.glob(path))
    )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert missing_files(page) == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        links = (link.partition("#")[0] for link in LINK.findall(page.read_text()))
        waiting += [(page.parent / link).resolve() for link in links if ":" not in link]
    assert set(PAGES) - seen == set()


def test_the_checks_see_what_is_broken(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words, `code`\n[a](page.md#two-words-code) [b](#three) [c](none.md) [d](https://x.y)\n"
        "`python tools/plan.py` `python tools/none.py --x` `models/none.py` `models/llama.py`\n"
    )
    assert broken_links(page) == ["#three", "none.md"]
    assert missing_files(page) == ["models/none.py", "tools/none.py"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_rows_of_a_table_have_the_cells_of_its_header(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, *rows = (re.split(r"(?<!\\)\|", line) for line in table.splitlines())
        assert [row for row in rows if len(row) != len(header)] == [], header


def config_keys() -> set[str]:
    """Every key of docs/configuration.md, as section.key."""
    page = (ROOT / "docs/configuration.md").read_text()
    sections = re.split(r"^## \[+(.+?)\]+$", page, flags=re.M)
    return {
        f"{section}.{key}"
        for section, text in zip(sections[1::2], sections[2::2], strict=True)
        for key in re.findall(r"^\| `(\w+)` \|", text, re.M)
    }


def unknown_keys(page: str) -> list[str]:
    """What a page calls a key of a config, on a command line or in text, and is none."""
    keys = config_keys()
    sections = "|".join(sorted({re.escape(key.partition(".")[0]) for key in keys}))
    named = re.findall(rf"--((?:{sections})\.[\w.]+)", page)
    named += re.findall(rf"`((?:{sections})\.[a-z_]+(?:\.[a-z_]+)?)(?: = [^`]*)?`", page)
    files = (".py", ".md", ".toml", ".json", ".jsonl", ".model", ".pt")
    return sorted(key for key in set(named) - keys if not key.endswith(files))


MISTAKES = ROOT / "docs/troubleshooting.md"
"""Its commands have wrong keys on purpose."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != MISTAKES], ids=name)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "torchtitan.md":
        # the second column has torchtitan's keys
        text = re.sub(r"^(\|[^|]*\|)[^|]*\|", r"\1", text, flags=re.MULTILINE)
    assert unknown_keys(text) == []


def test_an_unknown_key_is_seen() -> None:
    page = "`--training.step 3` `data.source` `optimizer.muon.momentum = 0.9` `optimizer.momentum`"
    assert unknown_keys(page) == ["data.source", "optimizer.momentum", "training.step"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_the_order_of_imports_on_the_page_is_the_enforced_one() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    (arrows,) = re.findall(r"^```\n(plan, .*?)^```$", page, re.DOTALL | re.MULTILINE)
    written = [set(layer.split(", ")) for layer in " ".join(arrows.split()).split(" -> ")]
    assert written == [{name.removeprefix("matrixtitan.") for name in layer} for layer in LAYERS]
