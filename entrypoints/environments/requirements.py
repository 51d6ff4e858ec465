"""The packages that a job asks for, as the text of a pip file: from a pip file, pyproject.toml or a PEP 723 header.

The launcher uses the same functions, so `validate` finds a fault before a node does.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .. import foreign
from ..errors import Refused

_TOML = ("tomllib", "tomli", "pip._vendor.tomli")  # of Python 3.11 and newer, of the launcher, of any pip
_EXTRAS = re.compile(r"([\w.-]+)\s*\[([^\]]*)\]\s*$")
_ODD = re.compile(r"[^A-Za-z0-9]|.*[\r\n\\]", re.DOTALL)  # for pip's file: an option, a second line, a continued line
_OF_TORCH = {"torch", "torchvision", "torchaudio", "triton"}  # the image's, or of one version with the image's
_NAMES = "write the packages into a requirements.txt by their names on PyPI"
_EXPORT = "uv export --no-emit-project -o requirements.txt"
# Names of other tools' files -> the tool, and the way to a file for pip.
_OTHERS = (
    (r".+\.ya?ml", "conda", f"{_NAMES}; `ssh.environment: conda`, or an image, runs a conda environment"),
    (r"uv\.lock", "uv", f"`{_EXPORT}` writes the same versions and hashes for pip"),
    (r"pylock(\..+)?\.toml", "a lock", f"export a requirements.txt from it: `{_EXPORT}`, `pdm export -o ...`"),
    (r"(poetry|pdm)\.lock", "{1}", "`{1} export -o requirements.txt` writes the same versions and hashes for pip"),
    (r"Pipfile(\.lock)?", "pipenv", "`pipenv requirements --hash > requirements.txt` writes the same for pip"),
    (r"pixi\.(toml|lock)", "pixi", _NAMES),
    (r"setup\.(py|cfg)", "setuptools", "install the project by `setup: [pip install .]`, or list its packages"),
)


@dataclass(frozen=True)
class Requirements:
    """The text of a file for pip."""

    text: str
    folder: Path
    """For relative paths in the text."""
    python: str | None = None
    """The value of `requires-python`."""
    file: str | None = None
    """The file in the folder with exactly this text, if a file exists."""


def split(wanted: str) -> tuple[str, tuple[str, ...]]:
    """Return the path and the extras of `pyproject.toml[train, dev]`; any path but a TOML file's has no extras."""
    match = re.fullmatch(r"(.+\.toml)\s*\[([^\[\]]*)\]\s*", wanted, re.DOTALL)
    return (match[1], tuple(extra.strip() for extra in match[2].split(","))) if match else (wanted, ())


def read(wanted: str, code: Path) -> Requirements:
    """Return the requirements in the file below `code`. Raises Refused with the file's name and the cure."""
    name, extras = split(wanted)
    path = code / name
    for pattern, tool, way in _OTHERS:
        if (named := re.fullmatch(pattern, path.name)) and path.is_file():
            words = f"`{{0}}` is a file of {tool}, and pip installs the requirements; {way}"
            raise Refused(words.format(name, *named.groups()))
    try:
        if not path.resolve().is_relative_to(code.resolve()):
            raise Refused(f"`{name}` is outside the code folder; only files below the folder are shipped")
        text = foreign.read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"`{name}` is not UTF-8 text; save the file as UTF-8") from error
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError) as error:
        raise Refused(f"the code holds no file `{name}`; is the file excluded from the shipped code?") from error
    except OSError as error:
        raise Refused(f"`{name}` cannot be read: {error.strerror}") from error
    if path.suffix == ".toml":
        table = _table(text, name)
        project = table.get("project")
        if not isinstance(project, dict):
            way = "list the packages there, or in a requirements.txt"
            if "poetry" in (table.get("tool") or {}):
                way = "`poetry export -o requirements.txt` writes the packages for pip"
            raise Refused(f"`{name}` has no table [project]; {way}")
        groups = table.get("dependency-groups") or {}
        lines, python = list(dict.fromkeys(_of_project(project, name, extras, groups))), project.get("requires-python")
    elif path.suffix == ".py":
        table = _header(text, name)
        lines, python = _listed(table.get("dependencies", []), f"{name}: dependencies"), table.get("requires-python")
    else:
        return Requirements(text, path.parent, file=path.name)
    _require_no_sources(table, lines, name)
    return Requirements("".join(f"{line}\n" for line in lines), path.parent, str(python) if python else None)


def _require_no_sources(table: dict[str, Any], lines: list[str], name: str) -> None:
    """Raise Refused for packages that uv takes from a path, a repository or another index: pip would ask PyPI."""
    uv = (table.get("tool") or {}).get("uv") or {}
    asked = {_plain(named[0]) for line in lines if (named := re.match(r"[\w.-]+", line))} - _OF_TORCH
    if elsewhere := [each for each in uv.get("sources") or () if _plain(each) in asked]:
        export = _EXPORT.replace("--no-emit-project", "--no-editable --no-emit-project")
        way = f"uv export --script {name} -o requirements.txt" if name.endswith(".py") else export
        words = f"`{name}` says in [tool.uv.sources] where `{'`, `'.join(elsewhere)}` comes from, which"
        raise Refused(f"{words} pip does not read; `{way}` writes the packages for pip")


def _of_project(
    project: dict[str, Any], name: str, extras: tuple[str, ...], groups: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the project's dependencies, then the extras' packages; an extra may name more extras of the project."""
    dynamic = project.get("dynamic") or []
    for key in ("dependencies", *(["optional-dependencies"] if extras else [])):
        if key in dynamic:
            hint = "write the packages into a requirements.txt, or install the project by `setup: [pip install .]`"
            raise Refused(f"`{name}` leaves `{key}` to its build (dynamic), so the packages are not known; {hint}")
    yield from _listed(project.get("dependencies", []), f"{name}: dependencies")
    optional = project.get("optional-dependencies") or {}
    known = {_plain(extra): extra for extra in optional} if isinstance(optional, dict) else {}
    waiting, seen = [_plain(extra) for extra in extras], set[str]()
    while waiting:
        extra = waiting.pop(0)
        if extra not in known:
            close = get_close_matches(extra, known, 1)
            hint = f"did you mean `{known[close[0]]}`?" if close else f"known extras: {', '.join(known) or 'none'}"
            if extra in map(_plain, groups):
                hint = f"it is a dependency group: `{_EXPORT} --group {extra}` writes its packages for pip"
            raise Refused(f"`{name}` has no extra `{extra}`; {hint}")
        seen.add(extra)
        for line in _listed(optional[known[extra]], f"{name}: optional-dependencies.{known[extra]}"):
            more = _EXTRAS.match(line)
            if more and _plain(more[1]) == _plain(str(project.get("name"))):
                waiting += [each for each in map(_plain, more[2].split(",")) if each not in {*seen, *waiting}]
            else:
                yield line


def headers(text: str) -> list[str]:
    """Return the script's headers (PEP 723), without their first and last lines; one pass over the text."""
    found: list[str] = []
    inside: list[str] | None = None
    end = 0  # of the header: its last `# ///`
    for line in [*text.replace("\r\n", "\n").split("\n"), ""]:
        if inside is not None and (line == "#" or line.startswith("# ")):
            inside.append(line)
            end = len(inside) - 1 if line == "# ///" else end
            continue
        if inside is not None and end:
            found.append("\n".join(inside[:end]))
        inside, end = ([], 0) if line == "# /// script" else (None, 0)
    return found


def _header(text: str, name: str) -> dict[str, Any]:
    found = headers(text)
    if len(found) != 1:
        words = "no header `# /// script` (PEP 723)" if not found else "several headers `# /// script` (PEP 723)"
        raise Refused(f"`{name}` has {words}; write one, or name a requirements.txt")
    return _table("".join(line[2:] + "\n" for line in found[0].split("\n")), name)


def _table(text: str, name: str) -> dict[str, Any]:
    for module in _TOML:
        with contextlib.suppress(ImportError):
            reader = importlib.import_module(module)
            break
    else:
        raise Refused(f"nothing here reads `{name}`: Python 3.10 needs pip or tomli for TOML")
    try:
        found: dict[str, Any] = reader.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"`{name}` is not valid TOML: {error}") from error
    return found


def _listed(value: Any, where: str) -> list[str]:
    """Return the list of requirements. Raises Refused for text that pip would read as an option or a second line."""
    if not isinstance(value, list):
        raise Refused(f"{where} is not a list")
    for each in value:
        if not isinstance(each, str) or _ODD.match(each.strip()):
            raise Refused(f"{where} holds {each!r}, which is not a requirement such as `numpy>=2`")
    return [each.strip() for each in value]


def _plain(name: str) -> str:
    """Return a name as packaging compares names."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
