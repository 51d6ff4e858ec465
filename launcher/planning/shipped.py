"""Which files of the code folder a job ships: ignore files, secrets, links, modes and the size are looked at."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.models.folder import CHECK, SUMS

from ..errors import ConfigError, Fault, refuse
from .ignore import IgnoreFile
from .secret_files import Secrets

IGNORE_FILES = (".gitignore", ".cloudtrainignore")
# Never code, often large: left out before any ignore file is read. Names, then endings.
ALWAYS_IGNORED = {
    *(".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".DS_Store", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
}
ALWAYS_IGNORED_ENDINGS = (".pyc", ".egg-info")
GENERATOR = "cloudtrain report"  # as in the head of a report's HTML
_BEGINNING = 4000  # bytes in which a report identifies itself
MB = 1_000_000
MOST_FAULTS = 10  # files that cannot be shipped, named in the errors


class _File(NamedTuple):
    bytes: int
    mode: int

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)


class _Lines(NamedTuple):
    """An ignore file above a path: `skip` bytes of the path are not below the file's folder, or `before` is missing."""

    rules: IgnoreFile
    skip: int
    before: bytes = b""


def collect(folder: Path, exclude: Iterable[str] = ()) -> list[str]:
    """Return the files to ship, sorted, relative to `folder`. Raises ConfigError for a folder that cannot be read.

    .gitignore and .cloudtrainignore count in the folder, below it, and above it up to the git root; a later, deeper
    line wins, and .cloudtrainignore wins over .gitignore (`!name` brings a file back).
    """
    return sorted(_found(folder, exclude)[1])


def check(folder: Path, exclude: Iterable[str], max_bytes: int) -> dict[str, int]:
    """Return the files to ship, sorted, with their sizes. Raises ConfigError with every fault found."""
    sizes, secrets = look(folder, exclude, max_bytes)
    secrets.read()
    refuse_files(secrets.faults())
    return sizes


def look(folder: Path, exclude: Iterable[str], max_bytes: int) -> tuple[dict[str, int], Secrets]:
    """Return the files to ship, sorted, with their sizes, and the search of their texts, which is left to do.

    Raises ConfigError with every fault found: if there is one already, the texts are searched too.
    """
    folder, found = _found(folder, exclude)
    if not found:
        message = f"there is nothing to ship: every file of {folder} is ignored"
        raise ConfigError([Fault(message, key="code.dir")])
    sizes = {name: found[name].bytes for name in sorted(found)}
    secrets = Secrets(folder, sizes, exclude)
    faults, too_large = list(_links_and_modes(folder, found)), list(_size(sizes, max_bytes))
    if faults or too_large or any(secrets.faults()):
        secrets.read()
        refuse_files([*faults, *secrets.faults()], too_large)
    return sizes, secrets


def refuse_files(faults: Iterable[Fault], more: Iterable[Fault] = ()) -> None:
    """Raise ConfigError if there are faults, with the first faults of files and their number."""
    faults = list(faults)
    if len(faults) > MOST_FAULTS:
        message = f"{len(faults) - MOST_FAULTS} more files cannot be shipped"
        hint = "name a folder that holds only the code: code.dir, or the place of the config"
        faults[MOST_FAULTS:] = [Fault(message, key="code.dir", hint=hint)]
    refuse([*faults, *more])


def _size(sizes: Mapping[str, int], max_bytes: int) -> Iterator[Fault]:
    total = sum(sizes.values())
    if total > max_bytes:
        top = sorted(sizes.items(), key=lambda item: -item[1])[:5]
        listed = ", ".join(f"{name} {size / MB:.1f} MB" for name, size in top)
        message = f"the code folder holds {total / MB:.1f} MB, over the cap of {max_bytes / MB:.0f} MB: {listed}"
        hint = "put data under `inputs:`, exclude the files, or raise code.max_size_mb"
        yield Fault(message, key="code.max_size_mb", hint=hint)


def is_report(path: Path) -> bool:
    """Return whether the file is a report or comparison, which a newer report may replace. Raises OSError."""
    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(_BEGINNING)


def _found(folder: Path, exclude: Iterable[str]) -> tuple[Path, dict[str, _File]]:
    try:
        folder = folder.resolve(strict=True)
        return folder, _walk(folder, exclude)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        where, why = getattr(error, "filename", None) or folder, getattr(error, "strerror", None) or error
        message = f"`{where}` in the code folder cannot be read: {why}"
        raise ConfigError([Fault(message, key="code.dir", hint="mend it, or exclude it")]) from error


def _walk(root: Path, exclude: Iterable[str]) -> dict[str, _File]:
    """Return the files to ship. Raises OSError."""
    excluded = IgnoreFile("\n".join(exclude).encode(errors="surrogateescape"))
    found: dict[str, _File] = {}
    left: list[tuple[str, list[_Lines]]] = [("", _above(root))]  # no recursion: folders may be deep
    while left:
        below, lines = left.pop()
        with os.scandir(root / below) as scanned:
            entries = [each for each in scanned if not _is_never_code(each.name)]
        names = {each.name for each in entries}
        if below and {SUMS, CHECK} <= names:  # an exported model beside the code
            continue
        lines = [*lines, *_lines(root / below, names, len(os.fsencode(below)))]
        for entry in entries:
            path = below + entry.name
            is_dir = entry.is_dir(follow_symlinks=False)
            if (excluded or lines) and _is_left_out(os.fsencode(path), excluded, lines, is_dir=is_dir):
                continue
            if is_dir:
                left.append((f"{path}/", lines))
            elif entry.is_symlink() or (entry.is_file() and not _is_report(entry)):
                about = entry.stat(follow_symlinks=False)
                found[path] = _File(about.st_size, about.st_mode)
    return found


def _is_never_code(name: str) -> bool:
    return name in ALWAYS_IGNORED or name.endswith(ALWAYS_IGNORED_ENDINGS)


def _lines(folder: Path, names: Iterable[str], skip: int, before: bytes = b"") -> Iterator[_Lines]:
    """Yield the ignore files of a folder. Raises OSError, also for one that is larger than people write."""
    for name in IGNORE_FILES:
        if name in names and (folder / name).is_file() and (rules := IgnoreFile(foreign.read(folder / name))):
            yield _Lines(rules, skip, before)


def _above(root: Path) -> list[_Lines]:
    """Return the ignore files above the root, from the git root inwards; empty if there is no git root above."""
    found: list[_Lines] = []
    for folder in root.parents if not (root / ".git").exists() else ():
        before = os.fsencode(root.relative_to(folder)) + b"/"
        found[:0] = _lines(folder, IGNORE_FILES, 0, before)
        if (folder / ".git").exists():
            return found
    return []


def _is_left_out(path: bytes, excluded: IgnoreFile, lines: list[_Lines], *, is_dir: bool) -> bool:
    if excluded.verdict(path, is_dir=is_dir):
        return True
    for rules, skip, before in reversed(lines):
        verdict = rules.verdict(before + path[skip:], is_dir=is_dir)
        if verdict is not None:
            return verdict
    return False


def _is_report(entry: os.DirEntry[str]) -> bool:
    """Return whether the file is a cloudtrain report beside the code, which would change the hash of the code."""
    if not entry.name.endswith(".html"):
        return False
    try:
        return is_report(Path(entry.path))
    except OSError:  # the packing step reports the error
        return False


def _links_and_modes(folder: Path, found: dict[str, _File]) -> Iterator[Fault]:
    links = [name for name in sorted(found) if found[name].is_link]
    shipped = {parent for name in found for parent in (name, *_parents(name))} if links else set()
    for name in links:
        if why := _why_not_shipped(folder / name, folder, shipped):
            hint = "copy what it points to, or exclude it"
            yield Fault(f"the link `{name}` {why}", key="code.dir", hint=hint)
    for name, file in found.items():
        if not file.is_link and file.mode & 0o444 != 0o444 and not os.access(folder / name, os.R_OK):
            yield Fault(f"`{name}` cannot be read", key="code.dir", hint="change its mode, or exclude it")


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _why_not_shipped(link: Path, folder: Path, shipped: set[str]) -> str | None:
    """Return why the target of a link would be missing on a node, or None."""
    try:
        target = link.resolve()
    except (OSError, RuntimeError):  # RuntimeError before Python 3.13
        return "leads to itself"
    if target.is_symlink():
        return "leads to itself"
    if not target.is_relative_to(folder):
        return "points outside the code folder"
    if target.exists() and target != folder and target.relative_to(folder).as_posix() not in shipped:
        return "points to what is not shipped"
    return None
