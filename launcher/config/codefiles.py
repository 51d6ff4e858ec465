"""The Python files that a config names: are they there, are they Python, and does a task hold its functions.

Files are read and compiled, never imported: their imports need torch, and may do anything.
"""

from __future__ import annotations

import ast
import os
import stat
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path, PurePath

from cloudtrain.launcher.config.rules import given
from cloudtrain.launcher.config.schemafaults import named, quoted
from cloudtrain.launcher.config.yamlfile import Node
from cloudtrain.launcher.errors import Fault, Place

__all__ = ["TASK_FUNCTIONS", "faults_of"]

# What a task file must hold, and the arguments each function is called with.
TASK_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "model": ("params",),
    "dataset": ("params", "split"),
    "loss": ("model", "batch"),
}
_OPTIONAL_FUNCTIONS = {"optimizer": ("model", "params"), "evaluate": ("model", "batch"), "collate": ("samples",)}
_LARGEST_SOURCE = 2_000_000  # bytes


def faults_of(root: Node, folder: Path) -> list[Fault]:
    """Return what is wrong with the files that the config in `folder` names."""
    node = given(root, "code", "dir")
    code_dir = folder / (node.value if node and isinstance(node.value, str) else ".")
    if node and isinstance(node.value, str) and _what(code_dir) != "folder":
        hint = "a path is relative to the config file" if not _what(code_dir) else "it is a file"
        return [] if node.broken else [Fault(f"no folder `{named(node)}`", "code.dir", node.place, hint)]
    return [fault for key in ("task", "script") for fault in _file_faults(root, key, folder, code_dir)]


def _file_faults(root: Node, key: str, folder: Path, code_dir: Path) -> Iterator[Fault]:
    node = given(root, key)
    if node is None or node.broken or not isinstance(node.value, str) or not node.value.strip():
        return
    file = code_dir / node.value
    inside = os.path.relpath(os.path.normpath(file), os.path.normpath(code_dir))
    if PurePath(inside).parts[:1] == ("..",) or PurePath(node.value).is_absolute():
        hint = (
            f"only what is below it is shipped to the nodes: move the file, or set `code.dir`; write `{key}` relative"
        )
        yield Fault(f"`{named(node)}` is outside the code folder", key, node.place, hint)
    elif _what(file) != "file":
        yield Fault(f"no file `{named(node)}`", key, node.place, _missing_hint(node, folder, code_dir))
    elif file.suffix != ".py":
        yield Fault(
            f"`{named(node)}` is not a Python file", key, node.place, "torchrun starts Python: name a `.py` file"
        )
    else:
        yield from _source_faults(file, key, node)


def _what(path: Path) -> str:
    """Return "file", "folder", or nothing: also for a name that no file system takes."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return ""
    return "folder" if stat.S_ISDIR(mode) else "file"


def _missing_hint(node: Node, folder: Path, code_dir: Path) -> str:
    wanted = folder / node.value
    if code_dir != folder and _what(wanted) == "file" and wanted.is_relative_to(code_dir):
        return f"a path is relative to `code.dir`: write `{wanted.relative_to(code_dir).as_posix()}`"
    parent = (code_dir / node.value).parent
    try:
        names = sorted(entry.name for entry in parent.iterdir() if entry.suffix == ".py")
    except OSError:
        names = []
    prefix = PurePath(node.value).parent
    if close := get_close_matches(PurePath(node.value).name, names, 1):
        return f"did you mean `{(prefix / close[0]).as_posix()}`?"
    if 0 < len(names) <= 6:
        return f"Python files there: {quoted((prefix / name).as_posix() for name in names)}"
    return "`cloudtrain init` writes an example" if not names else ""


def _source_faults(file: Path, key: str, node: Node) -> Iterator[Fault]:
    try:
        source = file.read_bytes()
    except OSError as exc:
        yield Fault(f"`{named(node)}` cannot be read: {exc.strerror}", key, node.place)
        return
    if len(source) > _LARGEST_SOURCE:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in the user's text is no fault of the config
            tree = ast.parse(source, os.fspath(file))
            compile(tree, os.fspath(file), "exec", dont_inherit=True)
    except SyntaxError as exc:
        yield _syntax_fault(exc, file, key, node)
    except (ValueError, RecursionError, MemoryError) as exc:
        yield Fault(f"`{named(node)}` is not Python: {exc}", key, node.place)
    else:
        if key == "task":
            yield from _task_faults(tree, file, node)


def _syntax_fault(exc: SyntaxError, file: Path, key: str, node: Node) -> Fault:
    if not exc.lineno:
        return Fault(f"`{named(node)}` is not Python: {exc.msg}", key, node.place)
    text = (exc.text or "").rstrip("\n")
    place = Place(os.fspath(file), exc.lineno, min(max(exc.offset or 1, 1), len(text) + 1), text)
    return Fault(f"{exc.msg[:1].lower()}{exc.msg[1:]}", key, place, also=(node.place,))


def _task_faults(tree: ast.Module, file: Path, node: Node) -> Iterator[Fault]:
    names = dict(_top_level(tree.body))
    if "*" in names:
        return  # an import of everything may bring them in
    missing = [name for name in TASK_FUNCTIONS if name not in names]
    if missing:
        calls = [f"{name}({', '.join(TASK_FUNCTIONS[name])})" for name in missing]
        close = [(name, match[0]) for name in missing if (match := get_close_matches(name, names, 1, 0.7))]
        hint = "; ".join(f"is `{match}` meant to be `{name}`?" for name, match in close)
        yield Fault(
            f"`{named(node)}` has no {quoted(calls)}",
            "task",
            node.place,
            hint or "a task file holds model(params), dataset(params, split) and loss(model, batch)",
        )
    for name, arguments in {**TASK_FUNCTIONS, **_OPTIONAL_FUNCTIONS}.items():
        function = names.get(name)
        if isinstance(function, ast.FunctionDef) and not _takes(function, len(arguments)):
            line = ast.unparse(function).splitlines()[len(function.decorator_list)]
            place = Place(os.fspath(file), function.lineno, function.col_offset + 1, line)
            message = f"`{name}` cannot be called as `{name}({', '.join(arguments)})`"
            yield Fault(message, "task", place, also=(node.place,))


def _top_level(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a module defines, in `if` and `try` too, with the statement that does it."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name), statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                yield from ((part.id, statement) for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _top_level(statement.body)
            yield from _top_level(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)


def _takes(function: ast.FunctionDef, count: int) -> bool:
    """Say whether the function can be called with `count` positional arguments."""
    spec = function.args
    most = len(spec.posonlyargs) + len(spec.args)
    fewest = most - len(spec.defaults)
    named_only = sum(default is None for default in spec.kw_defaults)
    return (spec.vararg is not None or count <= most) and fewest <= count and not named_only
