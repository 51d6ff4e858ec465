"""Comments and docstrings name classes and files that exist."""

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for top in ("launcher", "backends", "entrypoints") for path in sorted((ROOT / top).rglob("*.py"))]
TREES = {path: ast.parse(path.read_bytes(), str(path)) for path in FILES}
FOREIGN_WORDS = {"Cloud", "Logging", "NaN", "Python"}  # in sentences about errors
FOREIGN_FILES = {
    "cloudtrain/__init__.py": "does not exist: a namespace package",
    "code/train.py": "an example of a user's file",
    "entities/_job/job_limits.py": "a file of Azure's SDK",
    "platform.py": "of the standard library",
    "signal.py": "of the standard library",
    "version.py": "of torch",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each docstring and comment of a file with its line."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_each_raised_class_exists() -> None:
    """A name behind "Raises" is a class of the product, a builtin, or imported from a library."""
    known = {*dir(builtins), *FOREIGN_WORDS}
    for tree in TREES.values():
        for node in ast.walk(tree):
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
    names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.[mp][dy]")]
    parts = [name.split("/") for name in names if not skipped.match(name)]
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
