"""Checks the files that a config names: each file exists, is Python, and a task file defines its functions.

Files are read and compiled, never imported: the imports of a file need torch, and may have any effect.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib.util
import os
import re
import shlex
import stat
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path, PurePath

from cloudtrain.entrypoints import foreign

from ..backend_table import traits
from ..errors import Fault, Place
from . import accelerate
from .schema import JobConfig, blocks_of
from .schemafaults import named, quoted, slashed
from .yamlfile import YamlNode, given

# The functions that a task file must define, with the arguments that the trainer passes to each function.
TASK_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "model": ("params",),
    "dataset": ("params", "split"),
    "loss": ("model", "batch"),
}
_OPTIONAL_FUNCTIONS = {"optimizer": ("model", "params"), "evaluate": ("model", "batch"), "collate": ("samples",)}
_LARGEST_SOURCE = 50_000_000  # bytes
# Options whose file or folder a script writes, and options whose folder it reads.
_WRITTEN = re.compile(r"out|log|save|dest|result|cache|dump", re.IGNORECASE)
_READ = re.compile(r"data|input|corpus|conf", re.IGNORECASE)
_DEFAULT = re.compile(r"""add_argument\(\s*["'](--[\w-]+)["'][^()]*\bdefault\s*=\s*["']([^"'\n]+)["']""")


def faults_of(root: YamlNode, folder: Path) -> list[Fault]:
    """Return the faults of the files that the config in `folder` names."""
    node = given(root, "code", "dir")
    code_dir = folder / (node.value if node and isinstance(node.value, str) else ".")
    if node and isinstance(node.value, str) and kind_of(code_dir) != "folder":
        hint = slashed(node.value) or ("it is a file" if kind_of(code_dir) else "a path is relative to the config file")
        return [] if node.broken else [Fault(f"no folder `{named(node)}`", "code.dir", node.place, hint)]
    of_blocks = (f"{name}.{key}" for name in blocks_of(root.value) for key in traits(name).code_files)
    keys = ("task", "script", "requirements", accelerate.KEY, *of_blocks)
    faults = [fault for key in keys for fault in _file_faults(root, key, folder, code_dir)]
    node = _named_by(root, "distributed.workdir")
    start = code_dir / (node.value if node else "")
    if node and not (start.resolve().is_relative_to(code_dir.resolve()) and kind_of(start) == "folder"):
        hint = "the folder in which the ranks start is one of the shipped code, and relative to `code.dir`"
        hint = slashed(node.value) or hint
        return [*faults, Fault(f"no folder `{named(node)}` in the code", "distributed.workdir", node.place, hint)]
    return [*faults, *_module_faults(root, start)]


def _file_faults(root: YamlNode, key: str, folder: Path, code_dir: Path) -> Iterator[Fault]:
    node = _named_by(root, key)
    if node is None:
        return
    # `pyproject.toml[extra]` names a file and an extra of the project.
    file = code_dir / (node.value.partition("[")[0] if ".toml[" in node.value else node.value)
    inside = os.path.relpath(os.path.normpath(file), os.path.normpath(code_dir))
    if PurePath(inside).parts[:1] == ("..",) or node.value.startswith(("/", "~")):
        hint = f"only files below it are shipped to the nodes: move the file, or set `code.dir`; write `{key}` relative"
        yield Fault(f"`{named(node)}` is outside the code folder", key, node.place, hint)
    elif kind_of(file) != "file":
        yield Fault(f"no file `{named(node)}`", key, node.place, _missing_hint(node, key, folder, code_dir))
    elif key.endswith("requirements"):
        yield from _requirements_faults(node, code_dir, key)
    elif "." in key:  # not code: of a backend's block, or accelerate's settings
        return
    elif file.suffix == ".ipynb":
        hint = f"jupyter nbconvert --to script {shlex.quote(node.value)}; then write `{key}: {node.value[:-6]}.py`"
        yield Fault(f"`{named(node)}` is a notebook, and torchrun starts Python files", key, node.place, hint)
    elif file.suffix != ".py":
        hint = "torchrun starts Python: name a `.py` file"
        yield Fault(f"`{named(node)}` is not a Python file", key, node.place, hint)
    else:
        yield from _source_faults(file, key, node)


def _named_by(root: YamlNode, key: str) -> YamlNode | None:
    """Return the node of a key that names a file; None if the key is missing, empty or already faulty."""
    node = given(root, *key.split("."))
    is_named = node is not None and not node.broken and isinstance(node.value, str) and node.value.strip()
    return node if is_named else None


def _requirements_faults(node: YamlNode, code_dir: Path, key: str) -> Iterator[Fault]:
    """Yield the faults of a requirements file, and of the files that the requirements file includes."""
    from cloudtrain.entrypoints.environments import requirements, venvs
    from cloudtrain.entrypoints.errors import Refused

    try:
        found = requirements.read(node.value, code_dir)
        venvs.check(found.text, found.folder if key == "requirements" else code_dir)
    except Refused as refused:
        message, _, hint = str(refused).partition("; ")
        yield Fault(message, key, node.place, hint)


def kind_of(path: Path) -> str:
    """Return "file" or "folder"; empty text if the path does not exist, or if no file system accepts the name."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return ""
    return "folder" if stat.S_ISDIR(mode) else "file"


def _missing_hint(node: YamlNode, key: str, folder: Path, code_dir: Path) -> str:
    if hint := slashed(node.value):
        return hint
    wanted = folder / node.value
    if code_dir != folder and kind_of(wanted) == "file" and wanted.is_relative_to(code_dir):
        return f"a path is relative to `code.dir`: write `{wanted.relative_to(code_dir).as_posix()}`"
    words = node.value.split()
    for number, word in enumerate(words if len(words) > 1 else ()):  # a command line: `python train.py --lr 1`
        if kind_of(code_dir / word) == "file" or words[number - 1 : number] == ["-m"]:
            key = "module" if words[number - 1 : number] == ["-m"] else "script"
            rest = f" and `args: {' '.join(words[number + 1 :])}`" if words[number + 1 :] else ""
            return f"one name alone: write `{key}: {word}`{rest}"
    is_list = key.endswith("requirements")
    path, suffix = PurePath(node.value), PurePath(node.value.partition("[")[0]).suffix
    suffix = suffix or (".txt" if is_list else ".py")
    prefix = path if is_list and kind_of(code_dir / path) == "folder" else path.parent
    names = names_in(code_dir / prefix, suffix)
    if close := get_close_matches(path.name, names, 1):
        return f"did you mean `{(prefix / close[0]).as_posix()}`?"
    if 0 < len(names) <= 6:
        kind = "Python files" if suffix == ".py" else f"`{suffix}` files"
        return f"{kind} there: {quoted((prefix / name).as_posix() for name in names)}"
    if is_list:
        return "it names a file, with one package a line, such as requirements.txt"
    return "`cloudtrain init` writes an example" if not names and suffix == ".py" else ""


def names_in(folder: Path, suffix: str) -> list[str]:
    """Return the names in the folder that have the suffix, sorted; an empty list if the folder cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix == suffix)
    except OSError:
        return []


def _module_faults(root: YamlNode, code_dir: Path) -> Iterator[Fault]:
    """Yield the faults of `module` if the code folder has the top-level package; the nodes may have other packages."""
    node = _named_by(root, "module")
    if node is None:
        return
    name, parts = node.value, node.value.split(".")
    if "/" in name or "\\" in name or not all(parts) or parts[-1] == "py":
        path = PurePath(*re.split(r"[./\\]", name.removesuffix(".py")))
        hint = f"write `script: {path}.py`, or `module: {'.'.join(path.parts)}`" if all(parts) else "as in `pkg.train`"
        yield Fault(f"`{named(node)}` is not a valid module name", "module", node.place, hint)
        return
    if not is_in_code(code_dir, parts[0]):
        return
    here = code_dir
    for place, part in enumerate(parts):
        is_last, file = place == len(parts) - 1, here / f"{part}.py"
        if is_last and kind_of(file) == "file" and kind_of(here / part / "__init__.py") != "file":
            yield from _source_faults(file, "module", node)
            return
        if kind_of(here / part) != "folder":
            wanted = f"{'/'.join(parts[: place + 1])}{'.py' if is_last else '/'}"
            known = [Path(each).stem for each in names_in(here, ".py")] + names_in(here, "")
            close = get_close_matches(part, known, 1)
            hint = f"did you mean `{'.'.join([*parts[:place], *close, *parts[place + 1 :]])}`?" if close else ""
            yield Fault(f"no module `{named(node)}`: the code folder holds no `{wanted}`", "module", node.place, hint)
            return
        here /= part
    if kind_of(here / "__main__.py") == "file":
        yield from _source_faults(here / "__main__.py", "module", node)
        return
    runs = [f"{name}.{Path(each).stem}" for each in names_in(here, ".py") if not each.startswith("_")]
    hint = f"modules there: {quoted(runs[:6])}" if runs else f"add `{'/'.join(parts)}/__main__.py`"
    yield Fault(f"`{named(node)}` is a package without `__main__.py`, and cannot be run", "module", node.place, hint)


def is_in_code(code_dir: Path, name: str) -> bool:
    """Return whether Python finds this module in the code folder; an installed module hides a bare folder."""
    if "file" in (kind_of(code_dir / f"{name}.py"), kind_of(code_dir / name / "__init__.py")):
        return True
    return kind_of(code_dir / name) == "folder" and not is_installed(name)


def is_installed(name: str, apart_from: Path | None = None) -> bool:
    """Return whether this Python has the top-level module, not below `apart_from`; a bare folder does not count."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    origin = spec.origin if spec is not None else None
    return origin is not None and not (apart_from and Path(origin).resolve().is_relative_to(apart_from.resolve()))


def _source_faults(file: Path, key: str, node: YamlNode) -> Iterator[Fault]:
    try:
        source = foreign.read(file)
    except OSError as exc:
        if exc.errno == errno.EFBIG and file.stat().st_size <= _LARGEST_SOURCE:
            return  # with embedded data: not parsed here
        yield Fault(f"`{named(node)}` cannot be read: {exc.strerror}", key, node.place)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in the user's code is not a fault of the config
            tree = ast.parse(source, os.fspath(file))
            compile(tree, os.fspath(file), "exec", dont_inherit=True)
    except SyntaxError as exc:
        if not exc.lineno:
            yield Fault(f"`{named(node)}` is not Python: {exc.msg}", key, node.place)
            return
        text = (exc.text or "").rstrip("\n")
        place = Place(os.fspath(file), exc.lineno, min(max(exc.offset or 1, 1), len(text) + 1), text)
        yield Fault(f"{exc.msg[:1].lower()}{exc.msg[1:]}", key, place, also=(node.place,))
    except (ValueError, RecursionError, MemoryError) as exc:
        hint = "save the file as UTF-8" if "null bytes" in str(exc) else ""  # an editor of Windows wrote UTF-16
        yield Fault(f"`{named(node)}` is not Python: {exc}", key, node.place, hint)
    else:
        if key == "task":
            yield from _task_faults(tree, file, node)
        if key == "script":
            yield from _relative_faults(tree, source, file, node)


def _relative_faults(tree: ast.Module, source: bytes, file: Path, node: YamlNode) -> Iterator[Fault]:
    """Yield a fault for the first top-level relative import of a script: Python runs a script outside any package."""
    found = next((each for each in tree.body if isinstance(each, ast.ImportFrom) and each.level), None)
    if found is None:
        return
    parts = PurePath(os.path.normpath(node.value)).with_suffix("").parts
    line = source.decode(errors="replace").splitlines()[found.lineno - 1]
    place = Place(os.fspath(file), found.lineno, found.col_offset + 1, line)
    hint = f"write `module: {'.'.join(parts)}` in place of `script`" if len(parts) > found.level else ""
    hint = hint or "the file is in no package: import without the dot"
    message = "a relative import works in a module of a package, not in a script"
    yield Fault(message, "script", place, hint, also=(node.place,))


def _task_faults(tree: ast.Module, file: Path, node: YamlNode) -> Iterator[Fault]:
    names = dict(_top_level(tree.body))
    if "*" in names:
        return  # `from x import *` may define the functions
    missing = [name for name in TASK_FUNCTIONS if name not in names]
    if missing:
        calls = [f"{name}({', '.join(TASK_FUNCTIONS[name])})" for name in missing]
        close = [(name, match[0]) for name in missing if (match := get_close_matches(name, names, 1, 0.7))]
        hint = "; ".join(f"is `{match}` meant to be `{name}`?" for name, match in close)
        hint = hint or "a task file holds model(params), dataset(params, split) and loss(model, batch)"
        yield Fault(f"`{named(node)}` has no {quoted(calls)}", "task", node.place, hint)
    for name, arguments in {**TASK_FUNCTIONS, **_OPTIONAL_FUNCTIONS}.items():
        function = names.get(name)
        if isinstance(function, ast.FunctionDef) and not _takes(function, len(arguments)):
            line = ast.unparse(function).splitlines()[len(function.decorator_list)]
            place = Place(os.fspath(file), function.lineno, function.col_offset + 1, line)
            message = f"`{name}` cannot be called as `{name}({', '.join(arguments)})`"
            yield Fault(message, "task", place, also=(node.place,))


def _top_level(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each name that a module defines, with the defining statement; `if`, `try` and `with` are searched too."""
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
    """Return whether the function can be called with `count` positional arguments."""
    spec = function.args
    most = len(spec.posonlyargs) + len(spec.args)
    fewest = most - len(spec.defaults)
    named_only = sum(default is None for default in spec.kw_defaults)
    return (spec.vararg is not None or count <= most) and fewest <= count and not named_only


def needed(config: JobConfig, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the keys that name files of the code, each with a path below `folder`; `args` where they name a path.

    An option that `args` leaves out has the script's default.
    """
    named = {"script": config.script, "task": config.task, accelerate.KEY: config.distributed.accelerate_config}
    yield from ((key, name) for key, name in named.items() if name and kind_of(folder / name) == "file")
    start = PurePath(config.distributed.workdir or ".")
    module = os.path.normpath(start.joinpath(*(config.module or "").split(".")))
    for name in (f"{module}.py", f"{module}/__main__.py") if config.module else ():
        if kind_of(folder / name) == "file":
            yield "module", name
    before, typed = "", {word.partition("=")[0] for word in config.args}
    text = foreign.text_of(folder / config.script) if config.script else ""
    defaults = [] if "CLOUDTRAIN_INPUT_" in text else _DEFAULT.findall(text)
    words = [*config.args, *(f"{option}={value}" for option, value in defaults if option not in typed)]
    for option, _, value in (word.rpartition("=") for word in words):
        name = os.path.normpath(start / value)
        is_kept = any(PurePath(value).is_relative_to(kept) for kept in config.keep)  # the job itself writes the file
        is_read = not (is_kept or _WRITTEN.search(option or before) or name.startswith(("..", "/")))
        kind = kind_of(folder / name)
        if is_read and (kind == "file" or (kind and _READ.search(option or before))):
            yield "args", name
        before = value
    for key, wanted in lists_of_packages(config):
        from cloudtrain.entrypoints.environments import requirements, venvs  # few jobs have requirements
        from cloudtrain.entrypoints.errors import Refused

        yield key, requirements.split(wanted)[0]
        with contextlib.suppress(Refused):
            found, top = requirements.read(wanted, folder), folder.resolve()
            below = venvs.check(found.text, found.folder if key == "requirements" else folder)
            yield from ((key, path.relative_to(top).as_posix()) for path in below if path.is_relative_to(top))


def lists_of_packages(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that name a list of packages, each with its value."""
    own = getattr(getattr(config, config.backend, None), "requirements", None)
    for key, wanted in (("requirements", config.requirements), (f"{config.backend}.requirements", own)):
        if wanted:
            yield key, wanted
