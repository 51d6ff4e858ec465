"""How plain the English of docstrings, comments and pages is: pronouns per 100 words, as an upper bound."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Words that replace a noun. httpx has 2.8 of these words per 100, svcs 4.7, click 5.5 (measured in 2026).
PRONOUNS = frozenset(
    [
        "it",
        "its",
        "itself",
        "this",
        "that",
        "these",
        "those",
        "what",
        "whatever",
        "who",
        "whoever",
        "whom",
        "whose",
        "which",
        "one",
        "ones",
        "none",
        "nobody",
        "nothing",
        "somebody",
        "something",
        "everybody",
        "everything",
        "anybody",
        "anything",
        "there",
        "such",
        "so",
        "thereby",
        "whence",
        "other",
        "others",
        "another",
    ]
)
MOST_IN_ALL, MOST_IN_A_FILE = 5.5, 9.0
LEAST_WORDS = 60  # a shorter file has too few words for a rate
CODE = ("launcher", "backends", "entrypoints", "templates")


def prose(path: Path) -> Iterator[str]:
    """Yield each docstring and comment of a Python file, or the text of a page without its code blocks."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        page = re.sub(r"```.*?```", " ", source, flags=re.DOTALL)
        yield "\n".join(line for line in page.splitlines() if not line.startswith("    "))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# type:", "# noqa")):
            yield token.string.lstrip("# ")


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
