"""How plain the English of docstrings, comments and pages is: pronouns per 100 words, as an upper bound.

Comments and docstrings name classes and files that exist.
"""

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Words that replace a noun. httpx has 2.8 of these words per 100, svcs 4.7, click 5.5 (measured in 2026).
WORDS = """
it its itself this that these those what whatever who whoever whom whose which one ones none nobody nothing somebody
something everybody everything anybody anything there such so thereby whence other others another
"""
PRONOUNS = frozenset(WORDS.split())
MOST_IN_ALL, MOST_IN_A_FILE = 5.5, 9.0
LEAST_WORDS = 60  # a shorter file has too few words for a rate
CODE = ("launcher", "backends", "entrypoints", "templates")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def texts(path: Path) -> list[tuple[int, str]]:
    """Return each docstring and comment of a Python file with its line."""
    source = path.read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(source, str(path))) if isinstance(node, DOCUMENTED)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        *((getattr(node, "lineno", 1), ast.get_docstring(node) or "") for node in nodes),
        *((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT),
    ]


def prose(path: Path) -> Iterator[str]:
    """Yield each docstring and comment of a Python file, or the text of a page without its code blocks."""
    if path.suffix == ".md":
        page = re.sub(r"```.*?```", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        yield "\n".join(line for line in page.splitlines() if not line.startswith("    "))
    else:
        yield from (text.lstrip("# ") for _, text in texts(path) if not text.startswith(("#!", "# type:", "# noqa")))


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without names in backticks and without addresses."""
    return re.findall(r"[a-z']+", re.sub(r"`[^`]*`|https?://\S+", " ", text).lower())


@cache
def counts(path: Path) -> tuple[int, int]:
    """Return the pronouns and the words of a file's prose."""
    found = words("\n".join(prose(path)))
    return sum(word in PRONOUNS for word in found), len(found)


def files(*names: str) -> list[Path]:
    """Return the Python files and pages of the folders, and the named files."""
    found = [ROOT / name for name in names]
    inside = [path for folder in found for kind in ("*.py", "*.md") for path in folder.rglob(kind)]
    return sorted([path for path in found if path.is_file()] + inside)


@pytest.mark.parametrize("names", [CODE, ("README.md", "docs")], ids=["code", "pages"])
def test_prose_names_its_nouns(names: tuple[str, ...]) -> None:
    """All files together stay below the rate of click."""
    pronouns, total = map(sum, zip(*map(counts, files(*names)), strict=True))
    assert 100 * pronouns / total <= MOST_IN_ALL, f"{100 * pronouns / total:.1f} pronouns per 100 words"


def test_no_file_of_the_code_is_far_above_the_rate() -> None:
    """Each file with enough words stays below the limit of a file."""
    rates = {str(path.relative_to(ROOT)): counts(path) for path in files(*CODE)}
    high = {name: 100 * pronouns / total for name, (pronouns, total) in rates.items() if total >= LEAST_WORDS}
    assert [name for name, rate in high.items() if rate > MOST_IN_A_FILE] == []


def test_rate_counts_pronouns_only() -> None:
    """Names in backticks, addresses and nouns do not count."""
    assert PRONOUNS.isdisjoint(words("Return the job. `it` https://example.com/it"))
    assert sum(word in PRONOUNS for word in words("It is what it is")) == 3


# -- names of classes and files -------------------------------------------------------------------------------------

FILES = [path for top in ("launcher", "backends", "entrypoints") for path in sorted((ROOT / top).rglob("*.py"))]
FOREIGN_WORDS = {"Cloud", "Logging", "NaN", "Python"}  # in sentences about errors
FOREIGN_FILES = {
    "cloudtrain/__init__.py": "does not exist: a namespace package",
    "code/train.py": "an example of a user's file",
    "entities/_job/job_limits.py": "a file of Azure's SDK",
    "platform.py": "of the standard library",
    "signal.py": "of the standard library",
    "version.py": "of torch",
}


def test_each_raised_class_exists() -> None:
    """A name behind "Raises" is a class of the product, a builtin, or imported from a library."""
    known = {*dir(builtins), *FOREIGN_WORDS}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            known |= {node.name} if isinstance(node, ast.ClassDef) else set()
            known |= {node.attr} if isinstance(node, ast.Attribute) else set()  # http.client.HTTPException
            known |= {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
    missing = [
        (str(path.relative_to(ROOT)), line, name)
        for path in FILES
        for line, text in texts(path)
        for sentence in re.findall(r"\b[Rr]aise[sd]?\b([^.:;]*)", text)
        for name in re.findall(r"\b[A-Z][a-z]\w+", sentence)
        if name not in known
    ]
    assert missing == []


def test_each_named_file_exists() -> None:
    """A path to a module or page is a path in the repository, from the root or from any folder."""
    skipped = re.compile(r"(\.[^/]*|node_modules|typings)(/|$)")
    tops = [path for path in ROOT.iterdir() if not skipped.match(path.name)]
    named = [path for top in tops for path in (top.rglob("*.[mp][dy]") if top.is_dir() else [top])]
    parts = [path.relative_to(ROOT).parts for path in named]
    known = {"/".join(each[start:]) for each in parts for start in range(len(each))}
    missing = [
        (str(path.relative_to(ROOT)), line, name)
        for path in FILES
        for line, text in texts(path)
        for name in re.findall(r"(?<![\w/.~$:*{<-])(?:\w+/)*[\w-]+\.(?:py|md)\b", text)
        if name not in known | FOREIGN_FILES.keys()
    ]
    assert missing == []


def test_no_text_refers_to_a_numbered_item() -> None:
    """A reference names a page of the repository, not an item of a list that only its author has seen."""
    wrong = [
        (str(path.relative_to(ROOT)), line)
        for path in FILES
        for line, text in texts(path)
        if re.search(r"\bDESIGN\b|\bitem \d", text)
    ]
    assert wrong == []
