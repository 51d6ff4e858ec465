"""Generated pages agree with the code, and the files, links and names on all pages exist."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.launcher.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A path of the repository between backticks: with a folder, and with a suffix or a slash at its end.
FILE = re.compile(r"`((?:launcher|backends|entrypoints|templates|tests|tools|benchmarks|examples|docs)/[\w./-]*)`")


def names(page: Path) -> str:
    """Return a page's name, for the ids of the tests."""
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, in the form of forges."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield each link within the repository: its text, its file, its heading."""
    for link in LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


def test_generated_pages_agree_with_the_code(tmp_path: Path) -> None:
    """The check's message names the command that renews the pages after a change of help texts or keys."""
    done = subprocess.run(
        [sys.executable, "tools/cli_pages.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "CLOUDTRAIN_HOME": str(tmp_path), "COLUMNS": "40"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_and_named_files_exist(page: Path) -> None:
    """Files and headings in links, and paths between backticks exist; `NAME` in capitals and `*` are placeholders."""
    dead = [
        link
        for link, path, anchor in targets(page)
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path))
    ]
    assert dead == []
    named = [path for path in FILE.findall(prose(page)) if not re.search(r"[A-Z]{3}", path)]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_architecture_names_only_files_that_exist() -> None:
    """Every path and module on the page exists, also in the tree and diagrams; a bare file name is in a folder."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = ("launcher", "backends", "entrypoints", "templates", "typings", "tests", "tools")
    bare = {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}
    paths = set(re.findall(r"(?<![\w./])[\w*][\w./*-]*\.(?:py|js|csv|tsv|json)(?![\w.])", text))
    paths |= set(re.findall(rf"(?<![\w./])(?:{'|'.join(folders)})/[\w./*-]*", text))
    paths -= {"stop.json", "cloudtrain/__init__.py"}  # a file of a node's folder, and a file that must not exist
    lost = [path for path in sorted(paths) if not any(ROOT.glob(path.rstrip("/."))) and path not in bare]
    modules = set(re.findall(r"\bcloudtrain((?:\.[a-z_]+)+)\b", text)) - {".yaml"}
    assert lost + [name for name in sorted(modules) if not any(ROOT.glob(f"{name[1:].replace('.', '/')}*"))] == []


@pytest.mark.parametrize("folder", ["launcher", "backends", "entrypoints"])
def test_architecture_has_a_line_for_each_room(folder: str) -> None:
    """The tree on the page names every room, so a new room cannot be forgotten."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = text.split(f"\n    {folder}/ ")[1].split("\n\n")[0]
    rooms = {path.name for path in (ROOT / folder).iterdir() if path.suffix == ".py" and path.stem != "__init__"}
    rooms |= {f"{path.parent.name}/" for path in (ROOT / folder).glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^      (\S+) ", tree, re.MULTILINE))


def test_every_page_is_in_the_lists() -> None:
    """A page without a link has no readers, and `make docs` leaves no page of mkdocs.yml's list out."""
    listed = {path for _, path, _ in targets(ROOT / "docs" / "README.md")}
    assert {page for page in PAGES if page.parent != ROOT} - listed == {ROOT / "docs" / "README.md"}
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT)


def test_every_command_has_its_help_on_the_page() -> None:
    """Each command has a separate heading as a target of links."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"## cloudtrain {name}\n" not in text] == []
